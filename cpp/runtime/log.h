// The log: one line an event, to stderr or a file, and the process's counters.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace jaxdnn {

enum class LogLevel { warning = 0, info = 1, debug = 2 };

// Throws std::runtime_error when `path` can't be opened; "" is stderr.
void set_log(LogLevel level, const std::string& path);
bool log_enabled(LogLevel level);
// Writes "jaxdnn: <message>" in one write, so that lines of threads and processes don't mix. A warning is written at
// every level, once.
void log_line(LogLevel level, const std::string& message);

struct Counters {
  std::atomic<int64_t> executes{0};
  std::atomic<int64_t> instantiates{0};
  std::atomic<int64_t> compiles{0};
  std::atomic<int64_t> memory_hits{0};
  std::atomic<int64_t> disk_hits{0};
  std::atomic<int64_t> execute_nanoseconds{0};
  std::atomic<int64_t> scratch_allocations{0};
};

inline Counters counters;

}  // namespace jaxdnn
