"""Gradients of what scores load, on Hopper (cpp/kernels/attention/sm90_loaded_gradient.cuh)."""

from dataclasses import replace

from jaxdnn.engines.attention.function import counted_band, place_parameters, place_types, slope_function
from jaxdnn.engines.attention.lists import BlockLists, mask_parameters, mask_places
from jaxdnn.engines.attention.problem import Attention, LoadGradient
from jaxdnn.engines.attention.sm90.knobs import head_size, value_size
from jaxdnn.engines.attention.sm90.unit import dropped, vectors
from jaxdnn.engines.attention.summed import loaded_sum
from jaxdnn.engines.product.element_epilogue import ctype, operand_type
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers, struct_text
from jaxdnn.plan import Launch, Scalar, Scratch

TILE_M, THREADS = 128, 384
WARPS = 8  # that have sums
SHARED = 227 * 1024  # of a block
# The members of a struct in the kernel's header, which a `Config` states only where it differs.
_DEFAULTS = (
    "jaxdnn::AttentionSm90LoadedGradientDefaults",
    {"Left": False, "Right": False, "Out": True, "SeenM": 64, "SeenN": 128},
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
    function = slope_function(problem, gradient.output)
    assert backward is not None
    assert function is not None
    function = replace(function, prefix=f"Loaded{number}")
    whole = loaded_sum(problem, gradient, (TILE_M, keys), sm_count)
    found, (stored, stages) = whole.stages(scratch, "float", number)
    seeds = {} if problem.dropout is None else {"seeds": problem.dropout.seeds}
    band = counted_band(problem.mask)
    types = {"T": ctype(problem.query.dtype)} | place_types(seeds | mask_places(problem))
    types |= {"Score": function.config} | ({} if lists is None else {"Mask": lists[0].function.config})
    types["DLoaded"] = operand_type(gradient.place, stored, "single", "jaxdnn::")
    score_bytes, weight_bytes = (
        DEPTH_BYTES * -(-size // CHUNK) * (TILE_M + keys) for size in (head_size(problem), value_size(problem))
    )
    if backward.d_out is None:
        weight_bytes = 0
    sums = WARPS * keys * 4
    # The ring of queries and keys is at least as deep as that of cotangents and values, which are needed later.
    score_stages, weight_stages = next(
        (a, b)
        for a, b in ((2, 2), (2, 1), (1, 1))
        if a * score_bytes + b * weight_bytes + sums + 16 * (a + b) <= SHARED
    )
    shared = score_stages * score_bytes + weight_stages * weight_bytes + sums + 16 * (score_stages + weight_stages)
    constants = {
        "Left": band.left is not None,
        "Right": band.right is not None,
        "Out": backward.d_out is not None,
        "SeenM": 64 if lists is None else lists[0].tile_m,
        "SeenN": 128 if lists is None else lists[0].tile_n,
        "TileN": keys,
        "HeadSize": head_size(problem),
        "ValueSize": value_size(problem),
        "ScoreStages": score_stages,
        "WeightStages": weight_stages,
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
        + f"static_assert({call}::kSharedBytes == {shared}, "
        + '"the plan and the kernel disagree about shared memory");\n'
        + entry_text("attention_sm90_loaded_gradient", call, f"{THREADS}, 1", found, entry)
    )
    grid = min(sm_count, whole.owners * whole.parts)
    launch = Launch(entry, arguments(found), (grid, 1, 1), (THREADS, 1, 1), shared_memory=shared)
    return [Stage(("attention/sm90_loaded_gradient.cuh",), text, (launch,)), *stages]
