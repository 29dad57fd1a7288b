#include "scratch.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "huge_pages.h"
#include "log.h"

namespace jaxdnn {
namespace {

constexpr size_t kLine = 64;
// What is kept at most. A call that needs more works so long that faults don't count.
constexpr size_t kMostKept = size_t{128} << 20;
constexpr size_t kMostBlocks = 256;

struct Block {
  char* data;
  size_t size;
};

struct Kept {
  std::mutex mutex;
  std::vector<Block> blocks;
  size_t bytes = 0;

  Kept() { blocks.reserve(kMostBlocks); }

  Block take(std::vector<Block>::iterator block) {
    const Block taken = *block;
    blocks.erase(block);
    bytes -= taken.size;
    return taken;
  }

  // Without allocating, for destructors.
  bool keep(const Block& block) noexcept {
    if (bytes + block.size > kMostKept || blocks.size() == kMostBlocks) return false;
    blocks.push_back(block);
    bytes += block.size;
    return true;
  }
};

// Never destroyed: XLA's threads may outlive static objects.
Kept& kept() {
  static Kept* const all = new Kept;
  return *all;
}

bool smaller(const Block& one, const Block& other) { return one.size < other.size; }

// The smallest block that is large enough. Without one the largest, in whose place a new one will be kept.
Block take_kept(size_t size) {
  Kept& all = kept();
  std::lock_guard lock(all.mutex);
  if (all.blocks.empty() || size > kMostKept) return {nullptr, 0};
  auto best = std::max_element(all.blocks.begin(), all.blocks.end(), smaller);
  for (auto block = all.blocks.begin(); block != all.blocks.end(); ++block) {
    if (block->size >= size && block->size < best->size) best = block;
  }
  return all.take(best);
}

}  // namespace

Scratch::Scratch(size_t size) {
  if (size == 0) return;
  const Block block = take_kept(size);
  if (block.size >= size) {
    data_ = block.data;
    size_ = block.size;
    return;
  }
  std::free(block.data);
  size_ = (size + kLine - 1) / kLine * kLine;
  data_ = static_cast<char*>(std::aligned_alloc(kLine, size_));
  if (data_ == nullptr) throw std::runtime_error("no memory for " + std::to_string(size) + " bytes of scratch");
  advise_huge_pages(data_, size_);
  ++counters.scratch_allocations;
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  {
    Kept& all = kept();
    std::lock_guard lock(all.mutex);
    if (all.keep({data_, size_})) return;
  }
  std::free(data_);
}

}  // namespace jaxdnn
