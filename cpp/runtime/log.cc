#include "log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>

namespace jaxdnn {
namespace {

std::atomic<int> current_level{static_cast<int>(LogLevel::warning)};
std::mutex mutex;
int descriptor = STDERR_FILENO;             // guarded by `mutex`
auto& warned = *new std::set<std::string>;  // guarded by `mutex`

}  // namespace

void set_log(LogLevel level, const std::string& path) {
  int opened = STDERR_FILENO;
  if (!path.empty()) {
    opened = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (opened < 0) throw std::runtime_error("can't open the log file " + path + ": " + std::strerror(errno));
  }
  std::lock_guard lock(mutex);
  if (descriptor != STDERR_FILENO) close(descriptor);
  descriptor = opened;
  current_level = static_cast<int>(level);
}

bool log_enabled(LogLevel level) { return current_level.load(std::memory_order_relaxed) >= static_cast<int>(level); }

void log_line(LogLevel level, const std::string& message) {
  if (!log_enabled(level)) return;
  std::string line = "jaxdnn: " + message + "\n";
  std::lock_guard lock(mutex);
  if (level == LogLevel::warning && !warned.insert(message).second) return;
  // A log that can't be written is no reason to fail.
  [[maybe_unused]] ssize_t written = write(descriptor, line.data(), line.size());
}

}  // namespace jaxdnn
