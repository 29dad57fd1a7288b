#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace jaxdnn {
namespace {

// Owned by everyone who may still look at it: a helper that the pool starts after the loop has ended finds no task
// left, and must find that out in valid memory. `arguments` may be gone by then.
struct Loop {
  HostKernel kernel;
  const void* const* arguments;
  int64_t tasks;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable all_done;

  void work() {
    int64_t finished = 0;
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks; ++finished) {
      kernel(arguments, task);
    }
    if (finished == 0 || done.fetch_add(finished, std::memory_order_acq_rel) + finished < tasks) return;
    std::lock_guard lock(mutex);
    all_done.notify_one();
  }

  bool ended() const { return done.load(std::memory_order_acquire) == tasks; }

  void wait() {
    // The last tasks end at about the same time: look for a moment before sleeping.
    constexpr int kLooks = 64;
    for (int i = 0; i < kLooks && !ended(); ++i) std::this_thread::yield();
    if (ended()) return;
    std::unique_lock lock(mutex);
    all_done.wait(lock, [this] { return ended(); });
  }
};

}  // namespace

void run_tasks(const xla::ffi::ThreadPool& pool, HostKernel kernel, const void* const* arguments, int64_t tasks) {
  int64_t helpers = tasks < 2 ? 0 : std::min(tasks, pool.num_threads()) - 1;
  if (helpers <= 0) {
    for (int64_t task = 0; task < tasks; ++task) kernel(arguments, task);
    return;
  }
  auto loop = std::make_shared<Loop>();
  loop->kernel = kernel;
  loop->arguments = arguments;
  loop->tasks = tasks;
  xla::ffi::ThreadPool workers = pool;
  for (int64_t i = 0; i < helpers; ++i) workers.Schedule([loop] { loop->work(); });
  loop->work();
  loop->wait();
}

}  // namespace jaxdnn
