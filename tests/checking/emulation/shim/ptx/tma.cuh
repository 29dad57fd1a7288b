// ptx/tma.cuh's stores on the CPU. (Its loads end at barriers in shared memory, which are left to a GPU.)
#pragma once

#include "launch.h"
#include "ptx/memory.cuh"

namespace jaxdnn {

/// checking/emulation/plans.py fills it in. Sizes count elements, strides bytes.
struct TensorMap {
  unsigned char* data;
  long long itemsize, swizzle;  // bytes of a row of shared memory whose chunks of 16 are exchanged
  long long sizes[3], strides[3], box[3];
};

namespace ptx {

inline void cp_async_bulk_tensor_store(const TensorMap* map, unsigned source, int x, int y, int z) {
  const emulation::Thread* const thread = emulation::machine.current;
  emulation::machine.current->stores.start([=] {
    const long long row_bytes = map->box[0] * map->itemsize;
    for (long long i = 0; i < map->box[0] * map->box[1] * map->box[2]; ++i) {
      const long long at[3] = {x + i % map->box[0], y + i / map->box[0] % map->box[1],
                               z + i / map->box[0] / map->box[1]};
      unsigned from = source + i / map->box[0] * row_bytes + i % map->box[0] * map->itemsize;
      from ^= (from >> 7) % (map->swizzle / 16) << 4;
      unsigned char* to = map->data;
      bool inside = true;
      for (int axis = 0; axis < 3; ++axis) {
        inside &= 0 <= at[axis] && at[axis] < map->sizes[axis];
        to += at[axis] * map->strides[axis];
      }
      if (inside) std::memcpy(to, thread->block->dynamic.data() + from, map->itemsize);
    }
  });
}

inline void cp_async_bulk_commit_group() { emulation::machine.current->stores.commit(); }

template <int kPending>
void cp_async_bulk_wait_group_read() {
  emulation::machine.current->stores.wait(kPending);
}

inline void fence_proxy_async() {}

}  // namespace ptx
}  // namespace jaxdnn
