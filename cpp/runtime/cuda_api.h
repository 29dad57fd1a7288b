// The part of the CUDA driver's and NVRTC's C interfaces that the runtime calls, declared here so that building needs
// nothing of CUDA. Names and values are those of NVIDIA's public API reference.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxdnn {

using CUresult = int;
using CUdevice = int;
using CUstream = struct CUstream_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;

inline constexpr CUresult CUDA_SUCCESS = 0;

// CUdevice_attribute
inline constexpr int CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
inline constexpr int CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38;
inline constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
inline constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
inline constexpr int CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97;

// CUfunction_attribute
inline constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
inline constexpr int CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14;

// CUlaunchAttributeID
inline constexpr int CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4;

union CUlaunchAttributeValue {
  char pad[64];
  struct {
    unsigned x, y, z;
  } clusterDim;
};

struct CUlaunchAttribute {
  int id;
  char pad[4];
  CUlaunchAttributeValue value;
};

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

static_assert(sizeof(CUlaunchAttribute) == 72 && sizeof(CUlaunchConfig) == 56 && sizeof(CUtensorMap) == 128);

// Every function is of CUDA 12.0 or earlier.
#define JAXDNN_CUDA_FUNCTIONS(X)                                                                                    \
  X(cuInit, CUresult(unsigned flags))                                                                               \
  X(cuDriverGetVersion, CUresult(int* version))                                                                     \
  X(cuGetErrorName, CUresult(CUresult error, const char** name))                                                    \
  X(cuGetErrorString, CUresult(CUresult error, const char** text))                                                  \
  X(cuDeviceGetCount, CUresult(int* count))                                                                         \
  X(cuDeviceGet, CUresult(CUdevice* device, int ordinal))                                                           \
  X(cuDeviceGetName, CUresult(char* name, int size, CUdevice device))                                               \
  X(cuDeviceTotalMem_v2, CUresult(size_t* bytes, CUdevice device))                                                  \
  X(cuDeviceGetAttribute, CUresult(int* value, int attribute, CUdevice device))                                     \
  X(cuCtxGetDevice, CUresult(CUdevice* device))                                                                     \
  X(cuLibraryLoadData, CUresult(CUlibrary* library, const void* code, int* jit_options, void** jit_values,          \
                                unsigned jit_count, int* options, void** values, unsigned count))                   \
  X(cuLibraryGetKernel, CUresult(CUkernel* kernel, CUlibrary library, const char* name))                            \
  X(cuKernelSetAttribute, CUresult(int attribute, int value, CUkernel kernel, CUdevice device))                     \
  X(cuLaunchKernelEx, CUresult(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra)) \
  X(cuTensorMapEncodeTiled,                                                                                         \
    CUresult(CUtensorMap* map, int dtype, uint32_t rank, void* address, const uint64_t* dimensions,                 \
             const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,         \
             int swizzle, int l2_promotion, int fill))                                                              \
  X(cuTensorMapEncodeIm2col,                                                                                        \
    CUresult(CUtensorMap* map, int dtype, uint32_t rank, void* address, const uint64_t* dimensions,                 \
             const uint64_t* strides, const int* lower, const int* upper, uint32_t channels, uint32_t places,       \
             const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion, int fill))

using nvrtcResult = int;
using nvrtcProgram = struct _nvrtcProgram*;

inline constexpr nvrtcResult NVRTC_SUCCESS = 0;
inline constexpr nvrtcResult NVRTC_ERROR_COMPILATION = 6;

#define JAXDNN_NVRTC_FUNCTIONS(X)                                                                                  \
  X(nvrtcVersion, nvrtcResult(int* major, int* minor))                                                             \
  X(nvrtcGetNumSupportedArchs, nvrtcResult(int* count))                                                            \
  X(nvrtcGetSupportedArchs, nvrtcResult(int* architectures))                                                       \
  X(nvrtcGetErrorString, const char*(nvrtcResult error))                                                           \
  X(nvrtcCreateProgram, nvrtcResult(nvrtcProgram* program, const char* source, const char* name, int header_count, \
                                    const char* const* headers, const char* const* include_names))                 \
  X(nvrtcDestroyProgram, nvrtcResult(nvrtcProgram* program))                                                       \
  X(nvrtcCompileProgram, nvrtcResult(nvrtcProgram program, int option_count, const char* const* options))          \
  X(nvrtcGetProgramLogSize, nvrtcResult(nvrtcProgram program, size_t* size))                                       \
  X(nvrtcGetProgramLog, nvrtcResult(nvrtcProgram program, char* log))                                              \
  X(nvrtcGetCUBINSize, nvrtcResult(nvrtcProgram program, size_t* size))                                            \
  X(nvrtcGetCUBIN, nvrtcResult(nvrtcProgram program, char* cubin))

}  // namespace jaxdnn
