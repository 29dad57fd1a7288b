// core/ptx_math.cuh in plain C++.
#pragma once

#include "cuda.h"

namespace jaxdnn::ptx {

inline float maximum(float a, float b) { return a > b || a != a ? a : b; }
inline float minimum(float a, float b) { return a < b || a != a ? a : b; }
inline float approximate_reciprocal(float value) { return 1 / value; }
inline float approximate_exp2(float value) { return ::exp2f(value); }

}  // namespace jaxdnn::ptx
