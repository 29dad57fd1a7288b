"""`explain`: what will run, before it runs."""

import html.parser

import jax
import jax.numpy as jnp
import pytest

import jaxdnn
from checking.calls import native_calls
from checking.cases import BF16, NormCase
from checking.compare import platform
from jaxdnn import _native
from jaxdnn.device import gpus

X = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
SCALE = jax.ShapeDtypeStruct((256,), jnp.float32)


def network(x, scale):
    def layer(stream, _):
        y, stream = jaxdnn.rms_norm(jnp.tanh(stream), scale, residual=stream)
        return stream + y, None

    stream, _ = jax.lax.scan(layer, x, None, length=3)
    return jaxdnn.layer_norm(stream, scale)


def titles(explanation):
    return [[(call.call.spec.title, call.call.count) for call in calls] for _, calls in explanation.sections]


def test_equal_calls_are_one_that_occurs_several_times():
    def several(x, scale):
        normalized = jaxdnn.rms_norm(network(jaxdnn.rms_norm(x, scale), scale), scale)
        return jax.jit(jaxdnn.rms_norm)(normalized, scale) + jaxdnn.rms_norm(x)

    forward, _ = titles(jaxdnn.explain(several, X, SCALE, platform="cpu"))
    counts = [("rms_norm forward", 3), ("rms_norm forward", 3), ("layer_norm forward", 1), ("rms_norm forward", 1)]
    assert sorted(forward) == sorted(counts)


def test_forward_and_backward_of_a_network():
    forward, both = titles(jaxdnn.explain(network, X, SCALE, platform="cpu"))
    assert forward == [("rms_norm forward", 3), ("layer_norm forward", 1)]
    assert sorted(both) == [
        ("layer_norm backward", 1),
        ("layer_norm forward", 1),
        ("rms_norm backward", 3),
        ("rms_norm forward", 3),
    ]


def test_a_table_tells_everything():
    text = str(jaxdnn.explain(network, X, SCALE, platform="cpu"))
    for word in ("rms_norm forward", "x3", "host", "rows_per_task", "direct", "it runs on cuda", "KiB", "residual add"):
        assert word in text.replace("\n", " ")


@pytest.mark.skipif(platform() not in ("cpu", "cuda"), reason="no native engine runs on this platform")
def test_what_runs_is_what_was_explained():
    """The engine that `explain` names is the one in the compiled program, forward and backward."""
    case = NormCase("layer_norm", (64, 256), x=BF16, scale=BF16, bias=BF16)
    primals = case.primals()

    def gradient(*arrays):
        y, pull_back = jax.vjp(case.call, *arrays)
        return y, pull_back(arrays[0])

    # The forward kernel needs no workspace, the backward one does.
    for options, expected in (({}, 2), ({"engine": "xla"}, 0), ({"workspace_limit": 0}, 1)):
        with jaxdnn.options(**options):
            text = jax.jit(gradient).lower(*primals).compile().as_text()
            _, (_, calls) = jaxdnn.explain(case.call, *primals).sections
        native = sum(call.engine != "xla" for call in calls)
        assert native == expected
        assert native_calls(text) == native


def test_nothing_is_executed():
    def impossible(x):
        return jaxdnn.rms_norm(x, jnp.ones(x.shape[-1], x.dtype))

    # Hundreds of gigabytes, which only a shape has.
    explanation = jaxdnn.explain(impossible, jax.ShapeDtypeStruct((2**28, 1024), jnp.float32), platform="cpu")
    (call,) = explanation.sections[0][1]
    assert call.call.signature.bytes == 2 * 2**38 * 4 + 1024 * 4
    assert call.engine == "host"


def test_functions_that_have_no_reverse_mode_derivative():
    def decode(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 9, lambda x: jaxdnn.rms_norm(x) - 1, x)

    explanation = jaxdnn.explain(decode, jnp.ones((4, 8)))
    assert titles(explanation) == [[("rms_norm forward", 1)], []]
    assert "Forward and backward (Reverse-mode differentiation does not work for lax.while_loop" in str(explanation)


def test_functions_without_calls_and_without_gradients():
    explanation = jaxdnn.explain(jnp.sin, jnp.ones(3, jnp.float32))
    assert titles(explanation) == [[], []]
    assert "no call of jaxdnn" in str(explanation)
    integers = jaxdnn.explain(lambda i: jaxdnn.rms_norm(i.astype(jnp.float32)), jnp.arange(4), platform="cpu")
    assert titles(integers) == [[("rms_norm forward", 1)], []]
    assert "(no argument is floating point)" in str(integers)


def test_pytrees_and_mixed_arguments():
    def loss(parameters, tokens):
        x = parameters["embedding"][tokens]
        return {"loss": jnp.mean(jaxdnn.rms_norm(x, parameters["scale"])), "tokens": tokens}

    parameters = {"embedding": jnp.ones((10, 8), jnp.float32), "scale": jnp.ones(8, jnp.float32)}
    forward, both = titles(jaxdnn.explain(loss, parameters, jnp.arange(5), platform="cpu"))
    assert forward == [("rms_norm forward", 1)]
    assert ("rms_norm backward", 1) in both


def test_calls_inside_transformations():
    def function(x, scale):
        return jax.vmap(jax.checkpoint(jaxdnn.rms_norm), (0, None))(x, scale)

    x = jax.ShapeDtypeStruct((3, 4, 256), jnp.float32)
    forward, both = titles(jaxdnn.explain(function, x, SCALE, platform="cpu"))
    assert forward == [("rms_norm forward", 1)]
    assert ("rms_norm backward", 1) in both


def test_without_fallback():
    with jaxdnn.options(fallback=False):
        explanation = jaxdnn.explain(jaxdnn.rms_norm, jnp.ones((0, 8), jnp.float32), platform="cpu")
    (call,) = explanation.sections[0][1]
    assert call.engine == "none"
    assert "no elements" in call.reason
    assert "no elements" in str(explanation).replace("\n", " ")


@pytest.mark.skipif(not isinstance(gpus(), str), reason="there is a GPU, which then is the target")
def test_the_missing_gpu_is_the_reason():
    explanation = jaxdnn.explain(jaxdnn.rms_norm, X, platform="cuda")
    (call,) = explanation.sections[0][1]
    assert call.engine == "xla"
    reason = dict(call.selection.rejected)["direct"]
    assert gpus().rstrip(".") in reason
    assert 'options(target="sm_90")' in reason


def test_a_named_gpu():
    try:
        _native.compiler()
    except _native.Unavailable:
        pytest.skip("NVRTC is not installed")
    with jaxdnn.options(target="sm_90"):
        explanation = jaxdnn.explain(jaxdnn.rms_norm, X, SCALE)
    (call,) = explanation.sections[0][1]
    assert call.engine == "direct"
    assert call.limit is not None
    assert 64 * 256 * 2 * 2 / 5e12 < call.limit < 64 * 256 * 2 * 2 / 3e12


class Balanced(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        del attrs
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html():
    with jaxdnn.options(engine="xla"):
        text = jaxdnn.explain(network, X, SCALE, platform="cpu")._repr_html_()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert "options(engine=&quot;xla&quot;)" in text
    assert "rms_norm forward x3" in text
    assert "<script" not in text


def test_case_of_the_default_backend():
    (call,) = jaxdnn.explain(jaxdnn.rms_norm, X, SCALE).sections[0][1]
    expected = {"cpu": "host", "cuda": "direct"}.get(platform(), "xla")
    assert call.engine == expected
