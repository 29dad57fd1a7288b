#include "plan.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "error.h"

namespace jaxdnn {
namespace {

namespace ffi = xla::ffi;

using Words = ffi::Span<const int64_t>;

// Says where in the plan we are, and what is wrong there.
class Decoder {
 public:
  explicit Decoder(std::string place) : place_(std::move(place)) {}

  Decoder inside(const std::string& place) const { return Decoder(place_ + ", " + place); }

  [[noreturn]] void fail(const std::string& reason) const { throw PlanError(place_ + ": " + reason); }

  void require(bool condition, const std::string& reason) const {
    if (!condition) fail(reason);
  }

  int64_t within(int64_t value, int64_t low, int64_t high, const char* what) const {
    if (value < low || value > high) {
      fail(std::string(what) + " is " + std::to_string(value) + "; it must be " + std::to_string(low) + " to " +
           std::to_string(high));
    }
    return value;
  }

  template <typename T>
  auto get(const ffi::Dictionary& dictionary, const std::string& name) const {
    require(dictionary.contains(name), "attribute \"" + name + "\" is missing");
    auto value = dictionary.get<T>(name);
    if (value.has_error()) fail("attribute \"" + name + "\": " + value.error().message());
    return *value;
  }

 private:
  std::string place_;
};

constexpr int64_t kMaxIndex = 1 << 20;
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

Buffer decode_buffer(const Decoder& at, Plan& plan, int64_t kind, int64_t index, int64_t offset) {
  at.within(index, 0, kMaxIndex, kind == 0 ? "operand index" : "result index");
  at.within(offset, 0, std::numeric_limits<int64_t>::max(), "offset");
  int64_t& count = kind == 0 ? plan.operands : plan.results;
  count = std::max(count, index + 1);
  return {kind == 1, index, offset};
}

TensorMap decode_tensor_map(const Decoder& at, Plan& plan, Words words) {
  at.require(words.size() >= 6, "has " + std::to_string(words.size()) + " words");
  const int64_t* word = words.begin();
  int64_t kind = at.within(word[0], 0, 1, "buffer kind");
  TensorMap map{};
  map.buffer = decode_buffer(at, plan, kind, word[1], word[2]);
  map.dtype = static_cast<int>(at.within(word[3], 0, 255, "dtype"));
  size_t rank = at.within(word[4], 1, 5, "rank");
  size_t corners = at.within(word[5], 0, 3, "number of corners");
  at.require(corners == 0 || corners + 2 == rank,
             "has " + std::to_string(corners) + " corners with rank " + std::to_string(rank));
  size_t boxed = corners ? 2 : rank;
  size_t expected = 3 * rank + boxed + 2 * corners + 9;
  at.require(words.size() == expected, "has " + std::to_string(words.size()) + " words; rank " + std::to_string(rank) +
                                           " takes " + std::to_string(expected));
  word += 6;
  auto take = [&](auto& list, size_t count, int64_t low, int64_t high, const char* what) {
    for (size_t i = 0; i < count; ++i) list.push_back(at.within(*word++, low, high, what));
  };
  take(map.dimensions, rank, 1, int64_t{1} << 32, "dimension");
  take(map.strides, rank - 1, 0, (int64_t{1} << 40) - 1, "stride");
  take(map.box, boxed, 1, corners ? 1024 : 256, "box");
  take(map.element_strides, rank, 1, 8, "element stride");
  for (int* option : {&map.interleave, &map.swizzle, &map.l2_promotion, &map.fill}) {
    *option = static_cast<int>(at.within(*word++, 0, 255, "option"));
  }
  take(map.lower, corners, -32768, 32767, "lower corner");
  take(map.upper, corners, -32768, 32767, "upper corner");
  return map;
}

Argument decode_argument(const Decoder& at, Plan& plan, const int64_t* word) {
  Argument argument{};
  switch (word[0]) {
    case 0:
    case 1:
      argument.kind = Argument::Kind::buffer;
      argument.buffer = decode_buffer(at, plan, word[0], word[1], word[2]);
      return argument;
    case 2:
      argument.kind = Argument::Kind::scalar;
      at.require(word[1] == 4 || word[1] == 8, "scalar of " + std::to_string(word[1]) + " bytes; it must have 4 or 8");
      argument.bits = word[2];
      return argument;
    case 3:
      argument.kind = Argument::Kind::tensor_map;
      at.require(word[1] >= 0 && word[1] < static_cast<int64_t>(plan.tensor_maps.size()),
                 "tensor map " + std::to_string(word[1]) + " of " + std::to_string(plan.tensor_maps.size()));
      argument.index = word[1];
      return argument;
    case 4:
      argument.kind = Argument::Kind::constant;
      at.require(plan.unit.empty(), "constants are for host kernels, and this plan has a CUDA unit");
      at.require(word[1] >= 0 && word[1] < static_cast<int64_t>(plan.constants.size()),
                 "constant " + std::to_string(word[1]) + " of " + std::to_string(plan.constants.size()));
      argument.index = word[1];
      return argument;
    case 5:
      argument.kind = Argument::Kind::scratch;
      at.require(plan.unit.empty(), "scratch from the launcher is for host kernels, and this plan has a CUDA unit");
      argument.offset = at.within(word[1], 0, plan.scratch, "offset into scratch");
      return argument;
    case 6:
      argument.kind = Argument::Kind::counter;
      at.require(!plan.unit.empty(), "counters are for CUDA kernels, and this plan has no CUDA unit");
      argument.index = at.within(word[1], 1, kMaxIndex, "number of counters");
      return argument;
    default:
      at.fail("argument kind " + std::to_string(word[0]) + "; it must be 0 to 6");
  }
}

Launch decode_launch(const Decoder& at, Plan& plan, const ffi::Dictionary& attributes) {
  Launch launch;
  launch.kernel = std::string(at.get<std::string_view>(attributes, "kernel"));
  at.require(!launch.kernel.empty(), "the kernel has no name");

  Words geometry = at.get<Words>(attributes, "geometry");
  at.require(geometry.size() == 10, "geometry has " + std::to_string(geometry.size()) + " numbers; it must have 10");
  for (int i = 0; i < 3; ++i) {
    launch.grid[i] = at.within(geometry[i], 0, std::numeric_limits<int64_t>::max(), "grid");
    launch.block[i] = at.within(geometry[3 + i], 1, 1024, "block");
    launch.cluster[i] = at.within(geometry[6 + i], 1, 16, "cluster");
    at.require(launch.grid[i] % launch.cluster[i] == 0, "the cluster doesn't divide the grid");
  }
  launch.shared_memory = at.within(geometry[9], 0, kMaxInt32, "dynamic shared memory");

  Words words = at.get<Words>(attributes, "arguments");
  at.require(words.size() % 3 == 0, "arguments have " + std::to_string(words.size()) + " words; each takes 3");
  size_t count = words.size() / 3;
  at.within(count, 0, kMaxArguments, "number of arguments");
  size_t maps = 0;
  for (size_t i = 0; i < count; ++i) {
    Decoder argument = at.inside("argument " + std::to_string(i));
    launch.arguments.push_back(decode_argument(argument, plan, words.begin() + 3 * i));
    maps += launch.arguments.back().kind == Argument::Kind::tensor_map;
  }
  at.within(maps, 0, kMaxTensorMaps, "number of tensor maps");
  return launch;
}

}  // namespace

Plan decode_plan(const ffi::Dictionary& attributes) {
  Plan plan;
  Decoder unnamed("jaxdnn: a plan");
  plan.op = std::string(unnamed.get<std::string_view>(attributes, "op"));
  Decoder at("jaxdnn: the plan of " + plan.op);
  plan.unit = std::string(at.get<std::string_view>(attributes, "unit"));
  plan.arch = std::string(at.get<std::string_view>(attributes, "arch"));
  if (attributes.contains("tensor_maps")) {
    auto maps = at.get<ffi::Dictionary>(attributes, "tensor_maps");
    for (size_t i = 0; i < maps.size(); ++i) {
      Decoder map = at.inside("tensor map " + std::to_string(i));
      plan.tensor_maps.push_back(decode_tensor_map(map, plan, map.get<Words>(maps, std::to_string(i))));
    }
  }
  if (attributes.contains("constants")) {
    auto constants = at.get<ffi::Dictionary>(attributes, "constants");
    for (size_t i = 0; i < constants.size(); ++i) {
      Words words = at.inside("constant " + std::to_string(i)).get<Words>(constants, std::to_string(i));
      plan.constants.emplace_back(words.begin(), words.end());
    }
  }
  if (attributes.contains("scratch")) {
    plan.scratch = at.within(at.get<int64_t>(attributes, "scratch"), 0, std::numeric_limits<int64_t>::max(), "scratch");
  }
  auto launches = at.get<ffi::Dictionary>(attributes, "launches");
  for (size_t i = 0; i < launches.size(); ++i) {
    Decoder launch = at.inside("launch " + std::to_string(i));
    plan.launches.push_back(decode_launch(launch, plan, launch.get<ffi::Dictionary>(launches, std::to_string(i))));
  }
  return plan;
}

}  // namespace jaxdnn
