"""The unit and the launches of attention on Hopper."""

import numpy as np

from jaxdnn.engines.attention.combine import combine_stage, partial_attention
from jaxdnn.engines.attention.function import counted_band, place_parameters, place_types, score_function
from jaxdnn.engines.attention.lists import BlockLists, block_lists, mask_parameters, mask_places, segments_alone
from jaxdnn.engines.attention.problem import Attention, Dropout, Heads
from jaxdnn.engines.attention.score_tile import ScoreTile, function_and_tile
from jaxdnn.engines.attention.sm90.knobs import (
    AttentionSm90Knobs,
    head_size,
    shared_memory,
    tile_count,
    tile_rows,
    value_size,
)
from jaxdnn.engines.attention.transposed import Transposed, by_feature
from jaxdnn.engines.product.element_epilogue import ctype
from jaxdnn.engines.product.problem import EpilogueOperand
from jaxdnn.engines.product.tma import DEPTH_BYTES, PROMOTE_128, SWIZZLE, element_type
from jaxdnn.engines.unit import (
    Parameter,
    Stage,
    arguments,
    entry_text,
    joined,
    map_parameter,
    numbers,
    shared_memory_text,
    struct_text,
)
from jaxdnn.plan import Counter, Launch, Operand, Plan, Result, Scalar, Scratch, TensorMap

TILE_COUNTERS = 1024  # of core/tile_queue.cuh
# The members of a struct in attention/sm90.cuh, which a `Config` states only where it differs.
DEFAULTS = (
    "jaxdnn::AttentionSm90Defaults",
    {
        "Left": False,
        "Right": False,
        "Heads": 1,
        "Blocks": 1,
        "ScoreStages": 0,
        "Cluster": 1,
        "Skips": False,
        "Halves": False,
        "Spanned": False,
    },
)


def numbers_of_batch(problem: Attention) -> dict[str, EpilogueOperand]:
    """What the kernel reads and writes besides vectors and for its mask, by the fields of its call."""
    found = {
        "sinks": problem.sinks,
        "log_sum_exp": problem.log_sum_exp,
        "seeds": problem.dropout and problem.dropout.seeds,
    }
    return {name: operand for name, operand in found.items() if operand is not None}


def plan(problem: Attention, knobs: AttentionSm90Knobs, sm_count: int) -> Plan:
    """What one call does."""
    lists = block_lists(problem, knobs.tile_m, knobs.tile_n, spanned=knobs.heads == 1 and _has_spans(problem))
    stages = [] if lists is None else [Stage(text=lists.function.text()), lists.stage(0)]
    values = None
    if by_feature(problem):
        buffer = Scratch(len(joined(stages).scratch))
        values = Transposed(
            problem.value, problem.batch, problem.key_length, problem.key_heads, problem.value_head_size, buffer
        )
        stages.append(values.stage())
    scratch = len(joined(stages).scratch)
    split = knobs.splits > 1
    whole_or_part = partial_attention(problem, scratch) if split else problem
    stages.append(attention_stage(whole_or_part, knobs, sm_count, lists, values))
    if split:
        stages.append(combine_stage(problem, knobs.splits, scratch))
    return joined(stages).plan("sm_90a")


def _has_spans(problem: Attention) -> bool:
    """Whether spans of keys are worth finding: of segments, which takes no longer than lists of blocks, and where a
    function looks up tables, tens of instructions for each score. What a function of scores loads leaves no registers
    for their code.
    """
    looks_up = any(operand.gathered for operand in problem.mask.operands)
    return (segments_alone(problem) or looks_up) and not problem.operands


def attention_stage(
    problem: Attention, knobs: AttentionSm90Knobs, sm_count: int, lists: BlockLists | None, values: Transposed | None
) -> Stage:
    """Attention to keys, or to each split of them; then each has results, one after the other."""
    band, places = counted_band(problem.mask), numbers_of_batch(problem)
    types = {"T": ctype(problem.query.dtype), "Out": ctype(problem.out.dtype)}
    types |= place_types(places | mask_places(problem))
    score, tile = function_and_tile(problem, score_function(problem), tiled=knobs.score_stages > 0)
    functions = [one for one in (score, lists and lists.function) if one is not None]
    types |= {function.name.title(): function.config for function in functions}
    constants = {
        "Left": band.left is not None,
        "Right": band.right is not None,
        "TileM": knobs.tile_m,
        "TileN": knobs.tile_n,
        "QueryStages": knobs.query_stages,
        "QueryInRegisters": knobs.query_in_registers,
        "Stages": knobs.stages,
        "ScoreStages": knobs.score_stages,
        "Cluster": knobs.cluster,
        "Skips": knobs.skips,
        "Halves": knobs.halves,
        "Heads": knobs.heads,
        "Blocks": knobs.blocks,
        "Spanned": lists is not None and lists.spanned,
        "HeadSize": head_size(problem),
        "ValueSize": value_size(problem),
    }
    shared = shared_memory(problem, knobs)
    tiles = tile_count(problem, knobs) * knobs.splits // knobs.cluster
    blocks = sm_count * knobs.blocks // knobs.cluster
    found = [
        vectors(problem, "query", problem.query, knobs.tile_m // knobs.heads, knobs.heads),
        vectors(problem, "key", problem.key, knobs.tile_n),
        vectors(problem, "value", problem.value, knobs.tile_n)
        if values is None
        else map_parameter("value", "value", values.map(value_size(problem))),
        Parameter(f"{ctype(problem.out.dtype)}*", "out", "out", problem.out.buffer),
        *numbers(
            "long long",
            out_row=problem.out.length_stride,
            out_head=problem.out.head_stride,
            out_batch=problem.out.batch_stride or 0,
        ),
        *(parameter for name, place in places.items() for parameter in place_parameters(name, place)),
        *(parameter for function in functions for parameter in function.parameters()),
        *mask_parameters(problem),
        *(lists.parameters(0) if lists is not None else ()),
        *numbers(batches=problem.batch, group=problem.group),
        *numbers(value_size=problem.value_head_size),
        *numbers(tile_rows=tile_rows(problem, knobs) // knobs.cluster, swizzle=knobs.swizzle),
        *(numbers(splits=knobs.splits) if knobs.splits > 1 else []),
        *batched(problem),
        *(score_tiles(problem, tile, knobs.tile_m) if tile is not None else ()),
        *dropped(problem.dropout),
        Parameter("float", "scale", "scale", Scalar("float32", problem.scale)),
        Parameter("int", "counter", "counter", Counter(TILE_COUNTERS) if tiles > blocks else Scalar("int32", -1)),
    ]
    call = "jaxdnn::AttentionSm90<Config>"
    text = [
        "".join(f"JAXDNN_WGMMA{kind}({columns});\n" for kind, columns in multiplies(problem, knobs)),
        *([] if score is None else [score.text()]),
        struct_text("Config", types, constants, DEFAULTS),
        shared_memory_text(call, shared) + f"static_assert(jaxdnn::kTileCounters == {TILE_COUNTERS});\n",
        entry_text("attention_sm90", call, f"{knobs.threads}, {knobs.blocks}", found),
    ]
    launch = Launch(
        "attention_sm90",
        arguments(found),
        grid=(min(tiles, blocks) * knobs.cluster, 1, 1),
        block=(knobs.threads, 1, 1),
        cluster=(knobs.cluster, 1, 1),
        shared_memory=shared,
    )
    return Stage(("attention/sm90.cuh",), "\n" + "\n".join(text), (launch,))


def multiplies(problem: Attention, knobs: AttentionSm90Knobs) -> list[tuple[str, int]]:
    """The instructions of scores, of whole blocks and of halves, and of sums of values."""
    widths = (knobs.tile_n, knobs.tile_n // 2) if knobs.halves else (knobs.tile_n,)
    of_scores = [("_RS" if knobs.query_in_registers else "", width) for width in widths]
    return list(dict.fromkeys([*of_scores, ("_RS", value_size(problem))]))


def vector_size(problem: Attention, name: str) -> int:
    """Elements of a query, key, value or result's cotangent."""
    return problem.value_head_size if name in ("value", "d_out") else problem.head_size


def vectors(problem: Attention, name: str, heads: Heads, box: int, together: int = 1) -> Parameter:
    """The tensor map of queries, keys, values or results' cotangents, by `box` of them, of each of so many heads."""
    size = vector_size(problem, name)
    queries = name in ("query", "d_out")
    length, count = (problem.query_length, problem.query_heads) if queries else (problem.key_length, problem.key_heads)
    dimensions = (size, length, count, problem.batch if heads.batch_stride else 1)
    strides = (heads.length_stride, heads.head_stride, heads.batch_stride or 0)
    return map_parameter(name, name, _chunks(heads.buffer, heads.dtype, dimensions, strides, (box, together)))


def score_tiles(problem: Attention, tile: ScoreTile, queries: int) -> list[Parameter]:
    """The tensor map of what a function of scores reads in tiles of so many queries, and which axes it has."""
    by_head, by_element = bool(tile.head_stride), bool(tile.batch_stride)
    heads, batch = problem.query_heads if by_head else 1, problem.batch if by_element else 1
    dimensions = (problem.key_length, problem.query_length, heads, batch)
    strides = (tile.row_stride, tile.head_stride, tile.batch_stride)
    tensor_map = _chunks(tile.buffer, tile.dtype, dimensions, strides, (queries, 1))
    headed = numbers(score_headed=int(by_head), score_batched=int(by_element))
    return [map_parameter("score_tile", "score_tile", tensor_map), *headed]


def _chunks(
    buffer: Operand | Result | Scratch,
    dtype: str,
    dimensions: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, int],
) -> TensorMap:
    """The map of lines of elements that are multiplied, of which a box is a chunk of so many. Strides count those."""
    itemsize = np.dtype(dtype).itemsize
    # A dimension of one element may have any stride; TMA wants multiples of 16 bytes, and the array's may be none.
    sized = zip(dimensions[1:], strides, strict=True)
    return TensorMap(
        buffer=buffer,
        dtype=element_type(dtype, multiplied=True),
        dimensions=dimensions,
        strides=tuple(itemsize * stride if extent > 1 else DEPTH_BYTES for extent, stride in sized),
        box=(DEPTH_BYTES // itemsize, *box, 1),
        element_strides=(1, 1, 1, 1),
        swizzle=SWIZZLE[DEPTH_BYTES],
        l2_promotion=PROMOTE_128,
    )


def batched(problem: Attention) -> list[Parameter]:
    """Which arrays serve the whole batch."""
    if problem.batch == 1:
        return []
    query, key, value = (int(bool(heads.batch_stride)) for heads in (problem.query, problem.key, problem.value))
    return numbers(query_batched=query, key_batched=key, value_batched=value)


def dropped(dropout: Dropout | None) -> list[Parameter]:
    """Which random bits have a weight kept, and its factor."""
    if dropout is None:
        return []
    # As a number of 64 bits, since a scalar of 32 has a sign.
    return [
        *numbers("long long", threshold=dropout.threshold),
        Parameter("float", "kept", "kept", Scalar("float32", dropout.factor)),
    ]
