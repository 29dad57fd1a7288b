"""Attention's gradients on Hopper: what the engine plans and refuses, that it compiles, and that it computes them."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.attention import problems
from checking.compiler_log import kernels, launch_bounds
from checking.emulation.plans import Emulated
from checking.product.calls import run_plan
from jaxdnn import _native, device
from jaxdnn.engines.attention.sm90.backward.knobs import AttentionSm90BackwardKnobs, backward_knobs_reason
from jaxdnn.engines.attention.sm90.engine import AttentionSm90
from jaxdnn.plan import Scalar, TensorMap
from jaxdnn.planning.calls import find_differentiated_calls

ENGINE = AttentionSm90()
H100 = device._NAMED[90]
GPU = jax.default_backend() == "gpu"
CAUSAL = {"is_causal": True}
ALIGNED = CAUSAL | {"causal_alignment": "bottom_right"}
WINDOW = {"local_window_size": (40, 20)}
RESIDUAL = {"return_residual": True}
SINKS = {"sinks": jax.ShapeDtypeStruct((2,), "float32")}


class Gradients:
    """The forward and the backward call of `dot_product_attention`, differentiated by some of its operands.

    `sizes` are queries, keys, head size and value's head size.
    """

    def __init__(self, sizes, heads=(2, 1), batch=1, dtype="bfloat16", lengths=False, by="qkv", **keywords):
        queries, keys, size, value_size = sizes
        shapes = [(queries, heads[0], size), (keys, heads[1], size), (keys, heads[1], value_size)]
        vectors = [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape in shapes]
        named = {name: keywords.pop(name) for name in ("sinks",) if name in keywords}
        if lengths:
            length = jax.ShapeDtypeStruct((batch,), "int32")
            named |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), length)
        function = functools.partial(jaxdnn.dot_product_attention, **keywords)

        def called(query, key, value, *others):
            all_three = zip("qkv", (query, key, value), strict=True)
            vectors = [array if name in by else jax.lax.stop_gradient(array) for name, array in all_three]
            return function(*vectors, **dict(zip(named, others, strict=True)))

        self.forward, self.backward = find_differentiated_calls(called, *vectors, *named.values())
        self.problem = self.backward.problem

    def operands(self):
        """Of the backward call: random ones, and the results of the forward one."""
        problem = self.problem
        random = np.random.default_rng(0)
        lengths = {"query_lengths": problem.query_length, "key_lengths": problem.key_length}
        found = {}
        for name, type_ in self.backward.signature.operands.items():
            if name in lengths:  # some, none, and all of the axis
                found[name] = np.resize([lengths[name] // 2 + 3, 0, lengths[name]], type_.shape).astype("int32")
            elif name == "query_offset":
                found[name] = random.integers(-60, 60, type_.shape, "int32")
            else:
                found[name] = random.standard_normal(type_.shape).astype(type_.dtype)
        types = self.forward.signature.results
        results = problems.run(
            self.forward.problem, [found[name] for name in self.forward.signature.operands], list(types.values())
        )
        found |= {name: result.astype(types[name].dtype) for name, result in zip(types, results, strict=True)}
        return [found[name] for name in self.backward.signature.operands]

    def check(self, operands, found):
        """Against the problem, in float64. Weights and the gradients of scores are rounded to 16 bits."""
        types = self.backward.signature.results
        wanted = problems.run(self.problem, operands, list(types.values()))
        tolerance = 3 * float(jnp.finfo(self.problem.query.dtype).eps)
        for name, got, want in zip(types, found, wanted, strict=True):
            bound = 1e-5 if name == "d_sinks" else tolerance
            bound *= max(1, float(np.max(np.abs(want), initial=0)))
            np.testing.assert_allclose(np.float64(got), want, rtol=0, atol=bound, err_msg=name)


# Several blocks of keys and of queries, edges in each direction, rows that see nothing, heads that share their keys.
SMALL = {
    "full": Gradients((200, 370, 64, 64)),
    "causal": Gradients((200, 300, 72, 40), **CAUSAL, **RESIDUAL),
    "causal, fewer keys": Gradients((300, 140, 32, 32), **ALIGNED, **RESIDUAL),
    "causal, shared keys": Gradients((150, 150, 128, 128), (4, 1), **CAUSAL),
    "window": Gradients((300, 260, 64, 64), (2, 1), 2, "float16", **WINDOW, **RESIDUAL),
    "window past the keys": Gradients((400, 100, 16, 16), local_window_size=(3, 3), **RESIDUAL),
    "lengths": Gradients((150, 300, 128, 128), (1, 1), 3, lengths=True),
    "lengths, aligned": Gradients((150, 300, 32, 96), (2, 1), 3, lengths=True, **ALIGNED, **RESIDUAL),
    "lengths, window": Gradients((150, 300, 32, 32), (1, 1), 3, lengths=True, **WINDOW),
    "sinks": Gradients((100, 140, 64, 64), batch=2, **CAUSAL, **RESIDUAL, **SINKS),
    "value of another size": Gradients((130, 200, 128, 64)),
    "short": Gradients((3, 300, 8, 8), (2, 2), 2),
    "of queries": Gradients((100, 200, 64, 64), by="q"),
    "of keys": Gradients((100, 200, 64, 64), by="k"),
    "of values": Gradients((100, 200, 64, 64), by="v"),
}
LARGE = {
    "64": Gradients((4096, 4096, 64, 64), (8, 8)),
    "96": Gradients((4096, 4096, 96, 96), (8, 8), **CAUSAL),
    "128": Gradients((4096, 4096, 128, 128), (8, 8)),
    "128 and 64": Gradients((4096, 4096, 128, 64), (8, 8), **CAUSAL),
    "causal 64": Gradients((4096, 4096, 64, 64), (8, 8), **CAUSAL, **RESIDUAL),
    "causal 128": Gradients((4096, 4096, 128, 128), (8, 2), **CAUSAL, **RESIDUAL),
    "window 128": Gradients((4096, 4096, 128, 128), (8, 2), 1, "float16", lengths=True, **WINDOW, **RESIDUAL),
}
# Bytes, stored and loaded: the producer has 24 registers, and keeps in memory what it needs when a tile begins.
MOST_SPILLED = 260
FEW = replace(H100, sm_count=3)  # multiprocessors, so that each works through several tiles


def configured(name, target):
    problem = (SMALL | LARGE)[name].problem
    return [(knobs, ENGINE.build(knobs, problem, target)) for knobs in ENGINE.configurations(problem, target)]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """All plans of SMALL, and where those of each begin."""
    plans, starts = [], {}
    for name in SMALL:
        starts[name] = len(plans)
        plans += [plan for _, plan in configured(name, FEW)]
    return Emulated(plans, tmp_path_factory.mktemp("emulated")), starts


@pytest.mark.parametrize("name", SMALL)
def test_its_text_computes_what_is_right(name, emulated):
    """In several orders of threads and blocks, with the same bits."""
    one, (machine, starts) = SMALL[name], emulated
    operands = one.operands()
    for number, _ in enumerate(configured(name, FEW)):
        results = [np.zeros(type_.shape, type_.dtype) for type_ in one.backward.signature.results.values()]
        machine.run(starts[name] + number, operands, results)
        one.check(operands, results)


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_configurations_compile(name):
    assert ENGINE.reason((SMALL | LARGE)[name].problem, H100) is None
    found = configured(name, H100)
    assert found
    for knobs, plan in found:
        unit = _native.compile(plan.unit, plan.arch)
        assert "serialized" not in unit.log, "the compiler has the tensor cores wait for each multiply"
        for kernel, (registers, spilled) in kernels(unit.log).items():
            assert spilled <= MOST_SPILLED, f"{kernel} spills {spilled} bytes under {knobs}"
            assert registers * launch_bounds(plan.unit)[kernel][0] <= 65_536


def test_a_plan_is_what_it_is():
    problem = LARGE["causal 128"].problem
    ((_, plan),) = configured("causal 128", H100)
    rows, main, query = plan.launches
    assert (rows.grid, rows.block) == ((8 * 4096 // 16, 1, 1), (256, 1, 1))
    assert (main.grid, main.block) == ((64, 1, 1), (384, 1, 1))  # 32 tiles of each of 2 heads
    assert (query.grid, query.block) == ((8 * 64, 1, 1), (256, 1, 1))
    maps = [one for one in main.arguments if isinstance(one, TensorMap)]
    assert [one.box for one in maps] == [(64, 64, 1, 1), (64, 128, 1, 1), (64, 128, 1, 1), (64, 64, 1, 1)]
    assert maps[3].dimensions == maps[0].dimensions == (128, 4096, 8, 1)
    assert Scalar("float32", problem.scale) in main.arguments
    # Two numbers of a row; a counter of each block, and of tiles; and the sums.
    assert plan.scratch == (8 * 4096 * 8, (8 * 64 + 1) * 4, 8 * 4096 * 128 * 4)


def test_memory_is_linear_in_the_length():
    workspaces = []
    for length in (4096, 8192):
        problem = Gradients((length, length, 64, 64), **CAUSAL).problem
        workspaces.append(ENGINE.build(next(ENGINE.configurations(problem, H100)), problem, H100).workspace)
    assert workspaces[1] - 4 == 2 * (workspaces[0] - 4)


@pytest.mark.parametrize(("name", "tile"), [("64", 128), ("causal 64", 128), ("128", 64), ("96", 64)])
def test_tiles(name, tile):
    knobs = next(ENGINE.configurations(LARGE[name].problem, H100))
    assert isinstance(knobs, AttentionSm90BackwardKnobs)
    assert knobs.tile_m == tile


def test_sizes_are_not_in_the_code():
    stated = [
        Gradients((queries, keys, 64, 64), heads, batch, **CAUSAL, **RESIDUAL).problem
        for queries, keys, heads, batch in ((512, 512, (4, 2), 2), (4096, 1000, (32, 4), 3))
    ]
    assert len({ENGINE.build(AttentionSm90BackwardKnobs(), one, H100).unit for one in stated}) == 1


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (Gradients((64, 64, 64, 64), dtype="float32"), "query is float32"),
        (Gradients((64, 64, 64, 64), logits_soft_cap=30.0), "a function of scores"),
        (Gradients((64, 64, 60, 64)), "the head size is 60"),
        (Gradients((64, 64, 64, 264)), "value's head size is 264; it takes multiples of 8 up to 256"),
    ],
)
def test_reasons(one, said):
    assert said in (ENGINE.reason(one.problem, H100) or "")


def test_gradient_that_sums_over_the_batch_is_refused():
    problem = SMALL["lengths"].problem
    d_key = replace(problem.backward.d_key, batch=())
    problem = replace(problem, backward=replace(problem.backward, d_key=d_key))
    assert "d_key is a sum over elements of the batch" in (ENGINE.reason(problem, H100) or "")


@pytest.mark.parametrize("name", ["128", "128 and 64"])
def test_knobs_that_do_not_fit(name):
    knobs, problem = AttentionSm90BackwardKnobs(128), LARGE[name].problem
    assert "expected at most 224" in (backward_knobs_reason(problem, knobs, H100.shared_memory) or "")
    with pytest.raises(ValueError, match="does not fit"):
        ENGINE.build(knobs, problem, H100)


@pytest.mark.parametrize("knobs", [{"tile_m": 96}, {"swizzle": 0}])
def test_knobs_are_validated(knobs):
    with pytest.raises(ValueError, match=r"AttentionSm90BackwardKnobs: .* (must be|expected) "):
        AttentionSm90BackwardKnobs(**knobs)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", SMALL)
def test_results(name):
    one = SMALL[name]
    operands = one.operands()
    for target in (device.gpus()[0], replace(device.gpus()[0], sm_count=3)):
        for knobs, plan in configured(name, target):
            types = one.backward.signature.results.values()
            results, again = (run_plan(plan, types, operands) for _ in range(2))
            one.check(operands, results)
            assert all(map(np.array_equal, results, again)), f"{knobs} is not deterministic"
