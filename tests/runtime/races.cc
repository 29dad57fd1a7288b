// The runtime's pieces that threads share, from many threads at once, for ThreadSanitizer (`.ci/sanitize thread`):
// inside Python it would see neither jaxlib's nor the interpreter's synchronization. The arguments are the folders in
// which NVRTC is looked for; JAXDNN_CACHE_DIR is a folder that may be filled.
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cache.h"
#include "compiler.h"
#include "disk_cache.h"
#include "log.h"
#include "parallel.h"
#include "scratch.h"

namespace {

namespace ffi = xla::ffi;
using namespace jaxdnn;

constexpr int kCallers = 4, kWorkers = 3, kRounds = 10'000;

void require(bool condition, const char* rule) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", rule);
  std::_Exit(1);
}

// In place of XLA's pool: a queue of tasks for a few threads.
class Pool {
 public:
  Pool() {
    for (int i = 0; i < kWorkers; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  static XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
    auto* self = reinterpret_cast<Pool*>(args->ctx);
    {
      std::lock_guard lock(self->mutex_);
      self->tasks_.push_back([task = args->task, data = args->data] { task(data); });
    }
    self->changed_.notify_one();
    return nullptr;
  }
  static XLA_FFI_Error* num_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
    *args->num_threads = kWorkers;
    return nullptr;
  }

 private:
  void work() {
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [this] { return ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

void together(const std::function<void(int)>& call) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kCallers; ++i) threads.emplace_back(call, i);
  for (std::thread& thread : threads) thread.join();
}

// Each task has a place of its own, which the caller reads without a lock when the loop has ended.
void add_one(const void* const* arguments, int64_t task) {
  const auto* from = static_cast<const int64_t*>(arguments[0]);
  auto* to = static_cast<int64_t*>(const_cast<void*>(arguments[1]));
  to[task] = from[task] + 1;
}

void loops_and_scratch() {
  Pool workers;
  XLA_FFI_Api api{};
  api.XLA_FFI_ThreadPool_Schedule = Pool::schedule;
  api.XLA_FFI_ThreadPool_NumThreads = Pool::num_threads;
  together([&](int caller) {
    ffi::DiagnosticEngine diagnostic;
    const ffi::ThreadPool pool = *ffi::CtxDecoding<ffi::ThreadPool>::Decode(
        &api, reinterpret_cast<XLA_FFI_ExecutionContext*>(&workers), diagnostic);
    for (int64_t round = 0; round < kRounds; ++round) {
      const int64_t tasks = round % 7 * (caller + 1);
      const Scratch scratch(2 * sizeof(int64_t) * tasks);
      auto* from = reinterpret_cast<int64_t*>(scratch.data());
      std::iota(from, from + tasks, round);
      // Two launches: what one has written the next reads in other threads.
      const void *forth[] = {from, from + tasks}, *back[] = {from + tasks, from};
      run_tasks(pool, add_one, forth, tasks);
      run_tasks(pool, add_one, back, tasks);
      for (int64_t task = 0; task < tasks; ++task) require(from[task] == round + task + 2, "a task has not run once");
    }
  });
}

// All ask for the same units, at first each for another one, while others throw them out of memory or off the disk.
void caches(const std::vector<std::string>& folders) {
  set_library_paths(folders);
  auto unit = [](int i) { return "extern \"C\" __global__ void k(float* x) { *x = " + std::to_string(i) + "; }\n"; };
  together([&](int caller) {
    for (int i = 0; i < 40; ++i) {
      const CompiledUnit compiled = compile_unit(unit((i + caller) % 4), "sm_90a");
      require(compiled.cubin->code.compare(0, 4, "\177ELF") == 0, "a cubin is none");
      if (i % 8 == caller) clear_memory_cache();
      if (i == 20) set_library_paths(folders);  // who compiles meanwhile ends with the compiler that there was
      if (caller == 0 && i % 8 == 4) {
        DiskCache(DiskCache::of_user().directory(), 0, true).publish(Digest{}, "cubin", "unit");
        require(DiskCache::of_user().usage().writable, "the cache is not writable");
      }
    }
  });
  require(counters.compiles > 0 && counters.memory_hits > 0 && counters.disk_hits > 0, "some cache was never hit");
}

void logs(const std::string& path) {
  together([&](int caller) {
    for (int i = 0; i < 200; ++i) {
      set_log(caller == 0 ? LogLevel::info : LogLevel::debug, i % 2 == 0 ? path : "");
      set_log(LogLevel::debug, path);
      log_line(LogLevel::debug, "round " + std::to_string(i));
    }
  });
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> folders(arguments + 1, arguments + count);
  set_log(LogLevel::debug, DiskCache::of_user().directory() + ".log");
  loops_and_scratch();
  caches(folders);
  logs(DiskCache::of_user().directory() + ".log");
}
