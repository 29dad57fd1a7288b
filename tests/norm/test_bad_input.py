"""Bad input is a TypeError or a ValueError while tracing, and says what was expected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from checking.targets import H100
from jaxdnn import device
from jaxdnn.config import Options

X = jnp.ones((3, 4, 8), jnp.float32)
SCALE = jnp.ones(8, jnp.float32)

BAD = {
    "axis out of range": (lambda: jaxdnn.layer_norm(X, axis=3), ValueError, r"axis 3 is out of range .*\(3, 4, 8\)"),
    "axis too negative": (lambda: jaxdnn.rms_norm(X, axis=-4), ValueError, "axis -4 is out of range"),
    "axis twice": (lambda: jaxdnn.rms_norm(X, axis=(1, -2)), ValueError, "none twice"),
    "no axis": (lambda: jaxdnn.rms_norm(X, axis=()), ValueError, "at least one axis"),
    "axis of another type": (lambda: jaxdnn.rms_norm(X, axis="last"), TypeError, "axis must be an int"),
    "fractional axis": (lambda: jaxdnn.rms_norm(X, axis=0.5), TypeError, "axis must be an int"),
    "scalar": (lambda: jaxdnn.layer_norm(jnp.float32(1)), ValueError, r"out of range for x of shape \(\)"),
    "no array": (lambda: jaxdnn.layer_norm(None), TypeError, "x must be an array; got None"),
    "text": (lambda: jaxdnn.layer_norm("x"), TypeError, "layer_norm: x must be an array; got a str"),
    "integers": (lambda: jaxdnn.layer_norm(jnp.arange(4)), TypeError, "x must have one of the dtypes .*got int"),
    "complex": (lambda: jaxdnn.rms_norm(X + 1j), TypeError, "x must have one of the dtypes .*got complex"),
    "8 bits": (lambda: jaxdnn.rms_norm(X.astype("float8_e4m3fn")), TypeError, "got float8_e4m3fn"),
    "integer scale": (
        lambda: jaxdnn.rms_norm(X, jnp.ones(8, jnp.int32)),
        TypeError,
        "scale must have one of the dtypes",
    ),
    "integer bias": (lambda: jaxdnn.layer_norm(X, None, jnp.ones(8, jnp.int32)), TypeError, "bias must have one"),
    "short scale": (
        lambda: jaxdnn.layer_norm(X, SCALE[:3]),
        ValueError,
        r"scale must have the normalized shape \(8,\); got \(3,\)",
    ),
    "scale of the last axis only": (
        lambda: jaxdnn.rms_norm(X, SCALE, axis=(1, 2)),
        ValueError,
        r"\(4, 8\); got \(8,\)",
    ),
    "scale that would broadcast": (lambda: jaxdnn.rms_norm(X, SCALE[:1]), ValueError, r"\(8,\); got \(1,\)"),
    "bias of another shape": (
        lambda: jaxdnn.layer_norm(X, SCALE, X),
        ValueError,
        "bias must have the normalized shape",
    ),
    "residual of another shape": (
        lambda: jaxdnn.rms_norm(X, residual=X[:2]),
        ValueError,
        r"residual must have x's shape \(3, 4, 8\); got \(2, 4, 8\)",
    ),
    "integer residual": (lambda: jaxdnn.rms_norm(X, residual=X.astype(jnp.int32)), TypeError, "residual must have one"),
    "negative epsilon": (
        lambda: jaxdnn.rms_norm(X, epsilon=-1e-6),
        ValueError,
        "epsilon must be at least 0; got -1e-06",
    ),
    "epsilon that is no number": (lambda: jaxdnn.rms_norm(X, epsilon=float("nan")), ValueError, "at least 0; got nan"),
    "complex epsilon": (lambda: jaxdnn.rms_norm(X, epsilon=np.complex64(1)), TypeError, "must be a real number"),
    "epsilon past all floats": (lambda: jaxdnn.rms_norm(X, epsilon=10**400), ValueError, "that a float can hold"),
    "epsilon of another type": (
        lambda: jaxdnn.rms_norm(X, epsilon="small"),
        TypeError,
        "epsilon must be a real number",
    ),
    "traced epsilon": (
        lambda: jax.jit(lambda epsilon: jaxdnn.rms_norm(X, epsilon=epsilon))(1e-6),
        TypeError,
        "epsilon must be a real number, known when tracing",
    ),
    "scale_offset without scale": (lambda: jaxdnn.rms_norm(X, scale_offset=1.0), ValueError, "there is no scale"),
    "traced scale_offset": (
        lambda: jax.jit(lambda offset: jaxdnn.rms_norm(X, SCALE, scale_offset=offset))(1.0),
        TypeError,
        "scale_offset must be a real number",
    ),
    "return_statistics of another type": (
        lambda: jaxdnn.rms_norm(X, return_statistics=1),
        TypeError,
        "return_statistics must be True or False",
    ),
    "bias of rms_norm": (lambda: jaxdnn.rms_norm(X, SCALE, SCALE), TypeError, "positional"),
    "a string": (lambda: jaxdnn.rms_norm("x"), TypeError, "x"),
    "unknown option": (
        lambda: jaxdnn.options(engin="xla"),
        TypeError,
        r"^options: there is no keyword engin=; did you mean engine=\?; the keywords are engine, knobs, deterministic",
    ),
    "knobs that are no dict": (
        lambda: jaxdnn.options(engine="host", knobs=3),
        TypeError,
        "knobs must be a dict .*got 3",
    ),
    "a knob that is a list": (
        lambda: jaxdnn.options(engine="host", knobs={"rows_per_task": [1]}),
        TypeError,
        r"^options: knob rows_per_task must be an int, a bool or a str; got \[1\]",
    ),
    "a shape in place of scale": (
        lambda: jaxdnn.layer_norm(X, (8,)),
        TypeError,
        r"^layer_norm: scale must have one of the dtypes .*got int.*; the axes of a shape \(8,\) are named with axis=",
    ),
    **{
        f"keyword {function.__name__}({keyword}=)": (
            lambda function=function, keyword=keyword: function(X, **{keyword: 1}),
            TypeError,
            f"^{function.__name__}: there is no keyword {keyword}=; {meant}.*; the keywords are x, scale, ",
        )
        for function, keyword, meant in (
            (jaxdnn.layer_norm, "eps", r"did you mean epsilon=\?"),
            (jaxdnn.rms_norm, "eps", r"did you mean epsilon=\?"),
            (jaxdnn.rms_norm, "epsilom", r"did you mean epsilon=\?"),
            (jaxdnn.layer_norm, "weight", r"did you mean scale=\?"),
            (jaxdnn.layer_norm, "normalized_shape", "axis= names the axes"),
            (jaxdnn.rms_norm, "bias", "rms_norm adds none"),
        )
    },
    "a keyword like no other": (
        lambda: jaxdnn.rms_norm(X, wxyz=1),
        TypeError,
        "^rms_norm: there is no keyword wxyz=; the keywords are x,",
    ),
    "knobs without engine": (lambda: jaxdnn.options(knobs={"a": 1}), ValueError, "name it with engine="),
    "engine of another type": (lambda: jaxdnn.options(engine=3), ValueError, "engine must be an engine's name"),
    "autotune": (lambda: jaxdnn.options(autotune="yes"), ValueError, "autotune must be one of"),
    "deterministic": (lambda: jaxdnn.options(deterministic=1), ValueError, "deterministic must be True or False"),
    "fallback": (lambda: jaxdnn.options(fallback="no"), ValueError, "fallback must be True or False"),
    "sm_count": (lambda: jaxdnn.options(sm_count=0), ValueError, "sm_count must be a positive int"),
    "workspace_limit": (
        lambda: jaxdnn.options(workspace_limit=-1),
        ValueError,
        "workspace_limit must be a number of bytes",
    ),
    **{
        f"target {target!r}": (
            lambda target=target: jaxdnn.options(target=target),
            ValueError,
            'target must be a compute capability such as "sm_90"',
        )
        for target in ("hopper", "90", "sm_", "sm_90a", "sm_090", "sm_90\n", 90)
    },
    "platform": (
        lambda: jaxdnn.explain(jaxdnn.rms_norm, X, platform="tpu"),
        ValueError,
        'platform must be "cpu", "cuda"',
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_errors_come_while_tracing():
    with pytest.raises(ValueError, match="normalized shape"):
        jax.eval_shape(jaxdnn.rms_norm, X, SCALE[:3])


def test_unknown_engine():
    with jaxdnn.options(engine="fast"), pytest.raises(ValueError, match="there is no engine 'fast'; the engines are "):
        jaxdnn.rms_norm(X)


@pytest.mark.parametrize("use", [jaxdnn.rms_norm, lambda x: jaxdnn.explain(jaxdnn.rms_norm, x, platform="cuda")])
def test_target_that_is_not_known(use):
    """Whatever the call is compiled for."""
    message = 'target must be a GPU that jaxdnn knows, one of sm_80, .*sm_90.*; got "sm_999"'
    with jaxdnn.options(target="sm_999"), pytest.raises(ValueError, match=message):
        use(X)


def test_target_that_is_here_is_known(monkeypatch):
    here = dataclasses.replace(H100, arch="sm_87", name="Orin", present=True)
    monkeypatch.setattr(device, "gpus", lambda: (here,))
    assert device.find_target("cuda", Options(target="sm_87")) == here


def test_static_arguments_of_numpy_are_numbers():
    y = jaxdnn.rms_norm(X, SCALE, axis=np.int64(2), epsilon=np.float32(1e-6), scale_offset=np.float64(0.5))
    np.testing.assert_allclose(y, 1.5, rtol=1e-5)
    np.testing.assert_allclose(jaxdnn.rms_norm(X, axis=[np.int32(1), 2], epsilon=0), 1, rtol=1e-6)


def test_no_floating_point_argument_is_no_gradient():
    with pytest.raises(TypeError, match="one of the dtypes"):
        jax.grad(lambda x: jaxdnn.rms_norm(x.astype(jnp.int32)).sum())(X)
