"""What a plan for a GPU says of memory: that it stays within buffers, and asks of the hardware what that can do."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from checking.product.calls import ProductCase
from checking.product.cases import gated, reductions
from checking.targets import H100
from jaxdnn.engines.product.element_epilogue import element_epilogue, itemsize
from jaxdnn.engines.product.operands import packed
from jaxdnn.engines.product.problem import dense_results
from jaxdnn.engines.product.reduce import reduce_stage
from jaxdnn.engines.product.simt.engine import Simt
from jaxdnn.engines.product.skinny.engine import Skinny
from jaxdnn.engines.product.skinny.knobs import skinny
from jaxdnn.engines.product.sm90.engine import Sm90
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.plan import Result, Scalar, Scratch, TensorMap

ENGINES = {engine.name: engine for engine in (Sm90(), Skinny(), Simt())}


def most_reductions(acc, full):
    """All but that over the batch alone, which sm90 leaves to others."""
    over = (jnp.sum(acc * full, axis=axes) for axes in (1, 2, (0, 1), (1, 2), (0, 1, 2)))
    return acc, jnp.max(acc), *over


def case(m, n, k, dtype, **fields):
    return ProductCase(m, n, k, dtype, precision="default", **fields)


def cases():
    """By name. Sizes differ from each other and from those of tiles."""
    found = {}
    for m, dtype in itertools.product((300, 40), ("bfloat16", "float32", "int8")):
        for a, b, shared in itertools.product((False, True), (False, True), ("", "a", "b")):
            layout = {"a_transposed": a, "b_transposed": b, "shared": shared, "batch": 3}
            found[f"{dtype} {m} {'nt'[a]}{'nt'[b]} {shared}"] = case(m, 264, 144, dtype, padding=16, **layout)
        fields = {"batch": 3, "b_transposed": True, "operands": (("float32", (1, 1, 264)),), "out": "float32"}
        found[f"{dtype} {m} all reductions"] = case(m, 264, 144, dtype, epilogue=reductions, **fields)
        found[f"{dtype} {m} most reductions"] = case(m, 264, 144, dtype, epilogue=most_reductions, **fields)
        found[f"{dtype} {m} deep"] = case(m, 72, 9008, dtype, batch=2, b_transposed=True)
    for m, n in ((37, 131), (38, 131), (37, 132)):
        found[f"{m} x {n}"] = case(m, n, 61, "bfloat16", batch=3, shared="a")
    found["gated"] = case(300, 264, 144, "bfloat16", batch=2, accumulators=2, epilogue=gated)
    return found


CASES = cases()


def displaced():
    """Products of matrices whose rows, batches or first elements are one element further."""
    found = {}
    for dtype, which, field in itertools.product(("bfloat16", "int8"), "ab", ("row_stride", "batch_stride", "offset")):
        product = case(300, 264, 144, dtype, batch=3, padding=16, b_transposed=True).product()
        matrix = product.a if which == "a" else product.b[0]
        if field == "offset":
            moved = replace(matrix, buffer=replace(matrix.buffer, offset=matrix.itemsize))
        else:
            moved = replace(matrix, **{field: getattr(matrix, field) + 1})
        found[f"{dtype} {which} {field}"] = replace(product, **{which: moved if which == "a" else (moved,)})
    return found


PRODUCTS = {name: one.product() for name, one in CASES.items()} | displaced()


def plans(engine, product):
    """Those of the first configuration of each kind."""
    found = {}
    for knobs in engine.configurations(product, H100):
        kind = (knobs.split_k > 1, getattr(knobs, "store", ""), getattr(knobs, "cluster_m", 1))
        found.setdefault(kind, knobs)
    return [engine.build(knobs, product, H100) for knobs in found.values()]


def end(matrix, batch):
    """Bytes from the beginning of its buffer to the end of the last matrix."""
    last = (batch - 1) * matrix.batch_stride + (matrix.rows - 1) * matrix.row_stride + matrix.columns
    return matrix.buffer.offset + last * matrix.itemsize


def sizes(product, plan):
    """Bytes of each buffer."""
    found = {Scratch(i): size for i, size in enumerate(plan.scratch)}
    found |= {replace(one.buffer, offset=0): end(one, product.batch) for one in (product.a, *product.b)}
    shape = product.batch, product.m, product.n
    for i, output in enumerate(product.program.outputs):
        kept = [size for axis, size in enumerate(shape) if axis not in output.axes]
        found[Result(i)] = math.prod(kept) * np.dtype(output.dtype).itemsize
    return found


# Bytes of an element, by CUtensorMapDataType, and of a row of a box, by CUtensorMapSwizzle.
ITEMSIZE = {0: 1, 1: 2, 2: 4, 3: 4, 6: 2, 7: 4, 9: 2, 11: 4}
SWIZZLED = {1: 32, 2: 64, 3: 128}


def check_map(tensor, buffers):
    """What `cuTensorMapEncodeTiled` asks; and that the map is of the whole array."""
    size = ITEMSIZE[tensor.dtype]
    assert tensor.buffer.offset % 16 == 0
    assert all(stride % 16 == 0 and 0 < stride < 2**40 for stride in tensor.strides)
    assert all(0 < one <= 256 for one in tensor.box)
    assert tensor.box[0] * size % 16 == 0
    assert tensor.box[0] * size <= SWIZZLED[tensor.swizzle]
    inner, *outer = tensor.dimensions
    last = sum((n - 1) * stride for n, stride in zip(outer, tensor.strides, strict=True))
    whole = buffers[replace(tensor.buffer, offset=0)] - tensor.buffer.offset
    # A copy's last row is as long as the others.
    slack = tensor.strides[0] - 1 if isinstance(tensor.buffer, Scratch) else 0
    assert 0 <= whole - (last + inner * size) <= slack, tensor


def check_copies(launch, plan, buffers):
    """Reads operands to their end and no further, by words if all rows begin and end with one, and each one once."""
    size = int(re.search(r"kBytes = (\d+)", re.search(r"struct CopyConfig {(.*?)};", plan.unit, re.DOTALL)[1])[1])
    copies = [launch.arguments[i : i + 12] for i in range(0, len(launch.arguments), 12)]
    blocks = 0
    for i, (source, target, *scalars) in enumerate(copies):
        rows, columns, from_row, from_batch, to_row, to_batch, *tiles, own, to_columns = (one.value for one in scalars)
        batch, rest = divmod(own, math.prod(tiles))
        assert rest == 0
        assert batch == 1 or from_batch
        read = source.offset + (batch - 1) * from_batch + (rows - 1) * from_row + columns * size
        assert read == buffers[replace(source, offset=0)]
        lines = (source.offset, from_row, from_batch, columns * size)
        in_order = f"copies[{i}].views = 1;" in plan.unit
        assert (f"copies[{i}].words = 1" in plan.unit) == (in_order and all(line % 4 == 0 for line in lines))
        lines, line = (columns, rows) if f"copies[{i}].transposes = 1" in plan.unit else (rows, columns)
        assert line == to_columns if in_order else line <= to_columns
        line = to_columns
        assert line * size <= to_row < line * size + (128 if line * size >= 1024 else 16)
        assert buffers[target] == batch * lines * to_row
        assert batch == 1 or to_batch == lines * to_row
        blocks += own
    assert launch.grid == (blocks, 1, 1)


def check_reduction(launch, buffers):
    """Reads what was stored, and all of it; stores the whole result."""
    source, target, length, kept, tiles, *cut = launch.arguments
    in_parts = launch.kernel.endswith("_parts")
    parts, part = (one.value for one in cut) if in_parts else (1, length.value)
    outer, rest = divmod(launch.grid[0], tiles.value * parts)
    assert rest == 0
    assert (parts - 1) * part < length.value <= parts * part
    results = outer * (length.value if in_parts else 1) * kept.value
    for buffer, count in ((source, outer * length.value * kept.value), (target, results)):
        assert buffers[buffer] in [count * size for size in (1, 2, 4, 8)], launch


def check_split(launch, buffers, product):
    *_, m, n, batches, splits = (one.value for one in launch.arguments if isinstance(one, Scalar))
    accumulators = [one for one in launch.arguments if isinstance(one, Scratch)][: len(product.b)]
    count = m * n * batches * splits
    assert [buffers[one] for one in accumulators] == [count * np.dtype(product.accumulator).itemsize] * len(product.b)


def arguments(plan, launch):
    """A launch's arguments, by the names that the unit's entry point has for them; numbers as such."""
    declared = re.search(rf"^{launch.kernel}\((.*?)\) {{$", plan.unit, re.MULTILINE)[1]
    names = [one.split()[-1] for one in declared.split(",")]
    values = (one.value if isinstance(one, Scalar) else one for one in launch.arguments)
    return dict(zip(names, values, strict=True))


def constant(plan, name):
    return int(re.search(rf"k{name} = (\d+)", plan.unit)[1])


def moves(matrix, batch):
    """Whether the matrix is another one for each of the batch."""
    return int(batch > 1 and matrix.batch_stride != 0)


def check_multiplication(launch, plan, product):
    """What the kernel is told of sizes, of the batch and of splits, and how many blocks there are."""
    given = arguments(plan, launch)
    splits, engine = given.get("splits", 1), launch.kernel.removeprefix("product_")
    blocks, cluster = math.prod(launch.grid), math.prod(launch.cluster)
    assert blocks % cluster == 0
    if engine == "skinny":
        one = skinny(product)
        sides = {"streamed": one.streamed[0], "stationary": one.stationary}
        assert (given["rows"], given["columns"], given["k"]) == (one.rows, one.columns, product.k)
        assert given["tiles"] == math.ceil(one.rows / constant(plan, "Tile"))
        assert blocks == given["tiles"] * product.batch * cluster
        assert constant(plan, "Splits") == cluster
        # What no other matrix of the batch reads again need not stay in the cache.
        once = product.batch == 1 or moves(one.streamed[0], product.batch)
        assert ("kOnce = true" in plan.unit) == once
    else:
        sides = {"a": product.a, "b": product.b[0]}
        assert (given["m"], given["n"], given["k"]) == (product.m, product.n, product.k)
    if engine == "simt":
        rows, columns = constant(plan, "TileM"), constant(plan, "TileN") // len(product.b)
        assert blocks == math.ceil(product.m / rows) * math.ceil(product.n / columns) * product.batch * splits
        for name, matrix in {"a": product.a, **{f"b{i}": b for i, b in enumerate(product.b)}}.items():
            assert (given[f"{name}_stride"], given[f"{name}_batch"]) == (matrix.row_stride, matrix.batch_stride)
            elements = constant(plan, f"Vector{name[0].upper()}")
            begins = (matrix.buffer.offset // matrix.itemsize, matrix.row_stride, matrix.batch_stride, matrix.columns)
            assert not any(place % elements for place in begins)
        depth = given.get("split_depth", product.k)
        assert splits * depth >= product.k
        return
    for name, matrix in sides.items() if product.batch > 1 else ():
        assert given[f"{name}_batched"] == moves(matrix, product.batch)
    if engine == "sm90":
        assert given["batches"] == product.batch
        assert ("kPairedStore = false" in plan.unit) == bool(product.n % 2)
        assert blocks <= H100.sm_count
        # Each split stores a matrix of its own.
        stored = [one for name, one in given.items() if name.startswith("result") and isinstance(one, TensorMap)]
        assert all(one.dimensions[::-1] == (product.batch * splits, product.m, product.n) for one in stored)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_plan_stays_within_its_buffers(name):
    product = PRODUCTS[name]
    served = [engine for engine in ENGINES.values() if not engine.reason(product, H100)]
    assert ENGINES["sm90"] in served or "all reductions" in name
    for plan in (one for engine in served for one in plans(engine, product)):
        buffers = sizes(product, plan)
        for launch in plan.launches:
            for tensor in (one for one in launch.arguments if isinstance(one, TensorMap)):
                check_map(tensor, buffers)
            if launch.kernel == "product_copy":
                check_copies(launch, plan, buffers)
            elif launch.kernel.startswith("product_reduce"):
                check_reduction(launch, buffers)
            elif launch.kernel == "product_split":
                check_split(launch, buffers, product)
            else:
                check_multiplication(launch, plan, product)


@pytest.mark.parametrize(
    ("extents", "blocks"),
    [
        ((1, 1056, 64), [8]),
        ((1, 50_176, 64), [200, 8]),
        ((1, 512, 4096), [128]),
        ((64, 50_176, 64), [256, 128]),
        ((200, 20_000, 32), [200]),
        # Of short ones a lane takes up to 8, where that leaves enough.
        ((1, 3, 476_288), [1861]),
        ((1, 20, 476_288), [7442]),
        ((1, 3, 65_000), [508]),
        ((4, 3, 2000), [252]),
        ((1000, 3, 1), [1000]),
    ],
)
def test_axes_are_reduced_by_as_many_blocks_as_pay(extents, blocks):
    of = "jaxdnn::ReductionOf<jaxdnn::Reduction::sum, float>"
    stage = reduce_stage(of, Scratch(0), (Result(0), "float"), extents, 0)
    assert [launch.grid[0] for launch in stage.launches] == blocks
    assert all(launch.block[0] < 2 * extents[2] for launch in stage.launches), "a block has columns that aren't there"


@pytest.mark.parametrize("name", CASES)
def test_results_are_dense(name):
    product = PRODUCTS[name]
    sizes, dtypes = (product.batch, product.m, product.n), [one.dtype for one in product.results]
    assert dense_results(product.program, dict(zip("bmn", sizes, strict=True)), dtypes) == product.results


@pytest.mark.parametrize("name", CASES)
def test_what_an_epilogue_stores_fills_its_buffers(name):
    product = PRODUCTS[name]
    epilogue, stage = element_epilogue(product, 0)
    buffers = {Scratch(i): size for i, size in enumerate(stage.scratch)}
    buffers |= {one.buffer: end(one, product.batch) for one in product.stored}
    for one in epilogue.results:
        last = (product.batch - 1) * one.batch_stride + (product.m - 1) * one.row_stride + product.n
        assert last * itemsize(one.ctype) == buffers[one.buffer]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["m", "n", "k", "batch"])
def test_a_size_beyond_an_index_has_a_reason(name, engine):
    product = case(40, 264, 1040, "bfloat16", batch=2).product()
    assert ENGINES[engine].reason(product, H100) is None
    assert ENGINES[engine].reason(replace(product, **{name: 2**31}), H100)


@pytest.mark.parametrize(("k", "row"), [(1021, 1024), (9008 - 7, 9024), (101, 104)])
def test_copies_of_long_rows_are_whole_lines(k, row):
    """Which take less time to load; those of short rows are no longer than they have to be."""
    (copy,) = packed(case(64, 64, k, "bfloat16").product())[1]
    assert copy.matrix.row_stride == row


@pytest.mark.parametrize(
    ("m", "knobs", "first"),
    [
        (51_200, Sm90Knobs(), False),  # 50 MiB of results
        (51_201, Sm90Knobs(), True),
        (51_201, Sm90Knobs(split_k=2), False),  # sums, which are read soon
        (51_201, Sm90Knobs(store="direct"), False),
    ],
)
def test_results_leave_the_cache_first_that_it_cannot_hold(m, knobs, first):
    unit = Sm90().build(replace(knobs, cluster_m=1, tile_n=128), case(m, 512, 2048, "bfloat16").product(), H100).unit
    assert ("kEvictFirst = true" in unit) == first


def test_stores_that_evict_first_differ_in_the_hint_alone():
    """The text that runs on the CPU has other stores: these are compared with those that all other results take."""
    text = (Path(__file__).parents[2] / "cpp" / "kernels" / "ptx" / "tma.cuh").read_text()
    forms = re.findall(r"if constexpr \(kEvictFirst\) \{(.*?)\} else \{(.*?)\}\n\}", text, re.DOTALL)
    assert len(forms) == 2
    for first, plain in forms:
        hinted, other = ("".join(re.sub(r'"\s+"', "", form).split()) for form in (first, plain))
        last = len(re.findall(r'"[lr]"', other))
        hinted, hints = re.subn(rf"\.L2::cache_hint|,%{last}(?=;\")|,\"l\"\(kEvictFirstPolicy\)", "", hinted)
        assert (hinted, hints) == (other, 3)
