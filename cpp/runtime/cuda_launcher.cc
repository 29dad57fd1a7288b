#include "cuda_launcher.h"

#include <chrono>
#include <memory>

#include "cache.h"
#include "cuda_api.h"
#include "driver.h"
#include "handler.h"
#include "log.h"
#include "plan.h"

namespace jaxdnn {
namespace {

// The state of one call site. One executable may run on several devices: nothing here belongs to one.
struct CudaPlan {
  static ffi::TypeId id;
  Plan plan;
  std::vector<Kernel*> kernels;  // of each launch
  KernelLibrary* library = nullptr;

  CudaPlan() = default;
  CudaPlan(const CudaPlan&) = delete;
  CudaPlan& operator=(const CudaPlan&) = delete;
  ~CudaPlan() {
    for_counters([this](Argument& argument) { library->give_back_counter(argument.bits); });
  }

  // XLA runs one call site once at a time on a device, so a counter of its own is no other call's.
  void take_counters() {
    for_counters([this](Argument& argument) { argument.bits = library->take_counter(argument.index); });
  }

 private:
  template <typename Do>
  void for_counters(const Do& act) {
    if (library == nullptr) return;
    for (Launch& launch : plan.launches) {
      for (Argument& argument : launch.arguments) {
        if (argument.kind == Argument::Kind::counter) act(argument);
      }
    }
  }
};

ffi::TypeId CudaPlan::id = {};

ffi::TypeInfo type_info = ffi::MakeTypeInfo<CudaPlan>();

// What the driver accepts.
void check_geometry(const Launch& launch) {
  auto require = [&](bool condition, const char* limit) {
    if (!condition) throw PlanError("kernel " + launch.kernel + ": " + limit);
  };
  const auto& [x, y, z] = launch.grid;
  require(x <= 0x7fffffff && y <= 65535 && z <= 65535, "the grid is larger than 2147483647 x 65535 x 65535");
  require(launch.block[0] * launch.block[1] * launch.block[2] <= 1024, "the block has more than 1024 threads");
  require(launch.cluster[0] * launch.cluster[1] * launch.cluster[2] <= 16, "the cluster has more than 16 blocks");
}

ffi::ErrorOr<std::unique_ptr<CudaPlan>> instantiate(ffi::Dictionary attributes) {
  std::string op = "a plan";
  try {
    auto state = std::make_unique<CudaPlan>();
    state->plan = decode_plan(attributes);
    const Plan& plan = state->plan;
    op = plan.op;
    for (const Launch& launch : plan.launches) check_geometry(launch);
    CompiledUnit unit = compile_unit(plan.unit, plan.arch);
    // XLA also compiles where there is no GPU, for one that is described to it: nothing runs there.
    if (Driver::available()) {
      KernelLibrary& library = load_library(*unit.cubin);
      for (const Launch& launch : plan.launches) state->kernels.push_back(library.kernel(launch.kernel));
      state->library = &library;
      state->take_counters();
    }
    ++counters.instantiates;
    if (log_enabled(LogLevel::debug)) {
      log_line(LogLevel::debug, "instantiate: " + op + " for " + plan.arch + " with unit " +
                                    unit.cubin->key.substr(0, 12) + " from " + unit.origin);
    }
    return state;
  } catch (...) {
    return ffi::Unexpected(current_error(op));
  }
}

class DriverFailure : public std::runtime_error {
 public:
  DriverFailure(const Launch& launch, const std::string& what)
      : std::runtime_error("kernel " + launch.kernel + ": " + what) {}
};

void encode(const Driver& driver, const Launch& launch, const TensorMap& map, void* address, CUtensorMap* encoded) {
  uint32_t rank = static_cast<uint32_t>(map.dimensions.size());
  bool tiled = map.lower.empty();
  CUresult result = tiled
                        ? driver.cuTensorMapEncodeTiled(encoded, map.dtype, rank, address, map.dimensions.data(),
                                                        map.strides.data(), map.box.data(), map.element_strides.data(),
                                                        map.interleave, map.swizzle, map.l2_promotion, map.fill)
                        : driver.cuTensorMapEncodeIm2col(encoded, map.dtype, rank, address, map.dimensions.data(),
                                                         map.strides.data(), map.lower.data(), map.upper.data(),
                                                         map.box[0], map.box[1], map.element_strides.data(),
                                                         map.interleave, map.swizzle, map.l2_promotion, map.fill);
  if (result == CUDA_SUCCESS) return;
  const char* called = tiled ? "cuTensorMapEncodeTiled" : "cuTensorMapEncodeIm2col";
  throw DriverFailure(launch, called + (" failed with " + driver.error(result)) + " for a tensor map of " +
                                  (map.buffer.is_result ? "result " : "operand ") + std::to_string(map.buffer.index) +
                                  ": its engine must meet the driver's rules for strides, box and swizzle");
}

void launch_kernel(const Driver& driver, CUstream stream, const Plan& plan, const Launch& launch, Kernel& kernel,
                   const CallBuffers& buffers) {
  if (launch.grid[0] == 0 || launch.grid[1] == 0 || launch.grid[2] == 0) return;

  void* parameters[kMaxArguments];
  void* addresses[kMaxArguments];
  CUtensorMap maps[kMaxTensorMaps];
  size_t used_maps = 0;
  for (size_t i = 0; i < launch.arguments.size(); ++i) {
    const Argument& argument = launch.arguments[i];
    switch (argument.kind) {
      case Argument::Kind::buffer:
        addresses[i] = buffers.address(argument.buffer);
        parameters[i] = &addresses[i];
        break;
      case Argument::Kind::scalar:
      case Argument::Kind::counter:
        // The driver takes parameters by const reference in all but type.
        parameters[i] = const_cast<int64_t*>(&argument.bits);
        break;
      case Argument::Kind::tensor_map: {
        const TensorMap& map = plan.tensor_maps[argument.index];
        encode(driver, launch, map, buffers.address(map.buffer), &maps[used_maps]);
        parameters[i] = &maps[used_maps++];
        break;
      }
      case Argument::Kind::constant:
      case Argument::Kind::scratch:
        break;  // decode_plan refuses them
    }
  }

  int64_t cluster_size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
  std::string refused = kernel.allow(driver, static_cast<int>(launch.shared_memory), static_cast<int>(cluster_size));
  if (!refused.empty()) throw DriverFailure(launch, refused);

  CUlaunchAttribute cluster{};
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value.clusterDim = {static_cast<unsigned>(launch.cluster[0]), static_cast<unsigned>(launch.cluster[1]),
                              static_cast<unsigned>(launch.cluster[2])};
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(launch.grid[0]);
  config.gridDimY = static_cast<unsigned>(launch.grid[1]);
  config.gridDimZ = static_cast<unsigned>(launch.grid[2]);
  config.blockDimX = static_cast<unsigned>(launch.block[0]);
  config.blockDimY = static_cast<unsigned>(launch.block[1]);
  config.blockDimZ = static_cast<unsigned>(launch.block[2]);
  config.sharedMemBytes = static_cast<unsigned>(launch.shared_memory);
  config.hStream = stream;
  config.attrs = &cluster;
  config.numAttrs = cluster_size > 1 ? 1 : 0;
  if (CUresult result = driver.cuLaunchKernelEx(&config, kernel.function(), parameters, nullptr);
      result != CUDA_SUCCESS) {
    throw DriverFailure(launch, "cuLaunchKernelEx failed with " + driver.error(result) + " for code of " + plan.arch +
                                    ". Choose another engine with jaxdnn.options(engine=...)");
  }
}

// Host work only, and no allocation, synchronisation or read of device memory: XLA may be capturing a CUDA graph.
ffi::Error execute(CUstream stream, CudaPlan* state, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  auto start = std::chrono::steady_clock::now();
  try {
    const Driver& driver = Driver::get();
    CallBuffers buffers(operands, results);
    buffers.check(state->plan);
    for (size_t i = 0; i < state->kernels.size(); ++i) {
      launch_kernel(driver, stream, state->plan, state->plan.launches[i], *state->kernels[i], buffers);
    }
  } catch (...) {
    return current_error(state->plan.op);
  }
  if (log_enabled(LogLevel::debug)) log_line(LogLevel::debug, "execute: " + state->plan.op + " on CUDA");
  counters.executes.fetch_add(1, std::memory_order_relaxed);
  auto elapsed = std::chrono::steady_clock::now() - start;
  counters.execute_nanoseconds.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count(),
                                         std::memory_order_relaxed);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    execute_handler, execute,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream>>().Ctx<ffi::State<CudaPlan>>().RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_TypeId* const cuda_state_type_id = &CudaPlan::id;
XLA_FFI_TypeInfo* const cuda_state_type_info = &type_info;

XLA_FFI_Error* cuda_instantiate(XLA_FFI_CallFrame* frame) { return instantiate_handler(frame); }
XLA_FFI_Error* cuda_execute(XLA_FFI_CallFrame* frame) { return execute_handler(frame); }

}  // namespace jaxdnn
