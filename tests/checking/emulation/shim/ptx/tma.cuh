// ptx/tma.cuh on the CPU.
#pragma once

#include "launch.h"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

namespace jaxdnn {

/// checking/emulation/plans.py fills it in. Sizes count elements, strides bytes. Of one that is im2col, the box is
/// channels and places, which are walked through between corners.
struct TensorMap {
  unsigned char* data;
  long long itemsize, swizzle;  // bytes of a row of shared memory whose chunks of 16 are exchanged
  long long rounds;             // float32 to tf32
  long long sizes[5], strides[5], box[5];
  long long spatial;  // dimensions of places; 0 unless im2col
  long long steps[3], lower[3], upper[3];

  long long elements() const { return box[0] * box[1] * box[2] * box[3] * box[4]; }
  long long bytes() const { return elements() * itemsize; }
};

namespace ptx {

inline unsigned swizzled(const TensorMap& map, unsigned at) { return at ^ (at >> 7) % (map.swizzle / 16) << 4; }

/// For each element of a box, which lies at `shared` in shared memory: where it is there, and in the tensor, or null.
template <class Visit>
void visit_box(const TensorMap& map, unsigned shared, const int (&first)[5], Visit visit) {
  const long long row_bytes = map.box[0] * map.itemsize;
  for (long long i = 0; i < map.elements(); ++i) {
    const unsigned at = swizzled(map, shared + i / map.box[0] * row_bytes + i % map.box[0] * map.itemsize);
    unsigned char* data = map.data;
    bool inside = true;
    long long rest = i;
    for (int axis = 0; axis < 5; ++axis) {
      const long long coordinate = first[axis] + rest % map.box[axis];
      rest /= map.box[axis];
      inside &= 0 <= coordinate && coordinate < map.sizes[axis];
      data += coordinate * map.strides[axis];
    }
    visit(at, inside ? data : nullptr);
  }
}

/// Likewise of a column of places, from `first` on. They pass from one corner to the other of each dimension, and each
/// is read `offset` further.
template <int kSpatial, class Visit>
void visit_places(const TensorMap& map, unsigned shared, int channel, const int (&first)[kSpatial], int image,
                  const unsigned short (&offset)[kSpatial], Visit visit) {
  long long place[kSpatial];
  std::copy_n(first, kSpatial, place);
  for (long long i = 0; i < map.box[1]; ++i) {
    for (long long element = 0; element < map.box[0]; ++element) {
      const unsigned at = swizzled(map, shared + (i * map.box[0] + element) * map.itemsize);
      bool inside =
          0 <= channel + element && channel + element < map.sizes[0] && 0 <= image && image < map.sizes[kSpatial + 1];
      unsigned char* data = map.data + (channel + element) * map.strides[0] + image * map.strides[kSpatial + 1];
      for (int axis = 0; axis < kSpatial; ++axis) {
        const long long coordinate = place[axis] + offset[axis];
        inside &= 0 <= coordinate && coordinate < map.sizes[axis + 1];
        data += coordinate * map.strides[axis + 1];
      }
      visit(at, inside ? data : nullptr);
    }
    int axis = 0;
    while (axis < kSpatial && (place[axis] += map.steps[axis]) > map.sizes[axis + 1] - 1 + map.upper[axis]) {
      place[axis] = map.lower[axis];
      ++axis;
    }
    image += axis == kSpatial;
  }
}

inline void prefetch_tensormap(const TensorMap*) {}

/// What `visits(visit)` has, to the same place in each block of the cluster that `blocks` has a bit for.
template <class Visits>
void load_multicast(unsigned destination, const TensorMap* map, unsigned barrier, unsigned short blocks,
                    Visits visits) {
  const emulation::Cluster& cluster = emulation::machine.current->block->cluster;
  // The pattern of a swizzle is that of addresses, wherever a box begins.
  if (destination % 128) emulation::fail("loads a box to %u, which is not aligned", destination);
  for (emulation::Block* const block : cluster.blocks) {
    if (!(blocks >> block->rank & 1)) continue;
    if (destination + map->bytes() > block->dynamic.size) {
      emulation::fail("loads a box past the end of shared memory");
    }
    const auto load = [=, map = *map] {
      unsigned bytes = 0;
      visits(map, [&](unsigned at, const unsigned char* data) {
        unsigned char* const to = block->dynamic.data() + at;
        data ? std::memcpy(to, data, map.itemsize) : std::memset(to, 0, map.itemsize);
        if (map.rounds) {
          float& value = *reinterpret_cast<float*>(to);
          value = cvt_rna_tf32_f32(value);
        }
        bytes += map.itemsize;
      });
      mbarrier(*block, barrier).bytes -= bytes;
      complete(*block, barrier);
    };
    if (emulation::machine.order == emulation::Order::backward) {
      load();
    } else {
      emulation::machine.boxes.push(load);
    }
  }
}

/// What is not aligned ends with an illegal instruction.
inline void check_innermost(const TensorMap& map, int coordinate) {
  if (coordinate * map.itemsize % 16)
    emulation::fail("a box begins at element %d of a line, not at 16 bytes", coordinate);
}

inline void cp_async_bulk_tensor_load_multicast(unsigned destination, const TensorMap* map, unsigned barrier,
                                                unsigned short blocks, int x, int y, int z, int w = 0, int v = 0) {
  if (map->spatial) emulation::fail("loads a box by the map of an image");
  check_innermost(*map, x);
  load_multicast(destination, map, barrier, blocks,
                 [=](const TensorMap& held, auto visit) { visit_box(held, destination, {x, y, z, w, v}, visit); });
}

inline unsigned short own_block() { return 1 << emulation::machine.current->block->rank; }

inline void cp_async_bulk_tensor_load(unsigned destination, const TensorMap* map, unsigned barrier, int x, int y, int z,
                                      int w = 0, int v = 0) {
  cp_async_bulk_tensor_load_multicast(destination, map, barrier, own_block(), x, y, z, w, v);
}

template <int kSpatial>
void cp_async_bulk_tensor_load_im2col_multicast(unsigned destination, const TensorMap* map, unsigned barrier,
                                                unsigned short blocks, int channel, const int (&place)[kSpatial],
                                                int image, const unsigned short (&offset)[kSpatial]) {
  if (map->spatial != kSpatial) emulation::fail("loads %d-D places by another map", kSpatial);
  check_innermost(*map, channel);
  struct Start {
    int place[kSpatial];
    unsigned short offset[kSpatial];
  } start;
  std::copy_n(place, kSpatial, start.place);
  std::copy_n(offset, kSpatial, start.offset);
  load_multicast(destination, map, barrier, blocks, [=](const TensorMap& held, auto visit) {
    visit_places<kSpatial>(held, destination, channel, start.place, image, start.offset, visit);
  });
}

template <int kSpatial>
void cp_async_bulk_tensor_load_im2col(unsigned destination, const TensorMap* map, unsigned barrier, int channel,
                                      const int (&place)[kSpatial], int image,
                                      const unsigned short (&offset)[kSpatial]) {
  cp_async_bulk_tensor_load_im2col_multicast(destination, map, barrier, own_block(), channel, place, image, offset);
}

inline void cp_async_bulk_tensor_load_evict_first(unsigned destination, const TensorMap* map, unsigned barrier, int x,
                                                  int y, int z) {
  cp_async_bulk_tensor_load(destination, map, barrier, x, y, z);
}

template <bool kEvictFirst>
inline void cp_async_bulk_tensor_store(const TensorMap* map, unsigned source, int x, int y, int z, int w = 0,
                                       int v = 0) {
  check_innermost(*map, x);
  // What is past an end is left out; but this is no instruction to a GPU.
  if (std::min({x, y, z, w, v}) < 0) emulation::fail("stores a box that begins at (%d, %d, %d, %d, %d)", x, y, z, w, v);
  const emulation::Thread* const thread = emulation::machine.current;
  emulation::machine.current->stores.start([=] {
    visit_box(*map, source, {x, y, z, w, v}, [&](unsigned at, unsigned char* data) {
      if (data) std::memcpy(data, thread->block->dynamic.data() + at, map->itemsize);
    });
  });
}

inline void cp_async_bulk_load(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
  emulation::Block* const block = emulation::machine.current->block;
  if (bytes % 16 || destination % 16 || reinterpret_cast<std::uintptr_t>(source) % 16) {
    emulation::fail("loads %u bytes to %u, which are not aligned", bytes, destination);
  }
  const auto load = [=] {
    std::memcpy(block->dynamic.data() + destination, source, bytes);
    mbarrier(*block, barrier).bytes -= bytes;
    complete(*block, barrier);
  };
  if (emulation::machine.order == emulation::Order::backward) {
    load();
  } else {
    emulation::machine.boxes.push(load);
  }
}

/// What is in shared memory when the copy ends goes to `visit`.
template <class Visit>
void store_bulk(unsigned source, unsigned bytes, Visit visit) {
  const emulation::Thread* const thread = emulation::machine.current;
  if (bytes % 16 || source % 16) emulation::fail("stores %u bytes from %u, which are not aligned", bytes, source);
  emulation::machine.current->stores.start(
      [=] { visit(reinterpret_cast<const float*>(thread->block->dynamic.data() + source), bytes / sizeof(float)); });
}

inline void cp_async_bulk_store(void* destination, unsigned source, unsigned bytes) {
  store_bulk(source, bytes, [=](const float* from, unsigned count) { std::copy_n(from, count, (float*)destination); });
}

inline void cp_reduce_async_bulk_add(float* destination, unsigned source, unsigned bytes) {
  store_bulk(source, bytes, [=](const float* from, unsigned count) {
    for (unsigned i = 0; i < count; ++i) destination[i] += from[i];
  });
}

inline void cp_async_bulk_commit_group() { emulation::machine.current->stores.commit(); }

template <int kPending>
void cp_async_bulk_wait_group_read() {
  emulation::machine.current->stores.wait(kPending);
}

template <int kPending>
void cp_async_bulk_wait_group() {
  emulation::machine.current->stores.wait(kPending);
}

inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}

}  // namespace ptx
}  // namespace jaxdnn
