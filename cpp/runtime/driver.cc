#include "driver.h"

#include <algorithm>
#include <optional>

#include "dynamic_library.h"
#include "error.h"

namespace jaxdnn {
namespace {

// The most blocks of a cluster that every GPU supports; more must be allowed.
constexpr int kPortableClusterSize = 8;

}  // namespace

void Driver::load() {
  DynamicLibrary library("libcuda.so.1");
  if (!library.loaded()) {
    throw Unavailable("the CUDA driver can't be loaded: " + library.error() +
                      ". Install NVIDIA's driver, or run on the CPU.");
  }
  path_ = library.path("cuInit");
#define JAXDNN_BIND(function, ...)                                                   \
  if (!library.bind(function, #function)) {                                          \
    throw Unavailable(path_ + " has no " #function                                   \
                              ": update NVIDIA's driver to version 525 (CUDA 12.0) " \
                              "or newer.");                                          \
  }
  JAXDNN_CUDA_FUNCTIONS(JAXDNN_BIND)
#undef JAXDNN_BIND
  if (CUresult result = cuInit(0); result != CUDA_SUCCESS) {
    throw Unavailable("the CUDA driver (" + path_ + ") can't be initialised: " + error(result) +
                      ". Check with nvidia-smi that a GPU is visible, or run on the CPU.");
  }
}

// A failure is remembered too: cuInit gives the same answer for the life of the process.
struct Driver::Attempt {
  Driver driver;
  std::optional<Unavailable> failure;

  static const Attempt& first() {
    static const Attempt& attempt = [] {
      auto* first = new Attempt;
      try {
        first->driver.load();
      } catch (const Unavailable& failure) {
        first->failure = failure;
      }
      return std::ref(*first);
    }();
    return attempt;
  }
};

const Driver& Driver::get() {
  const Attempt& attempt = Attempt::first();
  if (attempt.failure) throw *attempt.failure;
  return attempt.driver;
}

bool Driver::available() { return !Attempt::first().failure; }

std::string Driver::error(CUresult result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  return std::string(name == nullptr ? "unknown error " + std::to_string(result) : name) +
         (text == nullptr ? "" : " (" + std::string(text) + ")");
}

DriverDescription Driver::describe() const {
  auto check = [&](CUresult result, const char* what) {
    if (result != CUDA_SUCCESS) throw Unavailable(std::string(what) + " failed with " + error(result));
  };
  DriverDescription description{path_, {}, {}};
  int version = 0, count = 0;
  check(cuDriverGetVersion(&version), "cuDriverGetVersion");
  description.version = {version / 1000, version % 1000 / 10};
  check(cuDeviceGetCount(&count), "cuDeviceGetCount");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device;
    check(cuDeviceGet(&device, ordinal), "cuDeviceGet");
    auto attribute = [&](int which) {
      int value = 0;
      check(cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
      return value;
    };
    char name[256] = "";
    size_t memory = 0;
    check(cuDeviceGetName(name, sizeof(name), device), "cuDeviceGetName");
    check(cuDeviceTotalMem_v2(&memory, device), "cuDeviceTotalMem");
    description.devices.push_back({name,
                                   {attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                                    attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)},
                                   attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
                                   attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
                                   attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
                                   memory});
  }
  return description;
}

std::string Kernel::allow(const Driver& driver, int shared_memory, int cluster_size) {
  bool large_cluster = cluster_size > kPortableClusterSize;
  if (shared_memory == 0 && !large_cluster) return "";
  CUdevice device;
  if (CUresult result = driver.cuCtxGetDevice(&device); result != CUDA_SUCCESS) {
    return "cuCtxGetDevice failed with " + driver.error(result);
  }
  if (device < 0 || device >= kDevices) return "device " + std::to_string(device) + " is beyond the 64 supported";
  // Without being allowed more, a kernel may use 48 KiB in all, less what it declares statically, which we don't know:
  // so every size is asked for. The attribute is the kernel's, which plans of different sizes share: it only ever
  // grows.
  if (shared_memory_[device] >= shared_memory && (large_clusters_[device] || !large_cluster)) return "";
  std::lock_guard lock(mutex_);
  if (shared_memory_[device] < shared_memory) {
    CUresult result =
        driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_memory, handle_, device);
    if (result != CUDA_SUCCESS) {
      return std::to_string(shared_memory) + " bytes of dynamic shared memory: cuKernelSetAttribute failed with " +
             driver.error(result);
    }
    shared_memory_[device] = shared_memory;
  }
  if (large_cluster && !large_clusters_[device]) {
    CUresult result =
        driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, handle_, device);
    if (result != CUDA_SUCCESS) {
      return "a cluster of " + std::to_string(cluster_size) + " blocks: cuKernelSetAttribute failed with " +
             driver.error(result);
    }
    large_clusters_[device] = true;
  }
  return "";
}

Kernel* KernelLibrary::kernel(const std::string& name) {
  std::lock_guard lock(mutex_);
  std::unique_ptr<Kernel>& kernel = kernels_[name];
  if (!kernel) {
    const Driver& driver = Driver::get();
    CUkernel handle = nullptr;
    if (CUresult result = driver.cuLibraryGetKernel(&handle, handle_, name.c_str()); result != CUDA_SUCCESS) {
      kernels_.erase(name);
      throw PlanError("kernel " + name + " isn't in unit " + key_.substr(0, 12) + ": cuLibraryGetKernel failed with " +
                      driver.error(result) + ". The kernel must be declared extern \"C\" __global__ in the unit.");
    }
    kernel = std::make_unique<Kernel>(name, handle);
  }
  return kernel.get();
}

int KernelLibrary::take_counter(int64_t count) {
  std::lock_guard lock(mutex_);
  counters_.resize(count);
  auto free = std::find(counters_.begin(), counters_.end(), false);
  if (free == counters_.end()) return -1;
  *free = true;
  return static_cast<int>(free - counters_.begin());
}

void KernelLibrary::give_back_counter(int64_t counter) {
  std::lock_guard lock(mutex_);
  if (counter >= 0) counters_[counter] = false;
}

KernelLibrary& load_library(const Cubin& cubin) {
  static auto& mutex = *new std::mutex;
  static auto& libraries = *new std::map<std::string, std::unique_ptr<KernelLibrary>>;
  const Driver& driver = Driver::get();
  std::lock_guard lock(mutex);
  std::unique_ptr<KernelLibrary>& library = libraries[cubin.key];
  if (!library) {
    CUlibrary handle = nullptr;
    CUresult result = driver.cuLibraryLoadData(&handle, cubin.code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result != CUDA_SUCCESS) {
      libraries.erase(cubin.key);
      throw Unavailable("the driver can't load unit " + cubin.key.substr(0, 12) + ", compiled for " + cubin.arch +
                        ": cuLibraryLoadData failed with " + driver.error(result) +
                        ". Code for another GPU? Otherwise update NVIDIA's driver, or install an older NVRTC.");
    }
    library = std::make_unique<KernelLibrary>(cubin.key, handle);
  }
  return *library;
}

}  // namespace jaxdnn
