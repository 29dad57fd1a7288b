// What of a block of scores the mask hides, as lists of blocks and spans of keys say (attention/lists.cuh).
#pragma once

namespace jaxdnn {

/// Nothing; what lies beyond the first and the last key that a query sees; or what its function has to be asked, too.
enum class Edge { none, counted, asked };

__device__ __forceinline__ int list_entry(int block, Edge edge) { return 4 * block + static_cast<int>(edge); }
__device__ __forceinline__ int listed_block(int entry) { return entry / 4; }
__device__ __forceinline__ Edge listed_edge(int entry) { return static_cast<Edge>(entry % 4); }

/// Neighbouring keys: the first, and the end.
struct __align__(8) KeySpan {
  int first, end;
};

}  // namespace jaxdnn
