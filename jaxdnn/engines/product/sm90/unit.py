"""The unit and the launches of a product on Hopper: copies of operands, the kernel that multiplies, and what follows.

Kernels are in cpp/kernels: product/copy.cuh copies operands, if need be; product/sm90.cuh multiplies; after it come
product/split.cuh, which adds the accumulators of a K that was split, or product/reduce.cuh, which ends reductions
(jaxdnn/engines/product/reductions.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

from jaxdnn.device import fewest_clusters
from jaxdnn.engines.product.affine import term_parameters
from jaxdnn.engines.product.copies import copy_stage
from jaxdnn.engines.product.edges import edge_constants, edge_parameters
from jaxdnn.engines.product.element_epilogue import element_epilogue, operand_type
from jaxdnn.engines.product.length import is_long
from jaxdnn.engines.product.operands import packed, swapped
from jaxdnn.engines.product.problem import Matrix, Product, Reduced, identity
from jaxdnn.engines.product.reductions import PARTIAL_BYTES, Reductions, reduced_axis, reduced_text, reduced_type
from jaxdnn.engines.product.sm90.knobs import (
    WARP_ROWS,
    Sm90Knobs,
    depth,
    evicts_first,
    multiplied_columns,
    piece_bytes,
    shared_memory,
    store_columns,
    tile_stage,
)
from jaxdnn.engines.product.sm90_grid import cluster_tiles, kept_tiles, lines_of_blocks
from jaxdnn.engines.product.split_k import Diagonal, split_accumulators, split_stage
from jaxdnn.engines.product.tiles import operand_matrix, tile_operands
from jaxdnn.engines.product.tma import DEPTH_BYTES, STEPS, SWIZZLE, operand_map, tensor_map
from jaxdnn.engines.product.views import view_maps
from jaxdnn.engines.unit import (
    Constant,
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
from jaxdnn.plan import Counter, Launch, Scalar, Scratch, TensorMap
from jaxdnn.pointwise import Functor, functor

WARPS = 4  # of a consumer
TILE_COUNTERS = 1024  # of core/tile_queue.cuh
BRIEF_STAGES = 3  # of a tile, up to which batches are bound by memory
LEAST_TAKEN = (128 * 64, 32)  # elements of a tile, and of K, whose time hides that a tile is taken
# The members of a struct in product/sm90.cuh, which a `Config` states only where it differs.
DEFAULTS = (
    "ProductSm90Defaults",
    {
        "MMajorA": False,
        "NMajorB": True,
        "Pingpong": False,
        "TensorStore": True,
        "PairedStore": True,
        "PieceBytes": 0,
        "StoreLines": False,
        "EvictFirst": False,
        "LongEpilogue": False,
        "OwnLines": False,
        "BlockLines": False,
        "EdgeA": False,
        "EdgeB": False,
        "Line": DEPTH_BYTES,
        "Steps": STEPS,
        "Accumulators": 1,
        "StoreColumns": 32,
        **Sm90Knobs().constants,
    },
)


class Unit:
    """The text, the launches and the scratch buffers of one product.

    A product whose operands are loaded otherwise says so: it has a kernel of its own, whose call derives from a
    product's, with its tiles, constants and parameters.
    """

    kernel = "product_sm90"
    call = "ProductSm90"
    instruction = "WGMMA"  # of ptx/wgmma.cuh
    diagonal = Diagonal()
    kept = 1  # columns, or rows, of tiles, of which each block keeps to one
    brief_batches = True  # whether tiles of a few stages of a batch are taken from a counter, too

    def __init__(self, product: Product, knobs: Sm90Knobs, sm_count: int) -> None:
        self.knobs, self.sm_count = knobs, sm_count
        self.headers: list[str] = []
        self.texts: list[str] = []
        self.steps: list[Stage] = []
        self.launches: list[Launch] = []
        self.scratch: list[int] = []
        loaded = swapped(product) if knobs.swapped else product
        self.product, copies = packed(loaded, knobs.views, whole_rows=knobs.whole_rows)
        if copies:
            self.then(copy_stage(copies, product.batch))
        self.fetched = tile_operands(product) if knobs.fetch == "tma" else ()  # operands that TMA loads
        self.kept = max(self.kept, kept_tiles(self.product, knobs, self.tiles(self.product), sm_count))
        warps = self.blocks(self.product) * WARPS * knobs.consumers
        self.reductions = Reductions(self.product, WARP_ROWS, knobs.tile_n, warps, self.straight, self.lines_of_blocks)
        if knobs.split_k > 1:
            self._split()
        else:
            epilogue = functor(self.product.program)
            partials = self._partials(epilogue)
            self.multiply(self.product, epilogue, "Config", partials)
            self.then(self.reductions.end(partials))

    @property
    def straight(self) -> bool:
        """Whether rows of tiles are those of the results, one after the other."""
        return True

    @property
    def lines_of_blocks(self) -> int:
        """Of what is reduced."""
        if not self.straight and reduced_axis(self.product) != 1:
            return 0
        return lines_of_blocks(self.product, self.knobs, self.blocks(self.product), self.kept)

    @property
    def text(self) -> str:
        steps = joined(self.steps)
        own = "\nnamespace jaxdnn {\n\n" + "\n".join(self.texts) + "\n}  // namespace jaxdnn\n"
        return includes((*self.headers, *steps.headers)) + own + steps.text

    def buffer(self, size: int) -> Scratch:
        """Scratch memory of `size` bytes."""
        self.scratch.append(size)
        return Scratch(len(self.scratch) - 1)

    def launch(
        self, header: str, suffix: str, call: str, found: Sequence[Parameter], bounds: str, **shape: Any
    ) -> None:
        """Adds a launch of the kernel of `header`, and an entry point for it, unless there is one already."""
        kernel = header + suffix
        text = entry_text(header, call, bounds, found, kernel)
        if text not in self.texts:
            self.texts.append(text)
        file = f"{header.replace('_', '/', 1)}.cuh"
        if file not in self.headers:
            self.headers.append(file)
        self.launches.append(Launch(kernel, arguments(found), **shape))

    def then(self, stage: Stage) -> None:
        """Adds a step that other engines have too."""
        self.steps.append(stage)
        self.launches += stage.launches
        self.scratch += stage.scratch

    # ------------------------------------------------------------ the epilogue's operands and results

    def traits(self, product: Product, epilogue: Functor) -> dict[str, str]:
        """The types of a `Config` that say what the epilogue reads and writes."""
        operands = []
        for number, operand in enumerate(product.operands):
            columns = "tile" if number in self.fetched else operand.columns(product.n)
            operands.append(operand_type(operand, operand.dtype, columns))
        results = [
            reduced_text(result, register) if isinstance(result, Reduced) else result.dtype
            for result, register in zip(product.results, epilogue.results, strict=True)
        ]
        return {
            "Epilogue": f"jaxdnn::{epilogue.name}",
            "Operands": f"TypeList<{', '.join(operands)}>",
            "Results": f"TypeList<{', '.join(results)}>",
            "Accumulator": product.accumulator,
        }

    def operand_parameters(self, product: Product) -> list[Parameter]:
        """The epilogue's operands, with those strides that are used."""
        found = []
        for i, operand in enumerate(product.operands):
            strides = {"row_stride": operand.row_stride, "batch_stride": operand.batch_stride}
            if i in self.fetched:
                matrix = operand_matrix(operand, product)
                batch, columns = product.batch if matrix.batch_stride else 1, store_columns(self.product, self.knobs)
                boxes = self.result_map(matrix, batch, columns)
                found.append(map_parameter(f"operand{i}", f"operands[{i}].map", boxes))
                strides = {"batch_stride": matrix.batch_stride}
            else:
                found.append(Parameter(f"const {operand.dtype}*", f"operand{i}", f"operands[{i}].data", operand.buffer))
            if i not in self.fetched and (operand.column_stride > 1 or operand.gathered):
                strides["column_stride"] = operand.column_stride
            for name, stride in strides.items():
                if stride:
                    argument = Scalar("int64", stride)
                    found.append(Parameter("long long", f"operand{i}_{name}", f"operands[{i}].{name}", argument))
            found += term_parameters(f"operand{i}", f"operands[{i}]", operand)
        return found

    def result_parameters(
        self, product: Product, knobs: Sm90Knobs, batch: int, partials: dict[int, tuple[str, Scratch]]
    ) -> list[Parameter]:
        """The results' tensor maps, or their addresses."""
        columns = store_columns(self.product, knobs)
        found = []
        for i, result in enumerate(product.results):
            if isinstance(result, Reduced):
                ctype, scratch = partials[i]
                found.append(Parameter(f"{ctype}*", f"partials{i}", f"results[{i}].data", scratch))
            elif knobs.store == "tma":
                found.append(map_parameter(f"result{i}", f"results[{i}].map", self.result_map(result, batch, columns)))
            else:
                found.append(Parameter(f"{result.dtype}*", f"result{i}", f"results[{i}].data", result.buffer))
        return found

    def result_map(self, result: Matrix, batch: int, columns: int) -> TensorMap:
        """The map of a result's subtiles, 16 rows of so many columns; or, swapped, 64 columns of so many rows."""
        across, down = (4 * WARP_ROWS, columns) if self.knobs.swapped else (columns, WARP_ROWS)
        return tensor_map(result, batch, (across, down), SWIZZLE[across * result.itemsize])

    # ------------------------------------------------------------ the kernel that multiplies

    def multiply(
        self, product: Product, epilogue: Functor, config: str, partials: dict[int, tuple[str, Scratch]]
    ) -> None:
        """Adds the kernel that multiplies and applies `epilogue`."""
        knobs = self.knobs
        batch, found = product.batch * knobs.split_k, self.load_parameters(product)
        constants = {
            "PieceBytes": piece_bytes(product, knobs) if knobs.store in ("rows", "lines") else 0,
            "StoreLines": knobs.store == "lines",
            **self.load_constants(product),
            **edge_constants(found),
            "Pingpong": knobs.schedule == "pingpong",
            "TensorStore": knobs.store != "direct",
            "PairedStore": product.n % 2 == 0,
            "EvictFirst": evicts_first(product, knobs),
            "LongEpilogue": is_long(product.program),
            "OwnLines": self.reductions.own_lines,
            "BlockLines": self.reductions.block_lines,
            "Accumulators": len(product.b),
            "StoreColumns": store_columns(self.product, knobs),
            **knobs.constants,
            "TileN": knobs.tile_n * len(product.b),
        }
        types = {"A": product.a.dtype, "B": product.b[0].dtype, **self.traits(product, epilogue)}
        call = f"{self.call}<{config}>"
        shared = self.shared_memory(product)
        if width := multiplied_columns(product, knobs):
            self.texts.append(f"JAXDNN_{self.instruction}({width});\n")
        self.texts.append(epilogue.source)
        self.texts.append(struct_text(config, types, constants, DEFAULTS))
        self.texts.append(shared_memory_text(call, shared) + f"static_assert(kTileCounters == {TILE_COUNTERS});\n")
        found += self.result_parameters(product, knobs, batch, partials) + self.operand_parameters(product)
        found += numbers(m=product.m, n=product.n, k=product.k, batches=product.batch, swizzle=knobs.swizzle)
        if knobs.split_k > 1:
            found += numbers(splits=knobs.split_k)
        if knobs.views > 1:
            found += numbers(view_stages=self.fewest_stages(product) // knobs.views)
        if product.batch > 1:
            a_batched, b_batched = (int(matrix.batch_stride != 0) for matrix in (product.a, product.b[0]))
            found += numbers(a_batched=a_batched, b_batched=b_batched)
        tiles, cluster = self.tiles(product), knobs.cluster_m * knobs.cluster_n
        blocks = self.blocks(product)
        takes = self.kept == 1 and tiles > blocks // cluster and not self.reductions.own_lines
        takes = takes and self.takes_tiles(product)
        if takes:
            found.append(Parameter("int", "counter", "counter", Counter(TILE_COUNTERS)))
        grid, block = (blocks, 1, 1), (knobs.threads, 1, 1)
        shape = {"grid": grid, "block": block, "cluster": (cluster, 1, 1), "shared_memory": shared}
        self.launch(self.kernel, "", call, found, f"{knobs.threads}, 1", **shape)

    def fewest_stages(self, product: Product) -> int:
        """That a tile takes."""
        return ceil(product.k / (self.depth(product) * self.knobs.split_k))

    def takes_tiles(self, product: Product) -> bool:
        """Whether it pays to take tiles from a counter: core/tile_queue.cuh."""
        knobs, stages = self.knobs, self.fewest_stages(product)
        # Blocks that are dealt the tiles of a batch drift apart ([48] in benchmarks/results/product_kernels.md).
        if self.brief_batches and product.batch > 1 and stages <= BRIEF_STAGES:
            return knobs.tile_m * knobs.tile_n >= LEAST_TAKEN[0] and product.k >= LEAST_TAKEN[1]
        # The producer takes a tile while it loads the one before, and is as far ahead as there are stages.
        return stages >= 2 * knobs.stages

    def tiles(self, product: Product) -> int:
        """How many tiles of clusters there are."""
        return cluster_tiles(product, self.knobs) * product.batch * self.knobs.split_k

    def blocks(self, product: Product) -> int:
        """Of the grid."""
        cluster = self.knobs.cluster_m * self.knobs.cluster_n
        return cluster * fewest_clusters(self.tiles(product), cluster, self.sm_count, self.kept)

    def depth(self, product: Product) -> int:
        """Elements of K in a stage."""
        return depth(product)

    def stage(self, product: Product) -> int:
        """Bytes of a stage of operands."""
        return tile_stage(product, self.knobs)

    def shared_memory(self, product: Product) -> int:
        """Bytes of the multiplying kernel's."""
        return shared_memory(self.product, self.knobs, self.stage(product))

    def load_constants(self, product: Product) -> dict[str, Constant]:
        """What the code that loads the operands is compiled with."""
        return {"MMajorA": product.a_transposed, "NMajorB": not product.b_transposed}

    def load_parameters(self, product: Product) -> list[Parameter]:
        """The tensor maps of a and b."""
        knobs, batch = self.knobs, product.batch
        a = operand_map(product.a, batch, product.a_transposed, knobs.tile_m, sharers=knobs.cluster_n)
        along, shape = not product.b_transposed, {"extent": knobs.tile_n, "sharers": knobs.cluster_m}
        if knobs.views > 1:
            b = [one for b in product.b for one in view_maps(b, batch, knobs.views, **shape)]
        else:
            b = [operand_map(b, batch, along, **shape) for b in product.b]
        found = [map_parameter("a", "a", a)] + [map_parameter(f"b{i}", f"b[{i}]", one) for i, one in enumerate(b)]
        return found + edge_parameters(product, knobs.tile, knobs.cluster, knobs.views)

    # ------------------------------------------------------------ a second step

    def _split(self) -> None:
        """The kernel that multiplies stores its accumulators; the second adds them and applies the epilogue."""
        product, accumulators, used = self.product, len(self.product.b), len(self.scratch)
        store = identity(accumulators, product.accumulator, product.accumulator)
        stored = split_accumulators(product, used, self.diagonal)
        first = replace(product, m=stored[0].rows, results=stored, operands=(), program=store)
        self.multiply(first, functor(store, "Store"), "Config", {})
        epilogue, _ = element_epilogue(product, used + accumulators)
        self.then(split_stage(product, epilogue, self.knobs.split_k, used, self.diagonal))

    def _partials(self, epilogue: Functor) -> dict[int, tuple[str, Scratch]]:
        """Of each result that is reduced, the type of its partial reductions and the memory for them."""
        product, found = self.product, {}
        for i, result in enumerate(product.results):
            if isinstance(result, Reduced):
                size = prod(self.reductions.extents(result)) * PARTIAL_BYTES
                found[i] = reduced_type(epilogue.results[i]), self.buffer(size)
        return found
