"""The unit and the launches of attention's backward pass on Hopper."""

from math import ceil

from jaxdnn.engines.attention.function import (
    counted_band,
    heads_parameters,
    mask_function,
    place_parameters,
    slope_function,
)
from jaxdnn.engines.attention.lists import block_lists, differ_in_group, mask_parameters, mask_places
from jaxdnn.engines.attention.problem import Attention, Backward, Heads
from jaxdnn.engines.attention.score_tile import function_and_tile
from jaxdnn.engines.attention.shares import Shares, shared_gradients
from jaxdnn.engines.attention.sm90.backward.knobs import (
    FEWEST_FETCHED,
    THREADS,
    TILE_N,
    AttentionSm90BackwardKnobs,
    backward_shared_memory,
    held_with_functions,
    padded_size,
    sums_bytes,
)
from jaxdnn.engines.attention.sm90.loaded.unit import loaded_stages
from jaxdnn.engines.attention.sm90.loaded.unit import tile_n as loaded_width
from jaxdnn.engines.attention.sm90.unit import dropped, numbers_of_batch, score_tiles, vectors
from jaxdnn.engines.product.element_epilogue import ctype, operand_type
from jaxdnn.engines.product.problem import EpilogueOperand
from jaxdnn.engines.unit import (
    Parameter,
    Stage,
    arguments,
    entry_text,
    joined,
    numbers,
    shared_memory_text,
    struct_text,
)
from jaxdnn.plan import Launch, Plan, Scalar, Scratch

ROWS_THREADS = 256  # of attention/sm90/backward_rows.cuh
SINKS_SHARED = 64  # bytes, of attention/sm90/backward_sinks.cuh
_ROWS, _CONTRIBUTIONS, _QUERY_SUMS = Scratch(0), Scratch(1), Scratch(2)
# The members of a struct in attention/sm90/backward_call.cuh, which a `Config` states only where it differs.
DEFAULTS = (
    "jaxdnn::AttentionSm90BackwardDefaults",
    {
        "Left": False,
        "Right": False,
        "Out": True,
        "TileN": TILE_N,
        "ScoreTiled": False,
        "SumBuffers": 2,
        "Fetched": FEWEST_FETCHED,
    },
)


def backward_plan(problem: Attention, knobs: AttentionSm90BackwardKnobs, sm_count: int) -> Plan:
    """What one call does."""
    return _Statement(problem, knobs, sm_count).plan()


def backward_places(problem: Attention) -> dict[str, EpilogueOperand]:
    """What the kernels read and write besides vectors, by the fields of their calls; those that are there."""
    assert problem.backward is not None
    found = {"d_log_sum_exp": problem.backward.d_log_sum_exp, "d_sinks": problem.backward.d_sinks}
    shared = numbers_of_batch(problem) | mask_places(problem)
    return shared | {name: place for name, place in found.items() if place is not None}


def rows_of_block(value_size: int) -> int:
    """Queries of a block of attention/sm90/backward_rows.cuh: threads have 8 elements of each of 4."""
    return ROWS_THREADS // max(8, 1 << (value_size // 8 - 1).bit_length()) * 4


class _Statement:
    """A call, and what its kernels share."""

    def __init__(self, problem: Attention, knobs: AttentionSm90BackwardKnobs, sm_count: int) -> None:
        assert problem.backward is not None
        self.problem, self.knobs, self.sm_count = problem, knobs, sm_count
        self.backward: Backward = problem.backward
        self.places = backward_places(problem)
        self.batches = problem.batch * problem.query_heads
        self.blocks = ceil(problem.query_length / knobs.tile_m)
        ranked = self.backward.d_query is not None
        self.lists = block_lists(problem, knobs.tile_m, TILE_N, by_key=True, ranked=ranked)
        self.listed = _QUERY_SUMS.index + ranked  # the number of their first scratch buffer
        shared = self.listed + (0 if self.lists is None else 2 + self.lists.ranked)
        self.shares: Shares = shared_gradients(problem, knobs.shares, shared)
        score, self.score_tile = function_and_tile(problem, slope_function(problem), tiled=knobs.score_tiles)
        untransposed = {"Score": score, "Mask": mask_function(problem)}
        self.functions = {name: one.transpose(problem.query_length) for name, one in untransposed.items() if one}

    def plan(self) -> Plan:
        problem, knobs, backward = self.problem, self.knobs, self.backward
        asked = (backward.d_query, backward.d_key, backward.d_value)
        stages = [self.rows()]
        for part in range(knobs.parts):
            stages += [self.main(part)] if any(asked) else []
            stages += [] if backward.d_query is None else [self.query(backward.d_query, part)]
        stages += self.shares.stages
        if backward.d_sinks is not None:
            stages.append(self.sinks())
        blocks = self.batches * self.blocks
        sums = [blocks // knobs.parts * sums_bytes(problem, knobs)] if backward.d_query is not None else []
        own = Stage(scratch=(blocks * knobs.tile_m * 8, (blocks + knobs.parts) * 4, *sums))
        listing = [] if self.lists is None else [Stage(text=self.lists.function.text()), self.lists.stage(self.listed)]
        loaded = list[Stage]()
        for number, gradient in enumerate(backward.load_gradients):
            loaded += loaded_stages(
                problem,
                gradient,
                number,
                rows=(_ROWS, self.blocks * knobs.tile_m),
                lists=None if self.lists is None else (self.lists, self.listed),
                scratch=len(joined([own, *listing, *stages, *loaded]).scratch),
                sm_count=self.sm_count,
            )
        widths = {knobs.tile_m} | ({knobs.tile_m} if backward.d_query is None else {self.query_columns()})
        widths |= {loaded_width(problem)} if loaded else set()
        held = {padded_size(problem.head_size), padded_size(problem.value_head_size)}
        stated = Stage(
            text="".join(f"JAXDNN_WGMMA({width});\n" for width in sorted(widths))
            + "".join(f"JAXDNN_WGMMA_RS({width});\n" for width in sorted(held))
            + "".join(f"\n{function.text()}" for function in self.functions.values())
            + f"\n{self.config()}\n"
            + shared_memory_text("jaxdnn::AttentionSm90Backward<Config>", backward_shared_memory(problem, knobs))
        )
        return joined([own, Stage(text="\n"), *listing, stated, *stages, *loaded]).plan("sm_90a")

    @property
    def alike(self) -> bool:
        """Whether all query heads of a key head see the same, and drop nothing by bits of their own."""
        listed = self.lists is not None and self.lists.by_head
        return not (listed or differ_in_group(self.problem) or self.problem.dropout is not None)

    def query_columns(self) -> int:
        """Of a warp group's part, which has 64 rows."""
        return sums_bytes(self.problem, self.knobs) // (2 * 64 * 4)

    def config(self) -> str:
        problem, backward = self.problem, self.backward
        types = {"T": ctype(problem.query.dtype)}
        for name, place in self.places.items():
            types[name.title().replace("_", "")] = operand_type(place, ctype(place.dtype), "single", "jaxdnn::")
        stored = {"DQuery": backward.d_query, "DKey": self.shares.d_key, "DValue": self.shares.d_value}
        types |= {name: ctype(heads.dtype) for name, heads in stored.items() if heads is not None}
        types |= {name: function.config for name, function in self.functions.items()}
        band = counted_band(problem.mask)
        constants = {
            "Left": band.left is not None,
            "Right": band.right is not None,
            "TileN": TILE_N,
            "ScoreTiled": self.score_tile is not None,
            "SumBuffers": self.knobs.sums,
            "Fetched": held_with_functions(problem, self.knobs)[1],
            "Out": backward.d_out is not None,
            "TileM": self.knobs.tile_m,
            "HeadSize": padded_size(problem.head_size),
            "ValueSize": padded_size(problem.value_head_size),
        }
        return struct_text("Config", types, constants, DEFAULTS)

    def main(self, part: int) -> Stage:
        problem, knobs, backward = self.problem, self.knobs, self.backward
        heads = problem.batch * problem.key_heads * knobs.shares // knobs.parts
        tiles, group = ceil(problem.key_length / TILE_N) * heads, problem.group // knobs.shares
        found = [
            vectors(problem, "query", problem.query, knobs.tile_m),
            vectors(problem, "key", problem.key, TILE_N),
            vectors(problem, "value", problem.value, TILE_N),
            *([] if backward.d_out is None else [vectors(problem, "d_out", backward.d_out, knobs.tile_m)]),
            Parameter("const float*", "rows", "rows", _ROWS),
            *([] if backward.d_query is None else [Parameter("float*", "query_sums", "query_sums", _QUERY_SUMS)]),
            Parameter("unsigned*", "contributions", "contributions", _CONTRIBUTIONS),
            Parameter("unsigned*", "counter", "counter", Scratch(1, (self.batches * self.blocks + part) * 4)),
            *heads_parameters("d_key", self.shares.d_key),
            *heads_parameters("d_value", self.shares.d_value),
            *self.place_parameters("seeds"),
            *dropped(problem.dropout),
            *mask_parameters(problem),
            *(parameter for function in self.functions.values() for parameter in function.parameters()),
            *(() if self.score_tile is None else score_tiles(problem, self.score_tile, knobs.tile_m)),
            *(self.lists.parameters(self.listed) if self.lists is not None else ()),
            *numbers("long long", first_block=part * heads * group * self.blocks),
            *numbers(first_head=part * heads, heads=heads, key_heads=problem.key_heads, group=group),
            *(numbers(together=group) if self.alike and group > 1 else []),
            *(numbers(shares=knobs.shares) if knobs.shares > 1 else []),
            *numbers(head_size=problem.head_size, value_size=problem.value_head_size, swizzle=knobs.swizzle),
            *self.batched(),
            Parameter("float", "scale", "scale", Scalar("float32", problem.scale)),
        ]
        shared = backward_shared_memory(problem, knobs)
        return self.step("attention_sm90_backward", found, min(tiles, self.sm_count), THREADS, shared, part)

    def rows(self) -> Stage:
        problem, backward = self.problem, self.backward
        found = [
            *heads_parameters("out", problem.out),
            *heads_parameters("d_out", backward.d_out),
            *self.place_parameters("log_sum_exp", "d_log_sum_exp", "query_lengths"),
            Parameter("float*", "rows", "rows", _ROWS),
            Parameter("unsigned*", "contributions", "contributions", _CONTRIBUTIONS),
            *numbers(parts=self.knobs.parts),
            *numbers(query_heads=problem.query_heads, query_length=problem.query_length),
            *numbers(query_blocks=self.blocks, value_size=problem.value_head_size),
        ]
        rows = self.blocks * self.knobs.tile_m
        grid = self.batches * ceil(rows / rows_of_block(padded_size(problem.value_head_size)))
        return self.step("attention_sm90_backward_rows", found, grid, ROWS_THREADS)

    def query(self, d_query: Heads, part: int) -> Stage:
        problem, batches = self.problem, self.batches // self.knobs.parts
        found = [
            *heads_parameters("d_query", d_query),
            Parameter("const float*", "query_sums", "query_sums", _QUERY_SUMS),
            Parameter("const unsigned*", "contributions", "contributions", _CONTRIBUTIONS),
            *numbers(first_batch=part * batches),
            *numbers(query_heads=problem.query_heads, query_length=problem.query_length),
            *numbers(query_blocks=self.blocks, head_size=problem.head_size),
            Parameter("float", "scale", "scale", Scalar("float32", problem.scale)),
        ]
        return self.step("attention_sm90_backward_query", found, batches * self.blocks, 256, part=part)

    def sinks(self) -> Stage:
        found = [
            *self.place_parameters("sinks", "d_sinks", "d_log_sum_exp", "query_lengths"),
            Parameter("const float*", "rows", "rows", _ROWS),
            *numbers(batches=self.batches, query_length=self.problem.query_length),
            *numbers("long long", batch_rows=self.blocks * self.knobs.tile_m),
        ]
        return self.step("attention_sm90_backward_sinks", found, self.batches, 256, SINKS_SHARED)

    def step(
        self, kernel: str, found: list[Parameter], grid: int, threads: int, shared: int = 0, part: int = 0
    ) -> Stage:
        """A kernel's header, its entry point and its launch, for the first part; a launch for another one."""
        name = kernel.removeprefix("attention_")
        header = f"attention/{name}.cuh" if name == "sm90_backward" else f"attention/{name.replace('_', '/', 1)}.cuh"
        call = "jaxdnn::" + kernel.title().replace("_", "") + "<Config>"
        text = entry_text(kernel, call, f"{threads}, 1" if threads == THREADS else str(threads), found)
        launch = Launch(kernel, arguments(found), (grid, 1, 1), (threads, 1, 1), shared_memory=shared)
        if part:
            return Stage(launches=(launch,))
        return Stage((header,), f"\n{text}", (launch,))

    def place_parameters(self, *names: str) -> list[Parameter]:
        return [
            parameter
            for name in names
            if name in self.places
            for parameter in place_parameters(name, self.places[name])
        ]

    def batched(self) -> list[Parameter]:
        """Which arrays serve the whole batch."""
        if self.problem.batch == 1:
            return []
        problem, d_out = self.problem, self.backward.d_out
        read = {"query": problem.query, "key": problem.key, "value": problem.value}
        read |= {} if d_out is None else {"d_out": d_out}
        return numbers("int", **{f"{name}_batched": int(bool(heads.batch_stride)) for name, heads in read.items()})
