// What a kernel for the CPU looks like, and how its file offers it to the runtime.
//
// Every `cpp/host/**/*.cc` is compiled once per instruction set ("baseline", "avx2", "avx512"), with JAXDNN_ISA set to
// that name, and has this shape:
//
//     #include "../base/kernel.h"
//
//     JAXDNN_ISA_BEGIN
//     template <typename T> void scale(const void* const* arguments, int64_t task) { ... }
//     JAXDNN_ISA_END
//
//     JAXDNN_HOST_KERNELS({"scale_float32", scale<float>}, {"scale_float64", scale<double>})
//
// Everything that such a file defines, and every header that only such files include, stays between JAXDNN_ISA_BEGIN
// and JAXDNN_ISA_END: an inline function or template of one name in two instruction sets would be merged by the linker.
#pragma once

#include <cstddef>
#include <cstdint>

// Whether the compiler knows AMX and AVX512-BF16. Clang has them all in one header, GCC in several.
#if defined(__x86_64__) && defined(__linux__) && (__has_include(<amxint8intrin.h>) || __has_include(<amxintrin.h>))
#define JAXDNN_COMPILES_AMX 1
#else
#define JAXDNN_COMPILES_AMX 0
#endif

namespace jaxdnn {

// `arguments[i]` points at the data of a buffer, or at the value of a scalar:
//     const float* x = static_cast<const float*>(arguments[0]);
//     int64_t rows = *static_cast<const int64_t*>(arguments[3]);
// `task` counts from 0 to grid[0] - 1; tasks of one launch run concurrently and in any order. A kernel throws nothing.
using HostKernel = void (*)(const void* const* arguments, int64_t task);

struct HostKernelEntry {
  const char* name;
  HostKernel function;
};

// The kernels of one file, for one instruction set.
struct HostKernelTable {
  const HostKernelEntry* entries;
  size_t count;
};

// Whether the processor has an instruction set, and JAXDNN_HOST_ISA allows it. The runtime defines it, for kernels that
// choose as they run: "avx512_bf16" and "amx" are compiled into those of "avx512".
bool isa_usable(const char* isa);

}  // namespace jaxdnn

#ifdef JAXDNN_ISA

#define JAXDNN_ISA_BEGIN namespace jaxdnn::JAXDNN_ISA {
#define JAXDNN_ISA_END }

// The build defines JAXDNN_HOST_FILE, the file's path with underscores, and lists the tables of all files and
// instruction sets for the registry (cpp/runtime/host_registry.cc), so a new file needs no other change.
#define JAXDNN_HOST_TABLE JAXDNN_JOIN(JAXDNN_HOST_FILE, JAXDNN_ISA)
#define JAXDNN_JOIN(file, isa) JAXDNN_JOIN_EXPANDED(file, isa)
#define JAXDNN_JOIN_EXPANDED(file, isa) host_table_##file##_##isa

#define JAXDNN_HOST_KERNELS(...)                                \
  namespace jaxdnn {                                            \
  HostKernelTable JAXDNN_HOST_TABLE() {                         \
    using namespace JAXDNN_ISA;                                 \
    static constexpr HostKernelEntry entries[] = {__VA_ARGS__}; \
    return {entries, sizeof(entries) / sizeof(entries[0])};     \
  }                                                             \
  }

#endif  // JAXDNN_ISA
