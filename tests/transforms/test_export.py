"""Exported programs: run by another process, for GPUs that are not here, and of sizes that are not known yet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxdnn
from checking.cases import TABLE
from checking.compare import as_tuple, platform, runs, served
from checking.subprocesses import run_python
from jaxdnn import _native
from jaxdnn.device import gpus

ALLOWED = jaxdnn.export_checks()
each_case = pytest.mark.parametrize("case", TABLE.plain, ids=str)
each_served_case = pytest.mark.parametrize("case", served(TABLE.plain, "cuda"), ids=str)

# Another process: it imports jaxdnn for the handlers, and reads nothing but files.
CONSUMER = """
import sys
import jax
import numpy as np
import jaxdnn

folder = sys.argv[1]
exported = jax.export.deserialize(open(f"{folder}/program", "rb").read())
arrays = np.load(f"{folder}/arrays.npz")
operands = [jax.numpy.asarray(arrays[name], aval.dtype) for name, aval in zip(arrays, exported.in_avals, strict=True)]
outputs = exported.call(*operands)
every = tuple(range(len(operands)))
gradients = jax.grad(lambda *a: sum(o.astype("float32").sum() for o in exported.call(*a)), every)(*operands)
named = {f"r{i}": np.asarray(a, np.float32) for i, a in enumerate((*outputs, *gradients))}
np.savez(f"{folder}/results.npz", **named)
"""


def types(case):
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in case.primals()]


@pytest.mark.parametrize(("case", "engine"), runs(TABLE.plain))
def test_reload_in_another_process(case, engine, tmp_path):
    with jaxdnn.options(engine=engine):
        exported = export.export(jax.jit(as_tuple(case.call)), disabled_checks=ALLOWED)(*types(case))
        (tmp_path / "program").write_bytes(exported.serialize(vjp_order=1))
        primals = case.primals()
        outputs = jax.jit(as_tuple(case.call))(*primals)

        def loss(*arrays):
            return sum(jnp.sum(output.astype(jnp.float32)) for output in as_tuple(case.call)(*arrays))

        gradients = jax.jit(jax.grad(loss, tuple(range(len(primals)))))(*primals)
    named = {name: np.asarray(array, np.float32) for name, array in zip(case.operands, primals, strict=True)}
    np.savez(tmp_path / "arrays.npz", **named)
    run_python(CONSUMER, str(tmp_path))
    results = np.load(tmp_path / "results.npz")
    expected = [np.asarray(array, np.float32) for array in (*outputs, *gradients)]
    assert len(results.files) == len(expected)
    for i, array in enumerate(expected):
        np.testing.assert_allclose(results[f"r{i}"], array, rtol=1e-6, atol=1e-6, err_msg=f"result {i}")


@pytest.mark.parametrize("case", served(TABLE.plain), ids=str)
def test_the_safety_check_must_be_waived(case):
    """JAX guarantees compatibility for its own custom calls alone, and says how to allow others."""
    with pytest.raises(ValueError, match="jaxdnn_"):
        export.export(jax.jit(case.call))(*types(case))


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
@each_served_case
@pytest.mark.parametrize(("target", "arch"), [("sm_80", "sm_80"), ("sm_90", "sm_90a")])
def test_a_named_target_needs_no_gpu(target, arch, case):
    def gradient(*arrays):
        def loss(*arrays):
            return jnp.sum(as_tuple(case.call)(*arrays)[0].astype(jnp.float32))

        return jax.grad(loss, tuple(range(len(arrays))))(*arrays)

    with jaxdnn.options(target=target, fallback=False):
        text = module(gradient, *types(case))
        _, (_, calls) = jaxdnn.explain(case.call, *types(case), platform="cuda").sections
    assert text.count("stablehlo.custom_call @jaxdnn_cuda") == sum(call.call.count for call in calls)
    assert f'"{arch}"' in text
    for call in calls:
        for line in call.selection.plan.unit.splitlines():
            if line.startswith("#include"):
                assert line.replace('"', "\\22") in text


@needs_compiler
@each_served_case
def test_one_program_for_both_platforms(case):
    with jaxdnn.options(target="sm_90"):
        text = module(case.call, *types(case), platforms=("cpu", "cuda"))
    assert "@jaxdnn_cuda" in text
    assert "@jaxdnn_host" in text


@pytest.mark.skipif(not isinstance(gpus(), str), reason="there is a GPU, which then is the target")
@each_served_case
def test_without_a_target_the_reference_is_exported(case):
    assert "jaxdnn_cuda" not in module(case.call, *types(case))
    with jaxdnn.options(fallback=False), pytest.raises(jaxdnn.NoEngineError, match='target="sm_90"'):
        module(case.call, *types(case))


each_unsized = pytest.mark.parametrize(
    ("cases", "shapes"), [pytest.param(*row, id=f"{row[0][0]}-{'-'.join(row[1])}") for row in TABLE.unsized]
)


def unsized(case, shapes):
    """The operands' types with sizes that are not known."""
    scope = export.SymbolicScope()
    sizes = [export.symbolic_shape(shape, scope=scope) for shape in shapes]
    return [jax.ShapeDtypeStruct(size, array.dtype) for size, array in zip(sizes, types(case), strict=True)]


@each_unsized
def test_symbolic_shapes(cases, shapes):
    """Kernels are configured for known sizes; a program of unknown ones runs the reference."""

    def both(*arrays):
        outputs, pull_back = jax.vjp(as_tuple(cases[0].call), *arrays)
        return outputs, pull_back(jax.tree.map(jnp.cos, outputs))

    exported = export.deserialize(export.export(jax.jit(both))(*unsized(cases[0], shapes)).serialize())
    for case in cases:
        got, want = exported.call(*case.primals()), both(*case.primals())
        tolerance = 2e-3 if platform() == "cuda" else 1e-5
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), got, want)


@pytest.mark.parametrize(("cases", "shapes"), [row for row in TABLE.unsized if served(row[0])])
def test_symbolic_shapes_are_named_as_the_reason(cases, shapes):
    with jaxdnn.options(fallback=False), pytest.raises(jaxdnn.NoEngineError, match="symbolic"):
        export.export(jax.jit(cases[0].call))(*unsized(cases[0], shapes))


@each_case
def test_ahead_of_time_compilation(case):
    compiled = jax.jit(as_tuple(case.call)).lower(*types(case)).compile()
    got, want = compiled(*case.primals()), as_tuple(case.call)(*case.primals())
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_where_it_is_loaded_jaxdnn_is_imported(tmp_path):
    """Serialised here, and loaded in a new process as README says: with the import, and, to see why, without."""
    exported = export.export(jax.jit(jaxdnn.rms_norm), disabled_checks=jaxdnn.export_checks())(
        jax.ShapeDtypeStruct((4, 8), jnp.float32)
    )
    (tmp_path / "program").write_bytes(exported.serialize())
    load = """
import sys, jax
exported = jax.export.deserialize(open(sys.argv[1], "rb").read())
try:
    print(float(exported.call(jax.numpy.ones((4, 8))).sum()))
except jax.errors.JaxRuntimeError as error:
    print(error)
"""
    program = str(tmp_path / "program")
    assert float(run_python(f"import jaxdnn\n{load}", program)) == pytest.approx(32, rel=1e-3)
    if "jaxdnn_" in exported.mlir_module():
        assert "jaxdnn_" in run_python(load, program)
