"""`explain`: what will run, before it runs."""

import dataclasses
import html.parser
import re

import jax
import jax.numpy as jnp
import pytest

import jaxdnn
from checking.calls import native_calls
from checking.cases import BF16, NormCase
from checking.compare import platform
from jaxdnn import _native
from jaxdnn.config import Options
from jaxdnn.device import find_target, gpus
from jaxdnn.planning import cache, measure
from jaxdnn.planning import explain as explain_module
from jaxdnn.planning.candidates import knobs_of

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


def unwrapped(explanation):
    return " ".join(str(explanation).split())


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


def test_the_text_tells_everything(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    text = str(jaxdnn.explain(network, X, SCALE, platform="cpu"))
    for word in (
        "rms_norm forward x3: host",
        "layer_norm backward: host, in the backward pass",
        "x bfloat16[64,256]",
        "rows_per_task=",
        "direct: it runs on cuda, and this call is compiled for cpu (all)",
        "KiB moved",
        "residual add, residual, scale (1, 3)",
        "Without a kernel of ours: none",
        "Forward, 4 calls: 4 on host",
        "Forward and backward, 8 calls: 8 on host",
    ):
        assert word in text, text


def layers(parameters, x):
    for one in parameters:
        y = jaxdnn.rms_norm(x, one["scale"])
        x = x + jaxdnn.matmul(jaxdnn.matmul(y, one["up"], epilogue=jax.nn.gelu), one["down"])
    return jnp.mean(x)


def parameters(count):
    shapes = {"scale": (256,), "up": (256, 512), "down": (512, 256)}
    return [{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()} for _ in range(count)]


FLOATS = jax.ShapeDtypeStruct((64, 256), jnp.float32)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_text_fits_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(jaxdnn.explain(layers, parameters(3), FLOATS, platform="cpu")).splitlines()
    assert columns - 20 < max(map(len, lines)) <= columns


def test_the_text_says_nothing_twice_and_does_not_grow_with_equal_layers(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    three, nine = (str(jaxdnn.explain(layers, parameters(n), FLOATS, platform="cpu")) for n in (3, 9))
    assert len(three.splitlines()) == len(nine.splitlines()) < 60
    assert nine.count("it runs on cuda") == 1
    assert "matmul x9: host" in nine
    assert "epilogue backward x9 (" in nine.splitlines()[1]


def test_a_derivative_is_explained_once_and_its_passes_are_named():
    explanation = jaxdnn.explain(jax.value_and_grad(layers), parameters(1), FLOATS, platform="cpu")
    ((title, calls),) = explanation.sections
    assert title == "Forward and backward"
    passes = {False: [], True: []}
    for one in calls:
        passes[one.call.backward].append(one.call.spec.title)
    assert passes[False] == ["rms_norm forward", "matmul", "matmul"]
    assert sorted(passes[True]) == ["epilogue backward", *["matmul"] * 4, "rms_norm backward"]


def test_the_backward_pass_of_a_loop_recomputes():
    def loop(x, scale):
        return jax.lax.scan(jax.checkpoint(lambda x, _: (jaxdnn.rms_norm(x, scale), None)), x, None, length=3)[0]

    _, (_, calls) = jaxdnn.explain(loop, X, SCALE, platform="cpu").sections
    assert sorted((one.call.spec.title, one.call.backward, one.call.count) for one in calls) == [
        ("rms_norm backward", True, 3),
        ("rms_norm forward", False, 3),
        ("rms_norm forward", True, 3),
    ]


def test_keyword_arguments_are_the_functions():
    """Arrays are traced and differentiated, all else is a setting: jnp.ones would not do as an epilogue."""
    w = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    forward, both = titles(jaxdnn.explain(jaxdnn.matmul, FLOATS, b=w, epilogue=jax.nn.gelu, platform="cpu"))
    assert forward == [("matmul", 1)]
    assert sorted(both) == [("epilogue backward", 1), *[("matmul", 1)] * 3]
    explanation = jaxdnn.explain(jaxdnn.rms_norm, x=X, scale=SCALE, epsilon=1e-3, residual=None, platform="cpu")
    (call,) = explanation.sections[0][1]
    assert call.call.spec.epsilon == 1e-3
    assert "rms_norm backward" in str(explanation)


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
    assert "Forward and backward (Reverse-mode differentiation does not work for lax.while_loop" in unwrapped(
        explanation
    )


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
    assert "no elements" in unwrapped(explanation)


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
    source = explanation.source()
    assert "// rms_norm forward, on direct\n" in source
    assert "// rms_norm backward, on direct\n" in source
    for _, calls in explanation.sections:
        for one in calls:
            assert source.count(one.source) == 1


def test_without_source_is_said_what_runs():
    def function(x):
        return jaxdnn.rms_norm(x[:0]), jaxdnn.rms_norm(x)

    source = jaxdnn.explain(function, X, platform="cpu").source()
    assert "// rms_norm forward, on host\n" in source
    assert (
        "// rms_norm forward, on xla; not direct: it runs on cuda, and this call is compiled for cpu; not host: the"
        in source
    )


def test_without_the_kernel_compiler_source_says_what_is_missing(monkeypatch):
    def unavailable(*_):
        raise _native.Unavailable("Install NVRTC.")

    for name in ("compile", "load"):
        monkeypatch.setattr(_native, name, unavailable)
    with jaxdnn.options(target="sm_80"):
        source = jaxdnn.explain(jaxdnn.matmul, FLOATS, jax.ShapeDtypeStruct((256, 512), jnp.float32)).source()
    assert re.search(r"^// matmul, on xla; .*; not simt: Install NVRTC\.;", source, re.MULTILINE)


@pytest.mark.skipif(platform() not in ("cpu", "cuda"), reason="no native engine runs on this platform")
def test_the_share_is_of_what_was_measured(monkeypatch, cache_folder):
    """The time of what runs, not of what would be the fastest, against the time that memory takes."""
    del cache_folder
    monkeypatch.setattr(cache, "_memory", {})
    backend = "cuda" if platform() == "cuda" else "cpu"
    target = dataclasses.replace(find_target(backend, Options()), bandwidth=1e9)
    monkeypatch.setattr(explain_module, "find_target", lambda *_: target)
    (one,) = jaxdnn.explain(jaxdnn.rms_norm, X, SCALE).sections[0][1]
    assert one.seconds is one.share is None
    runs = measure.Measurement(one.engine, knobs_of(one.selection.config), 4 * one.limit, 0, 0)
    other = dataclasses.replace(runs, engine="xla", knobs=(), seconds=one.limit, rank=1)
    cache.remember(one.call.spec, one.call.signature, target, [other, runs])
    explanation = jaxdnn.explain(jaxdnn.rms_norm, X, SCALE)
    (one,) = explanation.sections[0][1]
    assert one.share == pytest.approx(0.25)
    assert "25% (1)" in str(explanation)


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
    # Headings are open, and what is said of one call is folded: nine calls in all, of which each is described once.
    assert text.count("<details>") == 6
    assert text.count("<details open>") > 2


def test_case_of_the_default_backend():
    (call,) = jaxdnn.explain(jaxdnn.rms_norm, X, SCALE).sections[0][1]
    expected = {"cpu": "host", "cuda": "direct"}.get(platform(), "xla")
    assert call.engine == expected


@pytest.mark.parametrize("take", [jaxdnn.explain, jaxdnn.autotune])
def test_a_result_is_no_function(take):
    x = jnp.ones((4, 8))
    with pytest.raises(TypeError, match=r"take a function, and then its arguments: explain\(fn, x, w\); got Array"):
        take(jaxdnn.rms_norm(x))
