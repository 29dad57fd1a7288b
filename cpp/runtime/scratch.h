// Scratch of plans on the host, kept from one call to the next.
//
// Of XLA it would be freshly mapped memory in many calls, where the first touch of each page is a fault: 4 ms of the 15
// that 1024 x 1024 x 1024 takes in float32 (two Zen 3 cores, operands packed ahead), and more with more threads.
#pragma once

#include <cstddef>

namespace jaxdnn {

// Memory of one call, aligned to a cache line, of whose contents nothing is known. Calls may run at once.
class Scratch {
 public:
  explicit Scratch(size_t size);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;  // at least what was asked for
};

}  // namespace jaxdnn
