"""Gradients of what scores load, on Hopper (cpp/kernels/attention/sm90_loaded_gradient.cuh)."""

from dataclasses import replace
from math import ceil

from jaxdnn.engines.attention.function import counted_band, place_parameters, place_types, slope_function
from jaxdnn.engines.attention.lists import BlockLists, mask_parameters, mask_places
from jaxdnn.engines.attention.problem import Attention, LoadGradient
from jaxdnn.engines.attention.score_tile import function_and_tile
from jaxdnn.engines.attention.sm90.knobs import head_size, value_size
from jaxdnn.engines.attention.sm90.unit import dropped, score_tiles, vectors
from jaxdnn.engines.attention.summed import loaded_sum
from jaxdnn.engines.product.element_epilogue import ctype, operand_type
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers, shared_memory_text, struct_text
from jaxdnn.plan import Launch, Scalar, Scratch

TILE_M, THREADS = 128, 384
WARPS = 8  # that have sums
SHARED = 227 * 1024  # of a block
FLOPS = 2.6e12  # a second, of a block (benchmarks/results/attention_kernels.md)
MOST_ODD_ROWS = 8  # of tiles, of which clusters of two would leave one idle
# Of queries and keys, of cotangents and values, which are needed later, and of loaded tiles.
_STAGES = ((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1))
# The members of a struct in the kernel's header, which a `Config` states only where it differs.
_DEFAULTS = (
    "jaxdnn::AttentionSm90LoadedGradientDefaults",
    {
        "Left": False,
        "Right": False,
        "Out": True,
        "SeenM": 64,
        "SeenN": 128,
        "Cluster": 1,
        "LoadedStages": 0,
        "LoadedOnce": False,
    },
)


def tile_n(problem: Attention) -> int:
    """Keys of a tile: two tiles of vectors are in shared memory at once."""
    return 128 if max(problem.head_size, problem.value_head_size) <= 128 else 64


def loaded_stages(
    problem: Attention,
    gradient: LoadGradient,
    number: int,
    *,
    rows: tuple[Scratch, int],
    lists: tuple[BlockLists, int] | None,
    scratch: int,
    sm_count: int,
) -> list[Stage]:
    """The sum of what scores add to an array.

    `rows` are the numbers of rows, and how many of a batch there are; `lists` know what is visible, and come with the
    number of their first scratch buffer; `scratch` is the number of the first one that is free.
    """
    backward, keys = problem.backward, tile_n(problem)
    function, tile = function_and_tile(problem, slope_function(problem, gradient.output), tiled=True)
    assert backward is not None
    assert function is not None
    function = replace(function, prefix=f"Loaded{number}")
    by_row, by_column = bool(gradient.place.row_stride), bool(gradient.place.column_stride)
    cluster = _cluster(problem, sm_count) if by_row and by_column else 1
    whole = loaded_sum(problem, gradient, (TILE_M * cluster, keys), sm_count // cluster, FLOPS * cluster)
    found, (stored, stages) = whole.stages(scratch, "float", number)
    seeds = {} if problem.dropout is None else {"seeds": problem.dropout.seeds}
    band = counted_band(problem.mask)
    types = {"T": ctype(problem.query.dtype)} | place_types(seeds | mask_places(problem))
    types |= {"Score": function.config} | ({} if lists is None else {"Mask": lists[0].function.config})
    columns = gradient.place.columns(problem.key_length)
    types["DLoaded"] = operand_type(gradient.place, stored, columns, "jaxdnn::")
    score_bytes, weight_bytes = (
        DEPTH_BYTES * -(-size // CHUNK) * (TILE_M + keys) for size in (head_size(problem), value_size(problem))
    )
    if backward.d_out is None:
        weight_bytes = 0
    loaded_bytes = 0 if tile is None else DEPTH_BYTES * -(-keys // CHUNK) * TILE_M
    rings, shared = _rings((score_bytes, weight_bytes, loaded_bytes), 0 if by_row else WARPS * keys * 4)
    constants = {
        "Left": band.left is not None,
        "Right": band.right is not None,
        "Out": backward.d_out is not None,
        "SeenM": 64 if lists is None else lists[0].tile_m,
        "SeenN": 128 if lists is None else lists[0].tile_n,
        "TileN": keys,
        "HeadSize": head_size(problem),
        "ValueSize": value_size(problem),
        "ScoreStages": rings[0],
        "WeightStages": rings[1],
        "LoadedStages": rings[2],
        "LoadedOnce": tile is not None and by_row and by_column and whole.batches.share(tile, problem.query_heads),
        "Cluster": cluster,
    }
    read = {"query": problem.query, "key": problem.key, "value": problem.value}
    read |= {} if backward.d_out is None else {"d_out": backward.d_out}
    batched = {f"{name}_batched": int(bool(heads.batch_stride)) for name, heads in read.items()}
    found = [
        *(
            vectors(problem, name, heads, TILE_M if name in ("query", "d_out") else keys)
            for name, heads in read.items()
        ),
        Parameter("const float*", "rows", "rows", rows[0]),
        *(p for name, place in seeds.items() for p in place_parameters(name, place)),
        *function.parameters(),
        *(() if tile is None else score_tiles(problem, tile, TILE_M)),
        *mask_parameters(problem),
        *([] if lists is None else [*lists[0].function.parameters(), *lists[0].seen_parameters(lists[1])]),
        *found,
        *numbers(targets=whole.batches.count, batch_rows=rows[1], group=problem.group),
        *(numbers("int", **batched) if problem.batch > 1 else []),
        *dropped(problem.dropout),
        Parameter("float", "scale", "scale", Scalar("float32", problem.scale)),
    ]
    config, entry = f"Loaded{number}Config", f"attention_sm90_loaded_gradient_{number}"
    call = f"jaxdnn::AttentionSm90LoadedGradient<{config}>"
    text = (
        f"\n{function.text()}\n"
        + struct_text(config, types, constants, _DEFAULTS)
        + shared_memory_text(call, shared)
        + entry_text("attention_sm90_loaded_gradient", call, f"{THREADS}, 1", found, entry)
    )
    clusters = min(sm_count // cluster, whole.owners * whole.parts)
    launch = Launch(
        entry,
        arguments(found),
        (clusters * cluster, 1, 1),
        (THREADS, 1, 1),
        cluster=(cluster, 1, 1),
        shared_memory=shared,
    )
    return [Stage(("attention/sm90_loaded_gradient.cuh",), text, (launch,)), *stages]


def _cluster(problem: Attention, sm_count: int) -> int:
    """Blocks that share keys: two, unless too many tiles of an odd last row would be without a second one."""
    rows = ceil(problem.query_length / TILE_M)
    return 2 if sm_count > 1 and (rows % 2 == 0 or rows > MOST_ODD_ROWS) else 1


def _rings(sizes: tuple[int, int, int], sums: int) -> tuple[tuple[int, ...], int]:
    """The stages of each ring, of so many bytes, 0 where there is no array in tiles; and the bytes of shared memory."""
    for found in _STAGES:
        stages = (*found[:2], found[2] if sizes[2] else 0)
        needed = sum(n * (size + 16) for n, size in zip(stages, sizes, strict=True)) + sums
        if needed <= SHARED:
            return stages, needed
    raise AssertionError("one stage of each fits")
