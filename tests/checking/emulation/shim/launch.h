// Launches of kernels on the CPU: one cluster of blocks after the other, with a coroutine for each thread. Where all of
// a cluster's threads wait for what other clusters do, and in random order from the start, several are there at once.
//
// A thread runs as far as it can, up to where it waits for others; then the next one does. Which one comes next is the
// order of the launch, and copies that nobody has waited for end as late as possible, at once, or at any time: whoever
// forgets a barrier reads what is not yet there in one order, and overwrites what is still needed in another one.
//
// Memory outside of all buffers is no memory: who touches it ends the launch, as does a cluster of which all threads
// wait. What a launch returns says so.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <utility>
#include <vector>

#include "cuda.h"

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes)

struct Place3 {
  unsigned x, y, z;
};

namespace emulation {

enum class Order { forward, backward, random };

struct Thread;

/// Threads that wait for each other.
struct Barrier {
  std::vector<Thread*> waiting;
  std::size_t arrived = 0;  // that do not wait

  void release();
  void wait(std::size_t count);
  void arrive(std::size_t count);
};

/// What the lanes of a warp give each other. Values exist twice and alternate: those of one exchange are overwritten
/// two exchanges later, and by then all lanes have read them.
struct Warp {
  static constexpr int kLanes = 32, kMostBytes = 64;

  Barrier barrier;
  alignas(16) unsigned char values[2][kLanes][kMostBytes];
};

struct Block;

struct Cluster {
  std::vector<Block*> blocks;        // by rank
  std::size_t threads, arrived = 0;  // that have not returned; and that have come to the barrier
  unsigned generation = 0;
  Barrier barrier;
};

constexpr int kPattern = 0xff;  // of memory that nobody has written: NaNs, of floats

/// Whole pages, of which the last `size` bytes are followed by one that can't be touched.
struct Memory {
  unsigned char* pages;
  std::size_t mapped, size;

  explicit Memory(std::size_t bytes) : size(bytes) {
    const std::size_t page = sysconf(_SC_PAGESIZE);
    mapped = (bytes + page - 1) / page * page + page;
    pages = static_cast<unsigned char*>(
        mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    mprotect(pages + mapped - page, page, PROT_NONE);
  }
  Memory(const Memory&) = delete;
  ~Memory() { munmap(pages, mapped); }

  unsigned char* data() const { return pages + mapped - sysconf(_SC_PAGESIZE) - size; }
};

inline std::size_t reserved = 0;  // bytes of all arrays that kernels declare as shared

inline std::size_t reserve(std::size_t bytes) {
  const std::size_t at = reserved;
  reserved += (bytes + 15) / 16 * 16;
  return at;
}

struct Block {
  Place3 index;
  unsigned rank;  // in its cluster
  Cluster& cluster;
  Memory arrays, dynamic;
  Barrier barriers[16];
  std::map<unsigned, Barrier> mbarriers;  // who waits, by the barrier's shared address
  std::vector<Warp> warps;
  std::size_t threads;   // that have not returned
  bool started = false;  // whether any of them has begun
  bool votes[3] = {};    // of this vote, of the next one, and of the one before, which some may still read

  Block(Place3 at, unsigned number, Cluster& its, std::size_t count, std::size_t shared_bytes)
      : index(at),
        rank(number),
        cluster(its),
        arrays(reserved),
        dynamic(shared_bytes),
        warps((count + 31) / 32),
        threads(count) {
    std::memset(arrays.data(), kPattern, arrays.size);
    std::memset(dynamic.data(), kPattern, dynamic.size);
  }
};

/// A thread's asynchronous copies, in groups: those of cp.async, or its stores by TMA.
struct Copies {
  std::vector<std::vector<std::function<void()>>> groups = {{}};  // that are not known to have ended; the last is open

  void start(std::function<void()> copy);
  void commit() { groups.emplace_back(); }

  void wait(std::size_t pending) {
    while (groups.size() > pending + 1) {
      for (const auto& copy : groups.front()) copy();
      groups.erase(groups.begin());
    }
  }

  /// Ends some of them, as they may at any time.
  void end_some(std::minstd_rand& random) {
    for (auto& group : groups) {
      for (std::size_t i = group.size(); i-- > 0;) {
        if (random() % 2) continue;
        group[i]();
        group.erase(group.begin() + i);
      }
    }
  }
};

struct Thread {
  Block* block;
  Place3 index;
  unsigned number;  // in its block
  unsigned char* stack;
  jmp_buf context;
  bool started = false;
  unsigned exchanges = 0, generation = 0, votes = 0, polled = 0;
  Copies loads, stores, multiplies;
};

/// What runs.
struct Machine {
  using Ready = std::pair<unsigned, Thread*>;

  Order order;
  std::minstd_rand random;
  std::priority_queue<Ready, std::vector<Ready>, std::greater<>> ready;
  Thread* current = nullptr;
  std::vector<Thread*> polling;  // who has read what others signal, and waits for it to change
  unsigned signals = 1;
  std::queue<std::function<void()>> boxes;  // that TMA has been asked for, and has not yet loaded
  std::function<void()> kernel;
  jmp_buf scheduler;
  char error[200];
  void* fault;
};
inline Machine machine;

inline void make_ready(Thread* thread) {
  const unsigned number = thread->block->rank * 1024 + thread->number;
  const unsigned key = machine.order == Order::forward    ? number
                       : machine.order == Order::backward ? ~number
                                                          : machine.random();
  machine.ready.push({key, thread});
}

/// Has TMA load one of the boxes that it was asked for.
inline void load_box() {
  machine.boxes.front()();
  machine.boxes.pop();
}

inline void Copies::start(std::function<void()> copy) {
  if (machine.order == Order::backward) {
    copy();
  } else {
    groups.back().push_back(std::move(copy));
  }
}

inline void Barrier::release() {
  for (Thread* thread : waiting) make_ready(thread);
  waiting.clear();
  arrived = 0;
}

/// Lets others run until somebody makes this thread ready.
[[gnu::noinline]] inline void yield() {
  if (machine.order == Order::random) {
    machine.current->loads.end_some(machine.random);
    machine.current->stores.end_some(machine.random);
    if (!machine.boxes.empty() && machine.random() % 2) load_box();
  }
  if (!_setjmp(machine.current->context)) _longjmp(machine.scheduler, 1);
}

inline void Barrier::wait(std::size_t count) {
  waiting.push_back(machine.current);
  if (waiting.size() + arrived == count) release();
  yield();
}

inline void Barrier::arrive(std::size_t count) {
  ++arrived;
  if (waiting.size() + arrived == count) release();
}

/// Before a thread reads what other blocks signal: until there is anything new to it.
inline void poll() {
  Thread* const thread = machine.current;
  if (thread->polled == machine.signals) {
    machine.polling.push_back(thread);
    yield();
  }
  thread->polled = machine.signals;
}

inline void signal() {
  ++machine.signals;
  for (Thread* thread : machine.polling) make_ready(thread);
  machine.polling.clear();
}

/// Ends the launch.
template <class... Values>
[[noreturn]] void fail(const char* format, Values... values) {
  const Thread& thread = *machine.current;
  const Place3 at = thread.index, block = thread.block->index;
  const int length = std::snprintf(machine.error, sizeof(machine.error), "thread %u, %u, %u of block %u, %u, %u ", at.x,
                                   at.y, at.z, block.x, block.y, block.z);
  std::snprintf(machine.error + length, sizeof(machine.error) - length, format, values...);
  _longjmp(machine.scheduler, 1);
}

inline void on_fault(int, siginfo_t* info, void*) {
  machine.fault = info->si_addr;
  fail("touches memory that is none of its buffers'");
}

inline void run_thread() {
  Thread& thread = *machine.current;
  machine.kernel();
  for (const auto& group : thread.stores.groups) {
    if (!group.empty()) fail("returns before its stores have read shared memory");
  }
  thread.loads.commit();
  thread.loads.wait(0);
  Block& block = *thread.block;
  --block.threads;
  --block.cluster.threads;
  // Who has returned is not waited for.
  if (block.threads > 0 && block.barriers[0].waiting.size() == block.threads) block.barriers[0].release();
  _longjmp(machine.scheduler, 1);
}

constexpr std::size_t kStackBytes = 128 << 10;

[[gnu::noinline]] inline void resume(Thread* thread) {
  machine.current = thread;
  if (_setjmp(machine.scheduler)) return;
  if (thread->started) _longjmp(thread->context, 1);
  thread->started = thread->block->started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread->stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, run_thread, 0);
  setcontext(&context);
}

/// By all threads of a warp: everybody's value, by lane.
template <class T>
const T* exchange(const T& value) {
  static_assert(sizeof(T) <= Warp::kMostBytes && 16 % alignof(T) == 0, "a lane's value");
  Thread& thread = *machine.current;
  Warp& warp = thread.block->warps[thread.number / 32];
  auto& values = warp.values[thread.exchanges++ % 2];
  T* const all = reinterpret_cast<T*>(values);
  all[thread.number % 32] = value;
  warp.barrier.wait(Warp::kLanes);
  return all;
}

/// Where a block has an array that a kernel declares as shared.
template <int kNumber, class Array>
struct SharedArray {
  inline static const std::size_t at = reserve(sizeof(Array));
};

template <int kNumber, class Array>
Array& shared_array() {
  return *reinterpret_cast<Array*>(machine.current->block->arrays.data() + SharedArray<kNumber, Array>::at);
}

inline unsigned char* dynamic_shared_memory() { return machine.current->block->dynamic.data(); }

}  // namespace emulation

#define threadIdx (emulation::machine.current->index)
#define blockIdx (emulation::machine.current->block->index)
inline Place3 blockDim, gridDim;

inline void __syncthreads() {
  emulation::Block& block = *emulation::machine.current->block;
  block.barriers[0].wait(block.threads);
}

inline int __syncthreads_or(int value) {
  emulation::Block& block = *emulation::machine.current->block;
  const unsigned vote = emulation::machine.current->votes++;
  if (value) block.votes[vote % 3] = true;
  __syncthreads();
  block.votes[(vote + 2) % 3] = false;
  return block.votes[vote % 3];
}

inline void __syncwarp() { emulation::exchange(0); }

struct LaunchShape {
  Place3 grid, block;
  unsigned cluster;  // blocks, along x
  std::size_t shared_memory;
};

namespace emulation {

/// A cluster, from when it begins until its threads have returned.
struct Running {
  Cluster cluster;
  Memory stacks;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Thread> threads;

  Running(const LaunchShape& shape, unsigned first)
      : stacks(kStackBytes * shape.block.x * shape.block.y * shape.block.z * shape.cluster),
        threads(stacks.size / kStackBytes) {
    const unsigned count = threads.size() / shape.cluster;
    cluster.threads = threads.size();
    for (unsigned rank = 0; rank < shape.cluster; ++rank) {
      const unsigned b = first + rank;
      const Place3 at = {b % shape.grid.x, b / shape.grid.x % shape.grid.y, b / shape.grid.x / shape.grid.y};
      blocks.push_back(std::make_unique<Block>(at, rank, cluster, count, shape.shared_memory));
      cluster.blocks.push_back(blocks.back().get());
      for (unsigned t = 0; t < count; ++t) {
        Thread& thread = threads[rank * count + t];
        thread.block = blocks.back().get();
        thread.index = {t % shape.block.x, t / shape.block.x % shape.block.y, t / shape.block.x / shape.block.y};
        thread.number = t;
        thread.stack = stacks.data() + (rank * count + t) * kStackBytes;
        make_ready(&thread);
      }
    }
  }
};

}  // namespace emulation

/// Returns what went wrong, if anything did.
inline const char* launch(const LaunchShape& shape, emulation::Order order, std::function<void()> kernel) {
  using namespace emulation;
  machine.order = order;
  machine.random.seed(1);
  machine.kernel = std::move(kernel);
  machine.error[0] = 0;
  machine.fault = nullptr;
  gridDim = shape.grid;
  blockDim = shape.block;
  struct sigaction own = {}, segments, buses;
  own.sa_sigaction = on_fault;
  own.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &own, &segments);
  sigaction(SIGBUS, &own, &buses);
  std::vector<unsigned> firsts;  // blocks of the clusters that have not begun, the next one last
  for (unsigned b = 0; b < shape.grid.x * shape.grid.y * shape.grid.z; b += shape.cluster) firsts.push_back(b);
  if (order != Order::backward) std::reverse(firsts.begin(), firsts.end());
  if (order == Order::random) std::shuffle(firsts.begin(), firsts.end(), machine.random);
  const std::size_t resident = order == Order::random ? 3 : 1;  // clusters that run at once, if others are left
  std::list<Running> running;
  while (!machine.error[0]) {
    if (machine.boxes.empty()) running.remove_if([](const Running& one) { return one.cluster.threads == 0; });
    while (running.size() < resident && !firsts.empty()) {
      running.emplace_back(shape, firsts.back());
      firsts.pop_back();
    }
    if (!machine.ready.empty()) {
      Thread* const next = machine.ready.top().second;
      machine.ready.pop();
      resume(next);
    } else if (!machine.boxes.empty()) {
      load_box();
    } else if (!firsts.empty()) {
      running.emplace_back(shape, firsts.back());
      firsts.pop_back();
    } else {
      break;
    }
  }
  if (!machine.error[0] && !running.empty()) {
    std::size_t waiting = 0;
    for (const Running& one : running) waiting += one.cluster.threads;
    std::snprintf(machine.error, sizeof(machine.error), "%zu threads wait for others for ever", waiting);
  }
  machine.ready = {};
  machine.boxes = {};
  machine.polling.clear();
  sigaction(SIGSEGV, &segments, nullptr);
  sigaction(SIGBUS, &buses, nullptr);
  return machine.error[0] ? machine.error : nullptr;
}

/// `arguments`: addresses of the kernel's parameters.
template <class... P, std::size_t... kAt>
const char* launch(const LaunchShape& shape, int order, void (*kernel)(P...), void* const* arguments,
                   std::index_sequence<kAt...>) {
  return launch(shape, static_cast<emulation::Order>(order),
                [=] { kernel(*static_cast<std::remove_cv_t<P>*>(arguments[kAt])...); });
}

template <class... P>
const char* launch(const LaunchShape& shape, int order, void (*kernel)(P...), void* const* arguments) {
  return launch(shape, order, kernel, arguments, std::index_sequence_for<P...>());
}

extern "C" [[gnu::used]] inline void* fault_address() { return emulation::machine.fault; }
