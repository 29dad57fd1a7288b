// ptx/math.cuh in plain C++.
#pragma once

#include "cuda.h"

namespace jaxdnn::ptx {

inline float max_nan(float a, float b) { return a > b || a != a ? a : b; }
inline float min_nan(float a, float b) { return a < b || a != a ? a : b; }
inline float rcp_approx_ftz(float value) { return 1 / value; }
inline float ex2_approx_ftz(float value) { return ::exp2f(value); }

}  // namespace jaxdnn::ptx
