"""Attention, or its backward pass, as engines see it.

Scores have three coordinates: batch (`b * query_heads + head`), row (the query) and column (the key). For each row

  s[k]   = score(scale * query . key[k], operands...)                      where key k is visible, else -infinity
  m      = log(sum of exp(s[k]) over the keys, and of exp(sink))           the log-sum-exp
  out    = sum of exp(s[k] - m) * kept[k] * value[k] over the keys         kept: dropout's factor, else 1

and of a row without visible keys out is zero, and m is -infinity (or the sink). The backward pass, with p = exp(s - m):

  delta  = out . d_out - d_m                                               one number a row
  d_p[k] = kept[k] * (d_out . value[k])
  d_s[k] = p[k] * (d_p[k] - delta)                                         what `Backward.gradient` is given
  d_sink = -exp(sink - m) * delta, summed over the rows that share it
"""

from dataclasses import dataclass

import numpy as np

from jaxdnn.engines.base import Problem
from jaxdnn.engines.product.problem import EpilogueOperand, dense_operand
from jaxdnn.plan import Operand, Result, Scratch
from jaxdnn.pointwise import AffineLoad, Program, Term, Terms


@dataclass(frozen=True)
class Heads:
    """An array of vectors, one for each batch element, position and head. Strides count elements.

    Attributes:
      batch: what `b`, of the batch coordinate b * heads + head, adds to the offset; none if all elements share one.
      length_stride, head_stride: between neighbouring positions, and heads of this array.
      feature_stride: between the elements of a vector.
    """

    buffer: Operand | Result | Scratch
    dtype: str
    batch: Terms
    length_stride: int
    head_stride: int
    feature_stride: int = 1

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def place(self) -> EpilogueOperand:
        """The first element of each vector, over `b`, positions and heads."""
        terms = (self.batch, (Term(self.length_stride),), (Term(self.head_stride),))
        return dense_operand(AffineLoad(0, terms), self.buffer, self.dtype)

    @property
    def batch_stride(self) -> int | None:
        """Of `b`, where that is all there is to it; None where there are terms."""
        if not self.batch:
            return 0
        return self.batch[0].stride if len(self.batch) == 1 and self.batch[0].plain else None


@dataclass(frozen=True)
class Band:
    """Keys from `left` positions before the query's to `right` after it; None for no bound.

    Causal is Band(None, 0). Bounds may be negative, so that an alignment which is known is part of them: where the last
    query stands at the last key, left is less, and right is more, by as many keys as there are more than queries.
    """

    left: int | None = None
    right: int | None = None


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: those which every part that is there allows.

    All arrays are integers of 32 bits, over the coordinates of scores. "Of a row" and "of a column" are those that vary
    with the batch and that coordinate alone.

    Attributes:
      band: by the distance of the key's position to the query's.
      query_positions, key_positions: of a row and of a column; else a position is the coordinate.
      query_offset: of a batch, what is added to a query's position for `band` alone.
      query_lengths, key_lengths: of a batch: how many rows, and columns, there are. Both are within their axis.
      query_segments, key_segments: of a row and of a column: both are equal, and not negative.
      program: any function of the coordinates, without accumulators and with one output of bool.
      operands: its loads, in order.
    """

    band: Band = Band()
    query_positions: EpilogueOperand | None = None
    key_positions: EpilogueOperand | None = None
    query_offset: EpilogueOperand | None = None
    query_lengths: EpilogueOperand | None = None
    key_lengths: EpilogueOperand | None = None
    query_segments: EpilogueOperand | None = None
    key_segments: EpilogueOperand | None = None
    program: Program | None = None
    operands: tuple[EpilogueOperand, ...] = ()


@dataclass(frozen=True)
class Dropout:
    """Of each probability, whether it is kept, and divided by the rate of those that are.

    The random bits of (row, column) are word `column % 4` of Philox4x32-10 (Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", SC 2011), whose key are the two words of `seeds` and whose counter is (column // 4, row, 0, 0).

    Attributes:
      threshold: a probability is kept whose bits, an unsigned number, are at least this: 2^32 times the rate.
      seeds: of a batch, the first of two neighbouring words of 32 bits.
    """

    threshold: int
    seeds: EpilogueOperand

    @property
    def factor(self) -> float:
        """Of what is kept."""
        return 1 / (1 - self.threshold / 2**32)


@dataclass(frozen=True)
class LoadGradient:
    """The gradient of an array that `Attention.score` loads.

    Attributes:
      output: the number of the output of `Backward.gradient` that each coordinate adds.
      place: the element that it is added to, as the load has it; sums are of the accumulators' dtype, and rounded once.
    """

    output: int
    place: EpilogueOperand


@dataclass(frozen=True)
class Backward:
    """What the backward pass has besides what the forward one has. None is an array that is zero, or not asked for.

    Attributes:
      d_out, d_log_sum_exp: the cotangents.
      d_query, d_key, d_value: the gradients; those of key and value are sums over the query heads that share them.
      d_sinks: likewise; the place of a row's share, which many rows add to.
      gradient: of `Attention.score`: the accumulators are that one's (scale * query . key) and d_s; the outputs are the
        cotangent of the first, and what is added to each of `load_gradients`. None if there is no `score`.
      operands: its loads, in order.
      load_gradients: of arrays that `score` loads.
    """

    d_out: Heads | None
    d_log_sum_exp: EpilogueOperand | None
    d_query: Heads | None
    d_key: Heads | None
    d_value: Heads | None
    d_sinks: EpilogueOperand | None = None
    gradient: Program | None = None
    operands: tuple[EpilogueOperand, ...] = ()
    load_gradients: tuple[LoadGradient, ...] = ()


@dataclass(frozen=True)
class Attention(Problem):
    """One call: forward, or if `backward` is there, backward; then `out` and `log_sum_exp` are operands.

    Attributes:
      batch: how many `b` there are.
      query_length, key_length: rows and columns; `Mask` may say that there are fewer.
      query_heads, key_heads: the first is a multiple of the second, and query head n attends to key head
        n // (query_heads // key_heads).
      head_size: of queries and keys.
      value_head_size: of values and results.
      accumulator: the dtype of scores, sums and the log-sum-exp: float32, or float64 where the arrays are.
      scale: of query . key.
      score: a function of the scaled product, or None for that itself: bias, soft cap and whatever the caller adds.
      operands: its loads, in order.
      sinks: of a batch, a score that is part of the sum and has no value; in its own floating dtype.
      log_sum_exp: of a row; None if it is not asked for.
      exact: whether float32 operands may not be rounded to tf32.
      deterministic: whether results must be the same, bit for bit, from run to run.
    """

    family = "attention"

    batch: int
    query_length: int
    key_length: int
    query_heads: int
    key_heads: int
    head_size: int
    value_head_size: int
    query: Heads
    key: Heads
    value: Heads
    out: Heads
    log_sum_exp: EpilogueOperand | None
    accumulator: str
    scale: float
    mask: Mask = Mask()
    score: Program | None = None
    operands: tuple[EpilogueOperand, ...] = ()
    sinks: EpilogueOperand | None = None
    dropout: Dropout | None = None
    backward: Backward | None = None
    exact: bool = False
    deterministic: bool = True

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.query_heads // self.key_heads
