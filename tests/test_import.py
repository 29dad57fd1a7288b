"""`import jaxdnn` is silent and quick, needs no GPU, and can come before or after the first use of JAX."""

import json
import statistics

import pytest

import jaxdnn
from checking.subprocesses import run_python

USE = "y = jaxdnn.rms_norm(jax.numpy.ones((2, 8))); assert abs(float(y.sum()) - 16) < 1e-3"


def test_import_is_silent():
    assert run_python("import jaxdnn", JAX_LOG_COMPILES="0") == ""


@pytest.mark.parametrize("path", ["/no/such/folder/log.txt", "/"])
def test_log_file_that_can_not_be_written(path):
    """The log goes to stderr, after a line that says why."""
    source = f"""
import contextlib, io
with contextlib.redirect_stderr(io.StringIO()) as said:
    import jax, jaxdnn
    {USE}
print(said.getvalue())
"""
    printed = run_python(source, JAXDNN_LOG="info", JAXDNN_LOG_FILE=path)
    assert f"jaxdnn: JAXDNN_LOG_FILE must be a file to write to: can't open the log file {path}: " in printed
    assert "jaxdnn: rms_norm forward" in printed


def test_import_takes_no_time():
    """Less than a quarter of what JAX's own takes just before: seconds would tell how fast the machine is."""
    source = """
import time
start = time.process_time()
import jax
between = time.process_time()
import jaxdnn
print((time.process_time() - between) / (between - start))
"""
    shares = [float(run_python(source, PYTHONDONTWRITEBYTECODE="")) for _ in range(6)]
    assert statistics.median(shares[1:]) < 0.25, shares  # the first one writes the bytecode


def test_import_starts_nothing():
    """Neither a backend of JAX nor the CUDA driver, which a process that forks afterwards could not have."""
    source = """
import json, sys
import jax

def loaded():
    maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
    return [name for name in ("libcuda.so", "libnvrtc") if name in maps]

before = loaded()
import jaxdnn
from jax._src import xla_bridge
print(json.dumps([xla_bridge.backends_are_initialized(), loaded() == before,
                  sorted({"rich", "matplotlib", "IPython"} & set(sys.modules))]))
"""
    assert json.loads(run_python(source)) == [False, True, []]


@pytest.mark.parametrize(
    "source",
    [
        f"import jaxdnn, jax; {USE}",
        f"import jax; jax.devices(); import jaxdnn; {USE}",
    ],
    ids=["before the backend", "after the backend"],
)
def test_handlers_are_registered_in_any_order(source):
    run_python(source)


def test_reload():
    """A notebook's autoreload imports again in the same process."""
    run_python(f"import jax, jaxdnn, importlib; importlib.reload(jaxdnn); {USE}")


def test_public_names():
    source = "import jaxdnn; print(*sorted(name for name in vars(jaxdnn) if not name.startswith('_')))"
    names = set(run_python(source).split())
    functions = {"NoEngineError", "UnsupportedOperation", "autotune", "dot_general", "explain", "export_checks"}
    functions |= {
        "causal_conv1d",
        "causal_conv1d_update",
        "combine_attention",
        "conv_general_dilated",
        "conv_transpose",
        "dot_product_attention",
        "gated_linear_unit",
        "layer_norm",
        "matmul",
        "options",
        "rms_norm",
    }
    modules = {
        "api_boundary",
        "config",
        "device",
        "custom_call",
        "engines",
        "plan",
        "planning",
        "pointwise",
        "primitives",
        "spec",
    }
    assert functions <= names <= functions | modules
    assert set(jaxdnn.__all__) == functions
