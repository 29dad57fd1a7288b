// A call of attention's kernels for any GPU: where its arrays lie, which keys a query sees, and what the call's
// functions make of a score. Everything is there for one score at a time, so that a kernel may hold scores as it likes.
#pragma once

#include "core/epilogue_element.cuh"
#include "core/philox.cuh"

namespace jaxdnn {

/// What a `Config` has besides Element (of sums) and its tiles. An array is an EpilogueOperand, or none.
struct AttentionSimtDefaults {
  static constexpr bool kLeft = false, kRight = false;  // whether there are these bounds of the band
  // Neighbouring elements of a vector that one copy takes.
  static constexpr int kQueryCopy = 1, kKeyCopy = 1, kValueCopy = 1, kDOutCopy = 1;
  // Vectors: of a batch element, the position (row) and the head (column).
  using Query = void;
  using Key = void;
  using Value = void;
  using Out = void;
  using DOut = void;
  using DQuery = void;
  using DKey = void;
  using DValue = void;
  // Numbers, over scores.
  using LogSumExp = void;
  using Sinks = void;
  using Seeds = void;
  using QueryPositions = void;
  using KeyPositions = void;
  using QueryOffset = void;
  using QueryLengths = void;
  using KeyLengths = void;
  using QuerySegments = void;
  using KeySegments = void;
  using DLogSumExp = void;
  using DSinks = void;
  using DLoaded = void;
  // Functions of scores, what they load, and what the gradient leaves.
  using Score = void;
  using Mask = void;
  using Gradient = void;
  using ScoreOperands = TypeList<>;
  using MaskOperands = TypeList<>;
  using GradientOperands = TypeList<>;
  using GradientRegisters = TypeList<>;
};

template <class Operand>
inline constexpr bool is_there = !is_same<Operand, void>;

/// An array of vectors.
struct VectorsAddress : OperandAddress {
  long long feature_stride = 1;

  /// The first element of a vector.
  template <class Operand>
  __device__ __forceinline__ const typename Operand::Type* at(int element, int position, int head) const {
    return static_cast<const typename Operand::Type*>(data) + offset<Operand>({position, head, element});
  }
};

template <class Config>
struct AttentionSimt {
  using Element = typename Config::Element;

  VectorsAddress query, key, value, out, d_out, d_query, d_key, d_value;
  OperandAddress log_sum_exp, sinks, seeds, query_positions, key_positions, query_offset, query_lengths, key_lengths;
  OperandAddress query_segments, key_segments, d_log_sum_exp, d_sinks, d_loaded;
  OperandAddress score_operands[Config::ScoreOperands::kArray], mask_operands[Config::MaskOperands::kArray];
  OperandAddress gradient_operands[Config::GradientOperands::kArray];
  Element *base = nullptr, *delta = nullptr;    // scratch: of each row, what the exponent subtracts, and delta
  int batches = 0, query_heads = 1, group = 1;  // batch elements times query heads; heads that share a key head
  int query_length = 0, key_length = 0, head_size = 0, value_size = 0;
  int left = 0, right = 0;  // of the band
  long long threshold = 0;  // of dropout
  Element factor = 1, scale = 1;
  // Of a sum over batches: which of them are summed for target i is `summed` of batch i and rows 0, ..., members - 1.
  OperandAddress summed;
  int members = 1, parts = 1;
  long long part_stride = 0;  // elements of a part of d_loaded
};

/// The number of a batch, row and column, if the call has such numbers.
template <class Operand, class Number>
__device__ __forceinline__ Number number_at(const OperandAddress& address, const Coordinate& at, Number otherwise) {
  if constexpr (is_there<Operand>) {
    return widen(static_cast<const typename Operand::Type*>(address.data)[address.offset<Operand>(at)]);
  } else {
    return otherwise;
  }
}

/// What masks know of a query: it sees keys at positions first .. last, of its own segment.
struct MaskedQuery {
  int row, first, last, segment;
};

struct MaskedKey {
  int column, position, segment;
};

/// Some neighbouring keys, or queries.
struct Span {
  int begin, end;
};

/// The scores of one query head.
template <class Config>
struct AttentionScores {
  using Call = AttentionSimt<Config>;
  using Element = typename Config::Element;
  static constexpr bool kSegments = is_there<typename Config::QuerySegments>;
  static constexpr bool kPositions =
      is_there<typename Config::QueryPositions> || is_there<typename Config::KeyPositions>;
  static constexpr bool kMask = is_there<typename Config::Mask>;
  /// Whether a span of keys may be hidden of which `keys_of` does not say so.
  static constexpr bool kHides = kSegments || kMask || (kPositions && (Config::kLeft || Config::kRight));

  const Call& call;
  int batch, element, head;
  int queries, keys;  // that there are
  int offset;         // of queries' positions
  // Once for all scores: a compiler that finds that out takes several times as long.
  Begins<typename Config::ScoreOperands> of_score;
  Begins<typename Config::MaskOperands> of_mask;
  Begins<typename Config::GradientOperands> of_gradient;

  __device__ __forceinline__ AttentionScores(const Call& call, int batch)
      : call(call),
        batch(batch),
        element(batch / call.query_heads),
        head(batch - element * call.query_heads),
        of_score(call.score_operands, batch),
        of_mask(call.mask_operands, batch),
        of_gradient(call.gradient_operands, batch) {
    const Coordinate at{0, 0, batch};
    queries = number_at<typename Config::QueryLengths>(call.query_lengths, at, call.query_length);
    keys = number_at<typename Config::KeyLengths>(call.key_lengths, at, call.key_length);
    offset = number_at<typename Config::QueryOffset>(call.query_offset, at, 0);
  }

  __device__ __forceinline__ int key_head() const { return head / call.group; }

  // ---------------------------------------------------------------------------------------------------------- masks

  /// The keys that some of these queries may see.
  __device__ __forceinline__ Span keys_of(const Span& rows) const {
    if (rows.begin >= queries) return {0, 0};
    const int last = (rows.end < queries ? rows.end : queries) - 1;
    return within(Config::kLeft, rows.begin + offset - call.left, Config::kRight, last + offset + call.right, keys);
  }

  /// The queries that may see some of these keys.
  __device__ __forceinline__ Span queries_of(const Span& columns) const {
    if (columns.begin >= keys) return {0, 0};
    const int last = (columns.end < keys ? columns.end : keys) - 1;
    return within(Config::kRight, columns.begin - offset - call.right, Config::kLeft, last - offset + call.left,
                  queries);
  }

  __device__ __forceinline__ MaskedQuery query(int row) const {
    const int there = row < call.query_length ? row : call.query_length - 1;
    const Coordinate at{there, 0, batch};
    const long long position =
        offset + number_at<typename Config::QueryPositions>(call.query_positions, at, static_cast<long long>(there));
    return {row, clamped(position - call.left), clamped(position + call.right),
            number_at<typename Config::QuerySegments>(call.query_segments, at, 0)};
  }

  __device__ __forceinline__ MaskedKey key(int column) const {
    const int there = column < call.key_length ? column : call.key_length - 1;
    const Coordinate at{0, there, batch};
    return {column, number_at<typename Config::KeyPositions>(call.key_positions, at, there),
            number_at<typename Config::KeySegments>(call.key_segments, at, 0)};
  }

  __device__ __forceinline__ bool visible(const MaskedQuery& query, const MaskedKey& key) const {
    bool seen = query.row < queries && key.column < keys;
    if constexpr (Config::kLeft) seen = seen && key.position >= query.first;
    if constexpr (Config::kRight) seen = seen && key.position <= query.last;
    if constexpr (kSegments) seen = seen && query.segment == key.segment && query.segment >= 0;
    if constexpr (kMask) {
      Register result[1];
      const Element none[1] = {};
      apply<typename Config::Mask>(call.mask_operands, of_mask, query, key, none, result);
      seen = seen && static_cast<bool>(result[0]);
    }
    return seen;
  }

  // ------------------------------------------------------------------------------------------------------ functions

  __device__ __forceinline__ Element score(Element product, const MaskedQuery& query, const MaskedKey& key) const {
    if constexpr (is_there<typename Config::Score>) {
      Register result[1];
      const Element products[1] = {product};
      apply<typename Config::Score>(call.score_operands, of_score, query, key, products, result);
      return static_cast<Element>(result[0]);
    } else {
      return product;
    }
  }

  /// Number `kOutput` of what the gradient of the score leaves.
  template <int kOutput>
  __device__ __forceinline__ Element gradient(Element product, Element d_score, const MaskedQuery& query,
                                              const MaskedKey& key) const {
    if constexpr (is_there<typename Config::Gradient>) {
      Register results[Config::GradientRegisters::kArray];
      const Element both[2] = {product, d_score};
      apply<typename Config::Gradient>(call.gradient_operands, of_gradient, query, key, both, results);
      return static_cast<Element>(static_cast<TypeAt<kOutput, typename Config::GradientRegisters>>(results[kOutput]));
    } else {
      return d_score;
    }
  }

  /// Dropout's factor.
  __device__ __forceinline__ Element kept(const MaskedQuery& query, const MaskedKey& key) const {
    if constexpr (is_there<typename Config::Seeds>) {
      using Operand = typename Config::Seeds;
      const auto* from =
          static_cast<const unsigned*>(call.seeds.data) + call.seeds.template offset<Operand>(Coordinate{0, 0, batch});
      unsigned words[4] = {static_cast<unsigned>(key.column) / 4, static_cast<unsigned>(query.row), 0, 0};
      philox({from[0], from[1]}, words);
      const unsigned even = key.column & 2 ? words[2] : words[0], odd = key.column & 2 ? words[3] : words[1];
      return (key.column & 1 ? odd : even) >= call.threshold ? call.factor : Element(0);
    } else {
      return 1;
    }
  }

 private:
  /// Positions are coordinates, and what is between two bounds a span of them, unless positions are arrays.
  __device__ __forceinline__ Span within(bool is_first, int first, bool is_last, int last, int count) const {
    const int begin = is_first && !kPositions && first > 0 ? first : 0;
    const int end = is_last && !kPositions && last < count - 1 ? last + 1 : count;
    return begin < end ? Span{begin, end} : Span{0, 0};
  }

  static __device__ __forceinline__ int clamped(long long position) {
    constexpr int kLeast = math::kLowest<int>, kMost = math::kHighest<int>;
    return position < kLeast ? kLeast : position > kMost ? kMost : static_cast<int>(position);
  }

  /// What is not there has the coordinate of what is: its loads are within bounds.
  template <class Function, class Operands, int kAccumulators>
  __device__ __forceinline__ void apply(const OperandAddress* operands, const Begins<Operands>& begins,
                                        const MaskedQuery& query, const MaskedKey& key,
                                        const Element (&accumulators)[kAccumulators], Register* results) const {
    const Coordinate at{query.row < call.query_length ? query.row : call.query_length - 1,
                        key.column < call.key_length ? key.column : call.key_length - 1, batch};
    Register operand[Operands::kArray];
    load_elements<0>(operands, begins, at, operand);
    Function::apply(accumulators, operand, ElementContext<Operands>{at, operands}, results);
  }
};

}  // namespace jaxdnn
