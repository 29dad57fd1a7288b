"""What a product saved for its epilogue's derivative gives its memory to that: where nothing else can need it."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxdnn
from jaxdnn.planning.calls import find_differentiated_calls

F32 = jnp.float32


def gelu(acc, bias):
    return jax.nn.gelu(acc + bias)


def swiglu(x, gate, up):
    return jaxdnn.gated_linear_unit(x, gate, up)


def layer(x, w, bias):
    return jaxdnn.matmul(x, w, bias, epilogue=gelu)


def both(function):
    def gradients(*arrays):
        y, pull_back = jax.vjp(function, *arrays)
        return pull_back(jnp.cos(y))

    return gradients


def types(*shapes):
    return [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]


def in_place(function, *arrays):
    """Of each call for a GPU, in order of its operands, the pairs of operands and results that share memory."""
    with jaxdnn.options(target="sm_90"):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @jaxdnn_cuda.*", text)
    pair = r"output_tuple_indices = \[(\d*)\],\s*operand_index = (\d+)"
    return [[(int(operand), int(result or 0)) for result, operand in re.findall(pair, call)] for call in calls]


X, W, BIAS = (64, 32), (32, 48), (48,)


def test_of_one_and_of_two_accumulators():
    assert [pairs for pairs in in_place(both(layer), *types(X, W, BIAS)) if pairs] == [[(0, 0)]]
    assert [pairs for pairs in in_place(both(swiglu), *types(X, W, W)) if pairs] == [[(0, 0), (1, 1)]]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_in_loops(checkpointed):
    """Where what was saved is a slice, or computed again."""
    block = jax.checkpoint(swiglu) if checkpointed else swiglu

    def loss(x, *weights):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(block(x, *w)), None), x, weights)[0])

    pairs = in_place(jax.grad(loss, (0, 1, 2)), *types((64, 32), (3, 32, 32), (3, 32, 32)))
    assert [one for one in pairs if one] == [[(0, 0), (1, 1)]]


def test_not_of_a_programs_arguments():
    """They may live on: what `jax.vjp` returned is called by a program of its own, and again."""
    x, w, bias = (jnp.ones(one.shape, F32) for one in types(X, W, BIAS))
    with jaxdnn.options(target="sm_90"):
        y, pull_back = jax.vjp(layer, x, w, bias)
    found = in_place(lambda pull_back, ct: pull_back(ct), pull_back, y)
    assert len(found) == 3
    assert not any(found)


def test_not_of_what_is_read_elsewhere(monkeypatch):
    """No epilogue reads accumulators but its own; a program could."""
    calls = find_differentiated_calls(layer, *types(X, W, BIAS))
    (call,) = (call for call in calls if call.spec.op == "epilogue")
    assert call.spec.aliases(call.signature) == {0: 0}
    shape, program = call.spec._whole(call.signature)
    own, bias, *_ = program.loads
    assert own.at_own_place(shape)
    assert not bias.at_own_place(shape), "the bias has one element for all rows"
    for elsewhere in ({"dimensions": (1, 0)}, {"dimensions": (None, 1)}, {"dimensions": (0, None), "gathered": (1,)}):
        load = replace(own, **elsewhere)
        assert not load.at_own_place(shape)
        other = SimpleNamespace(loads=(load, bias))
        monkeypatch.setattr(type(call.spec), "_whole", lambda *_, other=other: (shape, other))
        assert call.spec.aliases(call.signature) == {}
    assert replace(own, dimensions=(None, 1)).at_own_place((1, 48))


def test_not_of_other_dtypes_or_of_mapped_results():
    def narrow(x, w, bias):
        return jaxdnn.matmul(x, w, bias, epilogue=gelu, preferred_element_type=jnp.bfloat16)

    for function, arrays in ((narrow, types(X, W, BIAS)), (jax.vmap(layer, (None, None, 0)), types(X, W, (3, 48)))):
        calls = find_differentiated_calls(function, *arrays)
        found = [call for call in calls if call.spec.op == "epilogue" and call.spec.direction == "backward"]
        for call in found:
            for operand, result in call.spec.aliases(call.signature).items():
                alike = [*call.signature.operands.values()][operand], [*call.signature.results.values()][result]
                assert alike[0] == alike[1]
        assert found
