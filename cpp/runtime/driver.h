// The CUDA driver: its functions, the devices, and the kernels loaded into it.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cache.h"
#include "cuda_api.h"

namespace jaxdnn {

struct DeviceDescription {
  std::string name;
  std::pair<int, int> compute_capability;
  int sm_count;
  int shared_memory_per_block;
  int l2_bytes;
  size_t memory_bytes;
};

struct DriverDescription {
  std::string path;
  std::pair<int, int> version;
  std::vector<DeviceDescription> devices;
};

// libcuda's functions, by their own names.
class Driver {
 public:
#define JAXDNN_MEMBER(name, ...) std::add_pointer_t<__VA_ARGS__> name = nullptr;
  JAXDNN_CUDA_FUNCTIONS(JAXDNN_MEMBER)
#undef JAXDNN_MEMBER

  // Loads and initialises libcuda at the first call. Throws Unavailable.
  static const Driver& get();
  // Whether get() returns.
  static bool available();

  DriverDescription describe() const;
  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
  std::string error(CUresult result) const;

 private:
  struct Attempt;

  void load();
  std::string path_;
};

// A kernel that any device may launch.
class Kernel {
 public:
  Kernel(std::string name, CUkernel handle) : name_(std::move(name)), handle_(handle) {}

  const std::string& name() const { return name_; }
  // The driver takes a CUkernel where it takes a function, and finds the device by the stream.
  CUfunction function() const { return reinterpret_cast<CUfunction>(handle_); }

  // Allows launches with this much dynamic shared memory, and clusters of more than 8 blocks, on the current device.
  // Asks the driver once per device. Returns a failure's description, or the empty string.
  std::string allow(const Driver& driver, int shared_memory, int cluster_size);

 private:
  static constexpr int kDevices = 64;

  std::string name_;
  CUkernel handle_;
  std::mutex mutex_;
  std::array<std::atomic<int>, kDevices> shared_memory_{};
  std::array<std::atomic<bool>, kDevices> large_clusters_{};
};

// A cubin loaded into the driver. Never unloaded: captured graphs may hold its kernels.
class KernelLibrary {
 public:
  KernelLibrary(std::string key, CUlibrary handle) : key_(std::move(key)), handle_(handle) {}

  // Throws PlanError when there is no such kernel.
  Kernel* kernel(const std::string& name);

  // One of the library's `count` counters (jaxdnn/plan.py), or -1 when all are taken.
  int take_counter(int64_t count);
  void give_back_counter(int64_t counter);

 private:
  std::string key_;
  CUlibrary handle_;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
  std::vector<bool> counters_;  // whether each is taken
};

// Loads a cubin, once per process. Needs no current context. Throws Unavailable.
KernelLibrary& load_library(const Cubin& cubin);

}  // namespace jaxdnn
