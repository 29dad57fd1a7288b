// core/ptx_math.cuh in plain C++.
#pragma once

#include "cuda.h"

namespace jaxdnn::ptx {

inline float maximum(float a, float b) { return a > b || a != a ? a : b; }
inline float minimum(float a, float b) { return a < b || a != a ? a : b; }
inline float approximate_reciprocal(float value) { return 1 / value; }

}  // namespace jaxdnn::ptx
