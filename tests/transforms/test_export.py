"""Exported programs: run by another process, for GPUs that are not here, and of sizes that are not known yet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxdnn
from checking.cases import BF16, F32, NormCase
from checking.compare import as_tuple, engines, platform
from checking.subprocesses import run_python
from jaxdnn import _native
from jaxdnn.device import gpus

ALLOWED = [export.DisabledSafetyCheck.custom_call(name) for name in jaxdnn.CUSTOM_CALLS]
CASE = NormCase("layer_norm", (6, 40), x=BF16, scale=F32, bias=F32, statistics=True)

# Another process: it imports jaxdnn for the handlers, and reads nothing but files.
CONSUMER = """
import sys
import jax
import numpy as np
import jaxdnn

folder = sys.argv[1]
exported = jax.export.deserialize(open(f"{folder}/program", "rb").read())
arrays = np.load(f"{folder}/arrays.npz")
x = jax.numpy.asarray(arrays["x"]).astype("bfloat16")
scale, bias = arrays["scale"], arrays["bias"]
outputs = exported.call(x, scale, bias)
gradients = jax.grad(lambda *a: sum(o.astype("float32").sum() for o in exported.call(*a)), (0, 1, 2))(x, scale, bias)
named = {f"r{i}": np.asarray(a, np.float32) for i, a in enumerate((*outputs, *gradients))}
np.savez(f"{folder}/results.npz", **named)
"""


def types(case):
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in case.primals()]


@pytest.mark.parametrize("engine", engines())
def test_reload_in_another_process(engine, tmp_path):
    with jaxdnn.options(engine=engine):
        exported = export.export(jax.jit(as_tuple(CASE.call)), disabled_checks=ALLOWED)(*types(CASE))
        (tmp_path / "program").write_bytes(exported.serialize(vjp_order=1))
        primals = CASE.primals()
        outputs = jax.jit(as_tuple(CASE.call))(*primals)

        def loss(*arrays):
            return sum(jnp.sum(output.astype(jnp.float32)) for output in as_tuple(CASE.call)(*arrays))

        gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*primals)
    named = {name: np.asarray(array, np.float32) for name, array in zip(CASE.operands, primals, strict=True)}
    np.savez(tmp_path / "arrays.npz", **named)
    run_python(CONSUMER, str(tmp_path))
    results = np.load(tmp_path / "results.npz")
    expected = [np.asarray(array, np.float32) for array in (*outputs, *gradients)]
    assert len(results.files) == len(expected)
    for i, array in enumerate(expected):
        np.testing.assert_allclose(results[f"r{i}"], array, rtol=1e-6, atol=1e-6, err_msg=f"result {i}")


@pytest.mark.skipif(platform() not in ("cpu", "cuda"), reason="no native engine runs on this platform")
def test_the_safety_check_must_be_waived():
    """JAX guarantees compatibility for its own custom calls alone, and says how to allow others."""
    with pytest.raises(ValueError, match="jaxdnn_"):
        export.export(jax.jit(CASE.call))(*types(CASE))


def has_compiler():
    try:
        _native.compiler()
    except _native.Unavailable:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="NVRTC is not installed")


def module(function, *arguments, platforms=("cuda",)):
    return export.export(jax.jit(function), platforms=list(platforms), disabled_checks=ALLOWED)(
        *arguments
    ).mlir_module()


@needs_compiler
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_named_target_needs_no_gpu(target):
    def gradient(*arrays):
        return jax.grad(lambda *a: jnp.sum(as_tuple(CASE.call)(*a)[0].astype(jnp.float32)), (0, 1, 2))(*arrays)

    with jaxdnn.options(target=target, fallback=False):
        text = module(gradient, *types(CASE))
    assert text.count("stablehlo.custom_call @jaxdnn_cuda") == 2
    assert "#include \\22norm/direct/forward.cuh\\22" in text
    assert "#include \\22norm/direct/backward.cuh\\22" in text
    assert {"sm_80": '"sm_80"', "sm_90": '"sm_90a"'}[target] in text


@needs_compiler
def test_one_program_for_both_platforms():
    with jaxdnn.options(target="sm_90"):
        text = module(CASE.call, *types(CASE), platforms=("cpu", "cuda"))
    assert "@jaxdnn_cuda" in text
    assert "@jaxdnn_host" in text


@pytest.mark.skipif(not isinstance(gpus(), str), reason="there is a GPU, which then is the target")
def test_without_a_target_the_reference_is_exported():
    assert "jaxdnn_cuda" not in module(CASE.call, *types(CASE))
    with jaxdnn.options(fallback=False), pytest.raises(jaxdnn.NoEngineError, match='target="sm_90"'):
        module(CASE.call, *types(CASE))


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_symbolic_shapes(kind):
    """Kernels are configured for known sizes; a program of unknown ones runs the reference."""
    rows, columns = export.symbolic_shape("rows, columns")
    x = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    scale = jax.ShapeDtypeStruct((columns,), jnp.float32)

    def both(x, scale):
        function = getattr(jaxdnn, kind)
        return function(x, scale), jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1))(x, scale)

    exported = export.deserialize(export.export(jax.jit(both))(x, scale).serialize())
    for shape in ((3, 8), (17, 5)):
        arrays = NormCase(kind, shape, scale=F32).primals()
        got, want = exported.call(*arrays), both(*arrays)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_symbolic_shapes_are_named_as_the_reason():
    (rows,) = export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    with jaxdnn.options(fallback=False), pytest.raises(jaxdnn.NoEngineError, match="symbolic"):
        export.export(jax.jit(jaxdnn.rms_norm))(x)


def test_ahead_of_time_compilation():
    compiled = jax.jit(as_tuple(CASE.call)).lower(*types(CASE)).compile()
    got, want = compiled(*CASE.primals()), as_tuple(CASE.call)(*CASE.primals())
    jax.tree.map(np.testing.assert_array_equal, got, want)
