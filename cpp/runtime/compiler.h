// The run-time compiler, NVRTC: where it lies, which version it is, and one compilation.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernel_headers.h"

namespace jaxdnn {

struct CompilerVersion {
  int major = 0;
  int minor = 0;
  std::string text() const { return std::to_string(major) + "." + std::to_string(minor); }
};

struct Compilation {
  std::string cubin;
  std::string log;
  CompilerVersion version;
};

struct CompilerDescription {
  std::string path;
  std::string builtins;
  CompilerVersion version;
  std::vector<int> architectures;
};

// What is passed to NVRTC and changes the code that it makes, besides the architecture; part of the cache key.
const std::vector<std::string>& compile_options();

// Safe to use from many threads at once, as NVRTC is.
class Compiler {
 public:
  // `directories` are searched in order, and then the loader's own path.
  explicit Compiler(std::vector<std::string> directories);
  ~Compiler();

  // All three throw Unavailable where there is no NVRTC.
  //
  // The version costs no loading of NVRTC (30 ms and more) where the name of its builtins library tells it, so that a
  // unit that lies in the disk cache is had without NVRTC in memory.
  CompilerVersion version();
  CompilerDescription describe();
  // Throws Unavailable if this NVRTC doesn't know `arch`, and CompileError if it rejects the unit.
  Compilation compile(const std::string& name, const std::string& unit, const std::string& arch,
                      const std::vector<const KernelHeader*>& headers);

 private:
  struct Nvrtc;

  const Nvrtc& nvrtc();

  std::vector<std::string> directories_;
  std::mutex mutex_;  // guards what follows
  std::unique_ptr<Nvrtc> nvrtc_;
  std::optional<CompilerVersion> version_;
};

// The process's compiler.
std::shared_ptr<Compiler> compiler();
// Replaces it by one that searches `directories`.
void set_library_paths(std::vector<std::string> directories);

}  // namespace jaxdnn
