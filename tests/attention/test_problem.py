"""The problem that a call states means what the call does: run in numpy, from the places that it names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.attention import problems
from checking.calls import calls_of
from checking.cases import TABLE, AttentionCase
from checking.compiling import QUICKLY
from jaxdnn.engines.attention.problem import Band
from jaxdnn.planning.calls import find_calls, find_differentiated_calls

CASES = [case for case in TABLE.every if case.op == "attention"]
CASES = [case for case in CASES if case.queries * case.keys < 1000]
MAPPED = [
    (AttentionCase(queries=2, keys=3, heads=4, bias="1nts", sinks=True, residual=True), (0, None, 0, None, 0)),
    (AttentionCase(queries=2, keys=3, bias="b11s", score_mod="slopes"), (None, 0, None, 0, None)),
    (AttentionCase(batch=3, queries=4, keys=3, causal=True, lengths="query key", dropout=0.4), (0, 0, None)),
]


def operand(name, type_, random):
    """Values that make sense for an operand of this name."""
    if type_.dtype == bool:
        return random.random(type_.shape) < 0.7
    if type_.dtype == np.uint32:
        return random.integers(0, 2**32, type_.shape, np.uint32)
    if name in ("batch_index", "head_index"):
        return np.arange(np.prod(type_.shape), dtype="int32").reshape(type_.shape)
    if np.issubdtype(type_.dtype, np.integer):
        return random.integers(0, 4, type_.shape).astype(type_.dtype)
    return random.standard_normal(type_.shape).astype(type_.dtype)


def evaluated(spec, arrays):
    """What the spec defines, by the names of its results."""
    function = jax.jit(spec.evaluate, compiler_options=QUICKLY)
    return dict(zip(spec.results, function(*(arrays[name] for name in spec.operands)), strict=True))


def checked(calls):
    """How many calls had a problem."""
    count = 0
    for call in calls:
        problem = call.problem
        if isinstance(problem, str):
            continue
        count += 1
        random = np.random.default_rng(0)
        arrays = {name: operand(name, type_, random) for name, type_ in call.signature.operands.items()}
        if problem.backward is not None:
            forward = call.spec.replace(direction="forward", active=(), seeded=())
            carries = {name: call.spec.carries[name] for name in forward.inputs}
            arrays |= evaluated(forward.carrying(carries), arrays)
        exact = {name: np.asarray(array) for name, array in arrays.items()}
        wanted = evaluated(call.spec, arrays)
        found = problems.run(problem, list(exact.values()), list(call.signature.results.values()))
        for name, got, want in zip(call.spec.results, found, wanted.values(), strict=True):
            tolerance = 40 * float(jnp.finfo(problem.query.dtype).eps)
            scale = max(1.0, float(np.max(np.abs(np.nan_to_num(np.asarray(want, np.float64), neginf=0)), initial=0)))
            np.testing.assert_allclose(
                got, np.asarray(want, np.float64), rtol=0, atol=tolerance * scale, err_msg=f"{call.spec.title}: {name}"
            )
    return count


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_means_the_call(case):
    gathers = case.score_mod in ("slopes", "table", "temperature")
    assert checked(calls_of(case)) == (1 if gathers else 2)


@pytest.mark.parametrize(("case", "mapped"), MAPPED, ids=str)
def test_mapped_axes_join_the_batch(case, mapped):
    assert checked(calls_of(case, mapped))


def test_some_of_two_mapped_axes():
    """The outer axis is of the queries, and the inner one of the keys, or the other way round."""
    query, key, value = arrays()
    types = [jax.ShapeDtypeStruct((3, *array.shape), array.dtype) for array in (query, key, value)]
    types = [jax.ShapeDtypeStruct((4, *query.shape), query.dtype), *types[1:]]
    for inner, outer in (((None, 0, 0), (0, None, None)), ((0, None, None), (None, 0, 0))):
        function = jax.vmap(jax.vmap(jaxdnn.dot_product_attention, inner), outer)
        assert checked(find_calls(function, *types)) == 1


def arrays(dtype="float32", queries=5, keys=7):
    return [jax.ShapeDtypeStruct((2, n, h, 8), dtype) for n, h in ((queries, 4), (keys, 2), (keys, 2))]


def problem(**keywords):
    (call,) = find_calls(functools.partial(jaxdnn.dot_product_attention, **keywords), *arrays())
    return call.problem


@pytest.mark.parametrize(
    ("keywords", "band"),
    [
        ({}, Band()),
        ({"is_causal": True}, Band(None, 0)),
        ({"local_window_size": 3}, Band(3, 3)),
        ({"local_window_size": (3, 2), "is_causal": True}, Band(3, 0)),
        ({"local_window_size": (None, 4)}, Band(None, 4)),
        # The last of 5 queries stands at the last of 7 keys.
        ({"is_causal": True, "causal_alignment": "bottom_right"}, Band(None, 2)),
        ({"local_window_size": (1, 1), "causal_alignment": "bottom_right"}, Band(-1, 3)),
    ],
)
def test_masks_of_positions_are_one_band(keywords, band):
    assert problem(**keywords).mask == type(problem().mask)(band)


def test_what_no_mask_asks_for_is_not_there():
    places = (jnp.arange(5), jnp.arange(7))
    assert problem(positions=places) == problem()
    assert problem(positions=places, is_causal=True).mask.query_positions is not None


def test_precision_says_whether_float32_is_rounded():
    assert not problem().exact
    assert problem(precision="highest").exact


def test_queries_that_are_mapped_share_keys_in_memory():
    function = jax.vmap(jaxdnn.dot_product_attention, (0, None, None))
    query, key, value = arrays()
    (call,) = find_calls(function, jax.ShapeDtypeStruct((3, *query.shape), query.dtype), key, value)
    assert call.problem.batch == 6
    assert call.problem.query.batch_stride == 5 * 4 * 8
    (term,) = call.problem.key.batch
    assert (term.stride, term.divisor, term.modulus) == (7 * 2 * 8, 1, 2)


def test_a_derivative_of_the_users_own_is_no_program():
    @jax.custom_jvp
    def straight_through(score):
        return jnp.round(score)

    straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))
    function = functools.partial(jaxdnn.dot_product_attention, score_mod=lambda score, *_: straight_through(score))
    forward, backward = find_differentiated_calls(function, *arrays())
    assert forward.problem.score is not None
    assert "a rule of its own for its derivative" in backward.problem
