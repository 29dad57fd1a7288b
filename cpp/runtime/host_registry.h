// The kernels for the CPU, by name and instruction set.
#pragma once

#include <string>
#include <vector>

#include "../host/base/kernel.h"

namespace jaxdnn {

// The instruction sets that this build has and this processor and its operating system support, best first; those above
// JAXDNN_HOST_ISA, where it is set, left out. Throws PlanError if that names none.
std::vector<std::string> host_isas();

// What kernels of "avx512" use beyond it, best first.
std::vector<std::string> host_extensions();

// `isa` empty: the best. Throws PlanError when there is no such kernel or instruction set.
HostKernel host_kernel(const std::string& name, const std::string& isa);

std::vector<std::string> host_kernel_names();

}  // namespace jaxdnn
