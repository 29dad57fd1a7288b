// jaxdnn._native: what Python sees of the runtime. jaxdnn/_native.pyi describes it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <cstdlib>
#include <thread>

#include "cache.h"
#include "compiler.h"
#include "cuda_launcher.h"
#include "disk_cache.h"
#include "driver.h"
#include "error.h"
#include "host_launcher.h"
#include "host_registry.h"
#include "log.h"

namespace nb = nanobind;

namespace jaxdnn {
namespace {

nb::dict registration(XLA_FFI_TypeId* type_id, XLA_FFI_TypeInfo* type_info, XLA_FFI_Handler* instantiate,
                      XLA_FFI_Handler* execute) {
  nb::dict type, handlers, all;
  type["type_id"] = nb::capsule(type_id);
  type["type_info"] = nb::capsule(type_info);
  handlers["instantiate"] = nb::capsule(reinterpret_cast<void*>(instantiate));
  handlers["execute"] = nb::capsule(reinterpret_cast<void*>(execute));
  all["type"] = type;
  all["handlers"] = handlers;
  return all;
}

nb::dict registrations() {
  nb::dict platforms;
  platforms["cpu"] = registration(host_state_type_id, host_state_type_info, host_instantiate, host_execute);
  platforms["CUDA"] = registration(cuda_state_type_id, cuda_state_type_info, cuda_instantiate, cuda_execute);
  return platforms;
}

CompiledUnit compile(const std::string& unit, const std::string& arch) {
  nb::gil_scoped_release release;
  return compile_unit(unit, arch);
}

void load(const std::string& unit, const std::string& arch) {
  nb::gil_scoped_release release;
  Driver::get();  // without a driver there is nothing to compile for
  load_library(*compile_unit(unit, arch).cubin);
}

nb::dict describe_compiler() {
  CompilerDescription description;
  {
    nb::gil_scoped_release release;
    description = jaxdnn::compiler()->describe();
  }
  nb::dict result;
  result["path"] = description.path;
  result["builtins"] = description.builtins;
  result["version"] = nb::make_tuple(description.version.major, description.version.minor);
  result["architectures"] = description.architectures;
  return result;
}

nb::dict describe_driver() {
  DriverDescription description;
  {
    nb::gil_scoped_release release;
    description = Driver::get().describe();
  }
  nb::list devices;
  for (const DeviceDescription& device : description.devices) {
    nb::dict entry;
    entry["name"] = device.name;
    entry["compute_capability"] = device.compute_capability;
    entry["sm_count"] = device.sm_count;
    entry["shared_memory_per_block"] = device.shared_memory_per_block;
    entry["l2_bytes"] = device.l2_bytes;
    entry["memory_bytes"] = device.memory_bytes;
    devices.append(entry);
  }
  nb::dict result;
  result["path"] = description.path;
  result["version"] = description.version;
  result["devices"] = devices;
  return result;
}

// As many as XLA gives its own pool.
int64_t host_threads() {
  for (const char* name : {"PJRT_NPROC", "NPROC"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && std::atoll(value) > 0) return std::atoll(value);
  }
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return CPU_COUNT(&allowed);
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

nb::dict describe_host() {
  std::vector<std::string> isas = host_isas();
  nb::dict result;
  result["isa"] = isas.front();
  result["isas"] = isas;
  result["extensions"] = host_extensions();
  result["threads"] = host_threads();
  return result;
}

nb::dict describe_cache() {
  DiskCache disk = DiskCache::of_user();
  DiskCache::Usage usage = disk.usage();
  nb::dict result;
  result["directory"] = disk.directory();
  result["entries"] = usage.entries;
  result["bytes"] = usage.bytes;
  result["limit"] = disk.limit();
  result["trusted"] = usage.trusted;
  result["writable"] = usage.writable;
  return result;
}

std::map<std::string, std::string> header_texts() {
  std::map<std::string, std::string> texts;
  for (const KernelHeader& header : kernel_headers()) texts.emplace(header.name, header.text);
  return texts;
}

std::map<std::string, int64_t> counter_values() {
  return {{"executes", counters.executes},
          {"instantiates", counters.instantiates},
          {"compiles", counters.compiles},
          {"memory_hits", counters.memory_hits},
          {"disk_hits", counters.disk_hits},
          {"execute_nanoseconds", counters.execute_nanoseconds},
          {"scratch_allocations", counters.scratch_allocations}};
}

void set_log_from_python(int level, const std::string& path) {
  if (level < 0 || level > 2) throw nb::value_error("set_log: level must be 0 (warnings), 1 (info) or 2 (debug)");
  set_log(static_cast<LogLevel>(level), path);
}

}  // namespace
}  // namespace jaxdnn

NB_MODULE(_native, m) {
  using namespace jaxdnn;
  nb::exception<Unavailable>(m, "Unavailable", PyExc_RuntimeError);
  nb::exception<CompileError>(m, "CompileError", PyExc_RuntimeError);

  nb::class_<CompiledUnit>(m, "CompiledUnit")
      .def_prop_ro("cubin",
                   [](const CompiledUnit& self) { return nb::bytes(self.cubin->code.data(), self.cubin->code.size()); })
      .def_ro("origin", &CompiledUnit::origin)
      .def_ro("seconds", &CompiledUnit::seconds)
      .def_ro("log", &CompiledUnit::log)
      .def_prop_ro("key", [](const CompiledUnit& self) { return self.cubin->key; });

  m.def("registrations", &registrations);
  m.def("compile", &jaxdnn::compile, nb::arg("unit"), nb::arg("arch"));
  m.def("load", &jaxdnn::load, nb::arg("unit"), nb::arg("arch"));
  m.def("compiler", &describe_compiler);
  m.def("driver", &describe_driver);
  m.def("host", &describe_host);
  m.def("cache", &describe_cache);
  m.def("clear_memory_cache", &clear_memory_cache);
  m.def("kernel_headers", &header_texts);
  m.def("host_kernels", &host_kernel_names);
  m.def("counters", &counter_values);
  m.def("set_log", &set_log_from_python, nb::arg("level"), nb::arg("path"));
  m.def("set_library_paths", &set_library_paths, nb::arg("paths"));

  set_library_paths(nb::cast<std::vector<std::string>>(nb::module_::import_("jaxdnn._libraries").attr("candidates")()));
}
