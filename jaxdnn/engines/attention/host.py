"""dot_product_attention on the CPU: blocks of queries by blocks of keys in cache (cpp/host/attention/call.h)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from jaxdnn.device import Target
from jaxdnn.engines.attention.problem import Attention, Heads
from jaxdnn.engines.base import MAX_ARGUMENTS, ProblemEngine, check_least
from jaxdnn.engines.product.problem import EpilogueOperand
from jaxdnn.plan import Argument, Constant, Launch, Plan, Scalar, Scratch
from jaxdnn.pointwise import AffineLoad, Index, Program
from jaxdnn.pointwise.bytecode import MAX_INDICES, bytecode, terms_words
from jaxdnn.pointwise.operations import DTYPES

_PANEL = 32  # queries of a panel are this many, or a half or a quarter
_LANES = 16  # of a register, at most
_COUNTER = 4  # neighbouring keys that share one counter of dropout's random bits
# Tasks that keys are cut into at least, where they suffice; more of them take more memory.
_LEAST_TASKS = 16
_LEAST_JOINT_TASKS = 2  # where each has its keys of all heads
_LEAST_WORK = 2**16  # multiplications of a task, where heads are many: about 10 us of a core with AVX2
# Queries that stream, of the notes too; and where vectors end in the middle of a register.
_FEW_QUERIES, _FEW_RAGGED_QUERIES = 24, 8
_UNBOUNDED = 2**40  # of a band: beyond any position

_LOAD_GRADIENTS = 4  # kLoadGradients in cpp/host/attention/call.h

_FLOATS = {"float32": ("float32", "bfloat16", "float16"), "float64": ("float64",)}


@dataclass(frozen=True)
class HostAttentionKnobs:
    """Knobs of attention on the CPU.

    Attributes:
      query_block: queries that a task of the forward pass owns, and that the backward one takes at a time.
      key_block: keys that are taken at a time.
      splits: parts of a head's keys, each a task of the backward pass, or of a forward one that streams, with its own
        sums.
      streams: whether the forward pass reads keys and values where they lie, and once for all queries of the heads
        that share them, which pays for few queries.
      per_task: such blocks of queries, or splits, that a task does one after the other: several, where they are small.
    """

    query_block: int
    key_block: int
    splits: int
    streams: bool = False
    per_task: int = 1

    def __post_init__(self) -> None:
        check_least(self, 1, "query_block", "key_block", "splits", "per_task")
        for name, step in (("query_block", _PANEL), ("key_block", _COUNTER)):
            if getattr(self, name) % step:
                raise ValueError(
                    f"HostAttentionKnobs: {name} must be a multiple of {step}; got {getattr(self, name)!r}"
                )


class HostAttention(ProblemEngine[Attention, HostAttentionKnobs]):
    """Scores in cache, vectors as wide as the processor's, XLA's own threads."""

    name = "host"
    platform = "cpu"
    problem = Attention
    notes = ("deterministic",)

    def reason(self, problem: Attention, target: Target) -> str | None:
        del target
        call = _Call(HostAttentionKnobs(_PANEL, _COUNTER, 1), problem)
        for heads in call.heads.values():
            if heads is not None and heads.dtype not in _FLOATS[problem.accumulator]:
                return f"its kernels sum in {problem.accumulator}, and an array is {heads.dtype}"
            if heads is not None and heads.feature_stride != 1:
                return "the elements of a vector are no neighbours in memory"
        if problem.log_sum_exp is not None and problem.log_sum_exp.dtype != problem.accumulator:
            return f"the log-sum-exp is {problem.log_sum_exp.dtype}, and sums are {problem.accumulator}"
        if len(call.load_gradients) > _LOAD_GRADIENTS:
            return f"its function of scores has gradients of more than {_LOAD_GRADIENTS} arrays"
        if unknown := {place.dtype for place in call.load_gradients} - {*_FLOATS["float32"], "float64"}:
            return f"its kernels don't write gradients of {' and '.join(sorted(unknown))}"
        for program, dtype in zip(call.programs, (problem.accumulator, "bool", problem.accumulator), strict=True):
            if program is not None and program.outputs[0].dtype != dtype:
                return f"a function of scores returns {program.outputs[0].dtype}, and its kernels want {dtype}"
        operands = [operand for group in call.operands for operand in group]
        if any(len(operand.gathered) > MAX_INDICES for operand in operands):
            return f"a function of scores looks an operand up by more than {MAX_INDICES} integers at once"
        if unknown := {operand.dtype for operand in operands} - set(DTYPES):
            return f"functions of scores don't load arrays of {' and '.join(sorted(unknown))}"
        if len(call.arguments()) > MAX_ARGUMENTS:
            return "its functions of scores load too many arrays"
        return None

    def configurations(self, problem: Attention, target: Target) -> Iterable[HostAttentionKnobs]:
        del target
        backward = problem.backward is not None
        # Of the notes on the host in benchmarks/results/attention_kernels.md.
        blocks = ((128, 256), (64, 256), (128, 128)) if backward else ((256, 128), (128, 128), (256, 256), (64, 128))
        found = [_knobs(problem, *sizes) for sizes in blocks]
        ragged = problem.head_size % _LANES or problem.value_head_size % _LANES
        if not backward and problem.query_length <= (_FEW_RAGGED_QUERIES if ragged else _FEW_QUERIES):
            found = [_knobs(problem, _PANEL, keys, streams=True) for keys in (256, 128, 512)] + found
        return dict.fromkeys(found)

    def build(self, config: HostAttentionKnobs, problem: Attention, target: Target) -> Plan:
        del target
        call = _Call(config, problem)
        return Plan(unit="", arch="", launches=tuple(call.launches()), scratch=call.scratch)


def _knobs(problem: Attention, query_block: int, key_block: int, *, streams: bool = False) -> HostAttentionKnobs:
    joint = problem.backward is not None and problem.backward.load_gradients
    tasks = 1 if joint else problem.batch * problem.key_heads
    if joint:  # Tasks share nothing but keys.
        key_block = min(key_block, _up(math.ceil(problem.key_length / _LEAST_JOINT_TASKS), _PANEL))
    query_block = min(query_block, _up(problem.query_length, _PANEL))
    key_block = min(key_block, max(_COUNTER, _up(problem.key_length, _COUNTER)))
    most = max(1, math.ceil(problem.key_length / key_block)) if streams or problem.backward is not None else 1
    splits = min(most, math.ceil(_LEAST_TASKS / tasks))
    per_task = 1 if joint else _per_task(problem, of_query_heads=problem.backward is None and not streams)
    return HostAttentionKnobs(query_block, key_block, splits, streams, per_task)


def _per_task(problem: Attention, *, of_query_heads: bool) -> int:
    """How many heads make a task, if they are small and many."""
    owned = problem.batch * (problem.query_heads if of_query_heads else problem.key_heads)
    scores = problem.batch * problem.query_heads * problem.query_length * problem.key_length
    work = scores * (problem.head_size + problem.value_head_size) // owned
    return max(1, min(_LEAST_WORK // max(1, work), owned // _LEAST_TASKS))


@dataclass(frozen=True)
class _Call:
    """One call's launches. The order of the words is that of `CallWords` in cpp/host/attention/call.h."""

    config: HostAttentionKnobs
    problem: Attention

    @property
    def heads(self) -> dict[str, Heads | None]:
        """The arrays of vectors."""
        problem, backward = self.problem, self.problem.backward
        found = {name: getattr(problem, name) for name in ("query", "key", "value", "out")}
        gradients = ("d_out", "d_query", "d_key", "d_value")
        return found | {name: None if backward is None else getattr(backward, name) for name in gradients}

    @property
    def places(self) -> tuple[EpilogueOperand | None, ...]:
        problem, mask, backward = self.problem, self.problem.mask, self.problem.backward
        vectors = {name: None if heads is None else heads.place for name, heads in self.heads.items()}
        return (
            *(vectors[name] for name in ("query", "key", "value", "out")),
            problem.log_sum_exp,
            problem.sinks,
            None if problem.dropout is None else problem.dropout.seeds,
            mask.query_positions,
            mask.key_positions,
            mask.query_offset,
            mask.query_lengths,
            mask.key_lengths,
            mask.query_segments,
            mask.key_segments,
            vectors["d_out"],
            None if backward is None else backward.d_log_sum_exp,
            *(vectors[name] for name in ("d_query", "d_key", "d_value")),
            None if backward is None else backward.d_sinks,
            *self.load_gradients,
            *[None] * (_LOAD_GRADIENTS - len(self.load_gradients)),
        )

    @property
    def load_gradients(self) -> tuple[EpilogueOperand, ...]:
        backward = self.problem.backward
        return () if backward is None else tuple(gradient.place for gradient in backward.load_gradients)

    @property
    def streams(self) -> bool:
        return self.config.streams and self.problem.backward is None

    @property
    def splits(self) -> int:
        """One, where scores of several columns add to one element of a gradient."""
        shared = any(place.column_stride == 0 for place in self.load_gradients)
        return 1 if shared else self.config.splits

    @property
    def has_vectors(self) -> bool:
        """Whether gradients of queries, keys or values are asked for."""
        return any(self.heads[name] is not None for name in ("d_query", "d_key", "d_value"))

    @property
    def whole(self) -> bool:
        """Whether a task of the backward pass has all keys of a head in one block: no other adds to the gradient
        of queries, or needs delta.
        """
        one_block = self.splits == 1 and self.problem.key_length <= self.config.key_block
        return one_block and self.has_vectors and not self.load_gradients

    @property
    def programs(self) -> tuple[Program | None, ...]:
        backward = self.problem.backward
        gradient = None if backward is None else backward.gradient
        if gradient is not None:
            # What is added up is stored as the accumulators are.
            outputs = tuple(replace(output, dtype=self.problem.accumulator) for output in gradient.outputs)
            gradient = replace(gradient, outputs=outputs)
        return self.problem.score, self.problem.mask.program, gradient

    @property
    def operands(self) -> tuple[tuple[EpilogueOperand, ...], ...]:
        """Of each program."""
        backward = self.problem.backward
        return self.problem.operands, self.problem.mask.operands, () if backward is None else backward.operands

    @property
    def query_blocks(self) -> int:
        problem = self.problem
        return problem.batch * problem.query_heads * math.ceil(problem.query_length / self.config.query_block)

    @property
    def sinks(self) -> int:
        """The elements of their gradient."""
        place = None if self.problem.backward is None else self.problem.backward.d_sinks
        return 0 if place is None else _elements(place, self.scores)

    @property
    def scores(self) -> tuple[int, int, int]:
        return self.problem.batch * self.problem.query_heads, self.problem.query_length, self.problem.key_length

    @property
    def added(self) -> tuple[int, ...]:
        """The elements of the gradients of what the score loads."""
        return tuple(_elements(place, self.scores) for place in self.load_gradients)

    @property
    def scratch(self) -> tuple[int, ...]:
        """Sizes: delta, what splits leave, the sums of the sinks' gradient and of those of loaded arrays."""
        problem = self.problem
        size = np.dtype(problem.accumulator).itemsize
        heads = problem.batch * problem.query_heads
        if problem.backward is None:
            # A row's maximum and sum, and its result.
            rows = heads * problem.query_length if self.streams and self.splits > 1 else 0
            return 0, self.splits * rows * (2 + problem.value_head_size) * size, 0, 0
        vectors = 0 if problem.backward.d_query is None else heads * _up(problem.query_length, _PANEL)
        parts = 0 if self.whole else self.splits * vectors * problem.head_size
        return heads * problem.query_length * size, parts * size, self.sinks * 8, sum(self.added) * size

    def launches(self) -> Iterator[Launch]:
        problem, backward, arguments = self.problem, self.problem.backward, self.arguments()

        def launch(kernel: str, count: int, per_task: int = 1) -> Launch:
            return Launch(f"attention_{kernel}_{problem.accumulator}", arguments, (math.ceil(count / per_task), 1, 1))

        groups, per_task = problem.batch * problem.key_heads, self.config.per_task
        if self.streams:
            yield launch("decode", groups * self.splits, per_task)
            if self.splits > 1:
                yield launch("combine", groups)
            return
        if backward is None:
            yield launch("forward", self.query_blocks, per_task)
            return
        if not self.whole:
            yield launch("delta", self.query_blocks)
        if self.load_gradients:
            yield launch("backward", self.splits, per_task)
            yield launch("d_loaded", len(self.load_gradients))
        elif self.has_vectors:
            yield launch("backward", groups * self.splits, per_task)
        if backward.d_query is not None and not self.whole:
            yield launch("d_query", self.query_blocks)
        if backward.d_sinks is not None:
            yield launch("d_sinks", 1)

    def arguments(self) -> tuple[Argument, ...]:
        none = Scalar("int64", 0)
        scratch = [Scratch(index) for index in range(len(self.scratch))]
        kept = [p if p is None or self.streams else _transposed(p) for p in self.programs]
        programs = [none if p is None else Constant(bytecode(p)) for p in kept]
        buffers: list[Argument] = [none if place is None else place.buffer for place in self.places]
        for program, operands in zip(programs, self.operands, strict=True):
            buffers += [program, *(operand.buffer for operand in operands)]
        return (Constant(self.words()), *buffers, *scratch)

    def words(self) -> tuple[int, ...]:
        problem, config, dropout = self.problem, self.config, self.problem.dropout
        band = (problem.mask.band.left, problem.mask.band.right)
        words = [problem.batch, problem.query_length, problem.key_length, problem.query_heads, problem.key_heads]
        words += [problem.head_size, problem.value_head_size, config.query_block, config.key_block, self.splits]
        words += [_UNBOUNDED if bound is None else bound for bound in band]
        words += [0 if dropout is None else dropout.threshold]
        words += [Scalar("float64", 1 if dropout is None else dropout.factor).bits]
        words += [Scalar("float64", problem.scale).bits, self.sinks]
        words += [config.per_task, int(bool(self.load_gradients)), int(self.whole)]
        words += [*self.added, *[0] * (_LOAD_GRADIENTS - len(self.added))]
        words += [len(operands) for operands in self.operands]
        operands = [operand for operands in self.operands for operand in operands]
        strides = [stride for operand in operands for stride in self._strides(operand)]
        tables: list[int] = []
        first = len(words) + 5 * len(self.places) + len(strides)
        for place in self.places:
            if place is None:
                words += [-1, 0, 0, 0, 0]
                continue
            table = terms_words(place.terms)
            words += [DTYPES.index(place.dtype), place.batch_stride, place.row_stride, place.column_stride]
            words.append(first + len(tables) if table else 0)
            tables += table
        return (*words, *strides, *tables)

    def _strides(self, operand: EpilogueOperand) -> tuple[int, int, int]:
        """Over scores, as kernels keep them."""
        row, column = operand.row_stride, operand.column_stride
        return operand.batch_stride, *((row, column) if self.streams else (column, row))


def _transposed(program: Program) -> Program:
    """The function of transposed scores: its rows are keys."""
    swapped = (0, 2, 1)

    def transposed(immediate: object) -> object:
        match immediate:
            case AffineLoad(_, (batch, row, column)):
                return replace(immediate, terms=(batch, column, row))
            case Index(dimension):
                return replace(immediate, dimension=swapped[dimension])
        return immediate

    instructions = (replace(one, immediate=transposed(one.immediate)) for one in program.instructions)
    return replace(program, instructions=tuple(instructions))


def _elements(place: EpilogueOperand, sizes: tuple[int, int, int]) -> int:
    """How many there are of a dense array that is read over all of these coordinates."""
    last = 0
    strides = (place.batch_stride, place.row_stride, place.column_stride)
    for size, stride, terms in zip(sizes, strides, place.terms, strict=True):
        last += (size - 1) * stride
        for term in terms:
            steps = (size - 1) // term.divisor
            last += (min(steps, term.modulus - 1) if term.modulus else steps) * term.stride
    return last + 1


def _up(size: int, step: int) -> int:
    return math.ceil(size / step) * step
