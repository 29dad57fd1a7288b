"""The unit and the launches of attention's gradients on Hopper as two kernels: one has tiles of queries, the other one
tiles of keys.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from jaxdnn.engines.attention.function import (
    ScoreFunction,
    counted_band,
    heads_parameters,
    mask_function,
    place_parameters,
    slope_function,
)
from jaxdnn.engines.attention.lists import BlockLists, block_lists, mask_parameters, mask_places
from jaxdnn.engines.attention.problem import Attention, Backward, Heads
from jaxdnn.engines.attention.shares import Shares, shared_gradients
from jaxdnn.engines.attention.sm90.backward.unit import (
    ROWS_THREADS,
    SINKS_SHARED,
    backward_places,
    rows_of_block,
)
from jaxdnn.engines.attention.sm90.gradients.knobs import (
    KEY_GRADIENT_THREADS,
    KEY_TILE,
    AttentionSm90GradientKnobs,
    gradient_size,
    key_shared_memory,
    query_shared_memory,
)
from jaxdnn.engines.attention.sm90.knobs import value_size
from jaxdnn.engines.attention.sm90.loaded.unit import loaded_stages
from jaxdnn.engines.attention.sm90.loaded.unit import tile_n as loaded_width
from jaxdnn.engines.attention.sm90.unit import TILE_COUNTERS, dropped, vector_size, vectors
from jaxdnn.engines.attention.transposed import Transposed, by_feature
from jaxdnn.engines.product.element_epilogue import ctype, operand_type
from jaxdnn.engines.unit import (
    Parameter,
    Stage,
    arguments,
    entry_text,
    includes,
    joined,
    map_parameter,
    numbers,
    shared_memory_text,
    struct_text,
)
from jaxdnn.plan import Counter, Launch, Plan, Scalar, Scratch

_ROWS = Scratch(0)
_STRIP = 16  # queries, of which all tiles have a multiple
# The members of structs in attention/sm90/gradient_call.cuh and backward_call.cuh, which a `Config` states only where
# it differs.
DEFAULTS = ("jaxdnn::AttentionSm90GradientDefaults", {"Left": False, "Right": False})
ROWS_DEFAULTS = "jaxdnn::AttentionSm90BackwardDefaults", {}


def gradient_plan(problem: Attention, knobs: AttentionSm90GradientKnobs, sm_count: int) -> Plan:
    """What one call does: numbers of rows, then the kernels of those gradients that are asked for."""
    assert problem.backward is not None
    return _Statement(problem, problem.backward, knobs, sm_count).plan()


def feature_maps(problem: Attention, features: dict[str, Transposed]) -> list[Parameter]:
    """The maps of what comes by features."""
    sizes = {"query": gradient_size(problem), "key": gradient_size(problem), "d_out": value_size(problem)}
    named = ((f"{name}_features", found.map(sizes[name])) for name, found in features.items())
    return [map_parameter(name, name, tensor_map) for name, tensor_map in named]


class _Statement:
    """A call, and what its kernels share."""

    def __init__(
        self, problem: Attention, backward: Backward, knobs: AttentionSm90GradientKnobs, sm_count: int
    ) -> None:
        assert backward.d_out is not None
        self.problem, self.backward, self.knobs, self.sm_count = problem, backward, knobs, sm_count
        self.d_out: Heads = backward.d_out
        self.places = backward_places(problem)
        self.batches = problem.batch * problem.query_heads
        # Numbers of rows are there for whole tiles of both kernels.
        self.rows = max(ceil(problem.query_length / tile) * tile for tile in (knobs.query_tile, knobs.query_block))
        self.functions = {"Score": slope_function(problem), "Mask": mask_function(problem)}

    def plan(self) -> Plan:
        problem, knobs, backward = self.problem, self.knobs, self.backward
        stages, widths, sums = [self.row_numbers()], set[int](), set[int]()
        of_queries = block_lists(problem, knobs.query_tile, knobs.key_block)
        if of_queries is not None and (backward.d_query is not None or backward.load_gradients):
            stages.append(of_queries.stage(len(joined(stages).scratch)))
        lists = None if of_queries is None else (of_queries, 1)
        if backward.d_query is not None:
            features = self.features(stages, ("key",))
            stages.append(self.query_gradient(backward.d_query, lists, features))
            widths.add(knobs.key_block)
            sums.add(gradient_size(problem))
        if backward.d_key is not None or backward.d_value is not None:
            first = len(joined(stages).scratch)
            of_keys = block_lists(problem, knobs.query_block, KEY_TILE * knobs.cluster, by_key=True)
            if of_keys is not None:
                of_keys = replace(of_keys, name="_by_key")
                stages.append(of_keys.stage(first))
            features = self.features(stages, ("query", "d_out"))
            shares = shared_gradients(problem, knobs.shares, len(joined(stages).scratch))
            of_keys = None if of_keys is None else (of_keys, first)
            stages += [self.key_gradient(of_keys, shares, features), *shares.stages]
            widths.add(knobs.query_block)
            sums |= {gradient_size(problem), value_size(problem)}
        if backward.d_sinks is not None:
            stages.append(self.sinks())
        for number, gradient in enumerate(backward.load_gradients):
            widths.add(loaded_width(problem))
            stages += loaded_stages(
                problem,
                gradient,
                number,
                rows=(_ROWS, self.rows),
                lists=lists,
                scratch=len(joined(stages).scratch),
                sm_count=self.sm_count,
            )
        whole = joined(stages)
        functions = [one for one in self.functions.values() if one is not None]
        functions += [one.transpose(problem.query_length) for one in functions]
        text = [f"JAXDNN_WGMMA({n});\n" for n in sorted(widths)] + [f"JAXDNN_WGMMA_RS({n});\n" for n in sorted(sums)]
        text += [f"\n{function.text()}" for function in functions]
        unit = includes(whole.headers) + "\n" + "".join(text) + whole.text
        return Plan(unit, "sm_90a", whole.launches, whole.scratch)

    def features(self, stages: list[Stage], names: tuple[str, ...]) -> dict[str, Transposed]:
        """What comes by features, of float32, whose stages are added."""
        problem, found = self.problem, dict[str, Transposed]()
        if not by_feature(problem):
            return found
        vectors = {"query": problem.query, "d_out": self.d_out, "key": problem.key}
        for name in names:
            length, heads, size = (
                (problem.key_length, problem.key_heads, problem.head_size)
                if name == "key"
                else (problem.query_length, problem.query_heads, vector_size(problem, name))
            )
            buffer = Scratch(len(joined(stages).scratch))
            found[name] = Transposed(vectors[name], problem.batch, length, heads, size, buffer, f"_{name}")
            stages.append(found[name].stage())
        return found

    def row_numbers(self) -> Stage:
        """Both kernels need these."""
        names = ("log_sum_exp", "d_log_sum_exp", "query_lengths")
        found = [
            *heads_parameters("out", self.problem.out),
            *heads_parameters("d_out", self.d_out),
            *self.place_parameters(names),
            Parameter("float*", "rows", "rows", _ROWS),
            *numbers(query_heads=self.problem.query_heads, query_length=self.problem.query_length),
            *numbers(query_blocks=self.rows // _STRIP, value_size=self.problem.value_head_size),
        ]
        size = value_size(self.problem)
        types = {"T": ctype(self.problem.query.dtype)} | self.place_types((*names, "sinks", "d_sinks"))
        text = struct_text("RowsConfig", types, {"TileM": _STRIP, "ValueSize": size}, ROWS_DEFAULTS)
        grid = self.batches * ceil(self.rows / rows_of_block(size))
        stage = self.small("rows", text, found, grid, ROWS_THREADS)
        return replace(stage, scratch=(self.batches * self.rows * 8,))

    def sinks(self) -> Stage:
        found = [
            *self.place_parameters(("sinks", "d_sinks", "d_log_sum_exp", "query_lengths")),
            Parameter("const float*", "rows", "rows", _ROWS),
            *numbers(batches=self.batches, query_length=self.problem.query_length),
            *numbers("long long", batch_rows=self.rows),
        ]
        return self.small("sinks", "", found, self.batches, 256, SINKS_SHARED)

    def small(
        self, name: str, text: str, found: list[Parameter], grid: int, threads: int, shared_memory: int = 0
    ) -> Stage:
        """One of the kernels that the backward pass as one kernel has, too."""
        kernel = f"attention_sm90_backward_{name}"
        call = f"jaxdnn::AttentionSm90Backward{name.title()}<RowsConfig>"
        launch = Launch(kernel, arguments(found), (grid, 1, 1), (threads, 1, 1), shared_memory=shared_memory)
        text = f"\n{text}\n{entry_text(kernel, call, str(threads), found)}"
        return Stage((f"attention/sm90/backward_{name}.cuh",), text, (launch,))

    def query_gradient(
        self, d_query: Heads, lists: tuple[BlockLists, int] | None, features: dict[str, Transposed]
    ) -> Stage:
        """The kernel whose tiles are of queries; `lists` come with their first scratch buffer."""
        problem, knobs = self.problem, self.knobs
        functions = {name: one for name, one in self.functions.items() if one is not None}
        constants = {
            "Turns": knobs.turns,
            "TileM": knobs.query_tile,
            "TileN": knobs.key_block,
            "KeyStages": knobs.key_stages,
            "ValueStages": knobs.value_stages,
        }
        found = [
            *self.parameters(knobs.query_tile, knobs.key_block, knobs.query_swizzle),
            *self.function_parameters(functions, lists),
            *feature_maps(problem, features),
            *heads_parameters("d_query", d_query),
            *numbers(group=problem.group),
        ]
        return self.stage(
            "attention_sm90_query_gradient",
            ({"DQuery": ctype(d_query.dtype)} | {name: one.config for name, one in functions.items()}, constants),
            found,
            (ceil(problem.query_length / knobs.query_tile) * self.batches, 1),
            (knobs.query_threads, query_shared_memory(problem, knobs)),
        )

    def key_gradient(
        self, lists: tuple[BlockLists, int] | None, shares: Shares, features: dict[str, Transposed]
    ) -> Stage:
        """The kernel whose tiles are of keys."""
        problem, knobs = self.problem, self.knobs
        functions = {
            name: one.transpose(problem.query_length) for name, one in self.functions.items() if one is not None
        }
        wanted = {"DKey": shares.d_key, "DValue": shares.d_value}
        types = {name: ctype((heads or problem.key).dtype) for name, heads in wanted.items()}
        types |= {name: one.config for name, one in functions.items()}
        constants = {"TileM": knobs.query_block, "Stages": knobs.query_stages, "Cluster": knobs.cluster}
        found = [
            *self.parameters(knobs.query_block, KEY_TILE, knobs.key_swizzle),
            *self.function_parameters(functions, lists),
            *feature_maps(problem, features),
            *heads_parameters("d_key", shares.d_key),
            *heads_parameters("d_value", shares.d_value),
            *numbers(key_heads=problem.key_heads, group=problem.group // knobs.shares),
            *(numbers(shares=knobs.shares) if knobs.shares > 1 else []),
        ]
        heads = problem.batch * problem.key_heads * knobs.shares
        tiles = ceil(problem.key_length / (KEY_TILE * knobs.cluster)) * heads
        return self.stage(
            "attention_sm90_key_gradient",
            (types, constants),
            found,
            (tiles, knobs.cluster),
            (KEY_GRADIENT_THREADS, key_shared_memory(problem, knobs)),
        )

    def stage(
        self,
        kernel: str,
        stated: tuple[dict[str, str], dict[str, int]],
        found: list[Parameter],
        clusters: tuple[int, int],
        block: tuple[int, int],
    ) -> Stage:
        """A kernel: its own types and constants, how many clusters' tiles and blocks of one, its threads and memory."""
        (types, constants), (tiles, cluster), (threads, shared_memory) = stated, clusters, block
        at_once = self.sm_count // cluster
        counter = Counter(TILE_COUNTERS) if tiles > at_once else Scalar("int32", -1)
        found = [*found, Parameter("int", "counter", "counter", counter)]
        name = kernel.title().replace("_", "")
        config, call = f"{name}Config", f"jaxdnn::{name}<{name}Config>"
        band = counted_band(self.problem.mask)
        named = ("seeds", *mask_places(self.problem))
        types = {"T": ctype(self.problem.query.dtype)} | self.place_types(named) | types
        constants = {
            "Left": band.left is not None,
            "Right": band.right is not None,
            "HeadSize": gradient_size(self.problem),
            "ValueSize": value_size(self.problem),
        } | constants
        text = (
            f"\n{struct_text(config, types, constants, DEFAULTS)}\n"
            + shared_memory_text(call, shared_memory)
            + f"static_assert(jaxdnn::kTileCounters == {TILE_COUNTERS});\n\n"
            + entry_text(kernel, call, f"{threads}, 1", found)
        )
        launch = Launch(
            kernel,
            arguments(found),
            grid=(min(tiles, at_once) * cluster, 1, 1),
            block=(threads, 1, 1),
            cluster=(cluster, 1, 1),
            shared_memory=shared_memory,
        )
        return Stage((f"attention/{kernel.removeprefix('attention_')}.cuh",), text, (launch,))

    def parameters(self, queries: int, keys: int, swizzle: int) -> list[Parameter]:
        """What both kernels have: operands, by so many queries and keys, and the numbers of the call."""
        problem = self.problem
        read = {"query": problem.query, "d_out": self.d_out, "key": problem.key, "value": problem.value}
        batched = {f"{name}_batched": int(bool(heads.batch_stride)) for name, heads in read.items()}
        return [
            *(
                vectors(problem, name, heads, queries if name in ("query", "d_out") else keys)
                for name, heads in read.items()
            ),
            Parameter("const float*", "rows", "rows", _ROWS),
            *self.place_parameters(("seeds",)),
            *dropped(problem.dropout),
            *mask_parameters(problem),
            *numbers(batch_rows=self.rows, batches=problem.batch),
            *numbers(head_size=problem.head_size, value_size=problem.value_head_size, swizzle=swizzle),
            *(numbers("int", **batched) if problem.batch > 1 else []),
            Parameter("float", "scale", "scale", Scalar("float32", problem.scale)),
        ]

    def function_parameters(
        self, functions: dict[str, ScoreFunction], lists: tuple[BlockLists, int] | None
    ) -> list[Parameter]:
        """What functions load, and where lists are."""
        found = [parameter for function in functions.values() for parameter in function.parameters()]
        return found if lists is None else [*found, *lists[0].parameters(lists[1])]

    def place_types(self, names: Iterable[str]) -> dict[str, str]:
        """The types of those that are there."""
        return {
            name.title().replace("_", ""): operand_type(place, ctype(place.dtype), "single", "jaxdnn::")
            for name in names
            if (place := self.places.get(name)) is not None
        }

    def place_parameters(self, names: Iterable[str]) -> list[Parameter]:
        """Where those are that are there."""
        return [
            parameter
            for name in names
            if (place := self.places.get(name)) is not None
            for parameter in place_parameters(name, place)
        ]
