// Machine code of translation units: memory, then the wheel's own library, then the disk, then the compiler.
#pragma once

#include <memory>
#include <string>

namespace jaxdnn {

struct Cubin {
  std::string key;
  std::string arch;
  std::string code;
};

struct CompiledUnit {
  std::shared_ptr<const Cubin> cubin;
  std::string origin;  // "memory", "library", "disk" or "compiler"
  double seconds;
  std::string log;
};

// The unit's machine code for `arch`. Threads that ask for the same unit at once share one compilation. Throws
// Unavailable or CompileError; neither is remembered.
//
// A key is the SHA-256 of the unit, the kernel headers that it includes, the options, the architecture and NVRTC's
// version. The version is that of the NVRTC at hand: without any, nothing on disk can be matched and the call is
// Unavailable, even if an earlier NVRTC once compiled the unit. The wheel's library knows the version that filled it,
// and serves without an NVRTC.
CompiledUnit compile_unit(const std::string& unit, const std::string& arch);

void clear_memory_cache();

}  // namespace jaxdnn
