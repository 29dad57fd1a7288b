"""What checkers infer of calls: arrays, and not `Any`; and what `help` shows."""

import inspect
import json
import shutil
import subprocess
from pathlib import Path

import pytest

import jaxdnn

USER = """
from typing import assert_type

import jax
import jaxdnn

Array = jax.Array


def products(x: Array, w: Array, b: Array) -> None:
    assert_type(jaxdnn.matmul(x, w), Array)
    assert_type(jaxdnn.matmul(x, w, out_dtype="bfloat16"), Array)
    assert_type(jaxdnn.matmul(x, w, b, epilogue=lambda acc, b: jax.nn.gelu(acc + b)), Array)
    assert_type(jaxdnn.matmul(x, w, epilogue=lambda acc: (acc, acc.sum(0))), tuple[Array, Array])
    assert_type(jaxdnn.dot_general(x, w, (((1,), (0,)), ((), ()))), Array)
    assert_type(jaxdnn.dot_general(x, w, (((1,), (0,)), ((), ())), epilogue=lambda acc: {"y": acc}), dict[str, Array])
    assert_type(jaxdnn.gated_linear_unit(x, w, w, b, activation=jax.nn.silu), Array)


def convolutions(x: Array, w: Array, flag: bool) -> None:
    assert_type(jaxdnn.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=2), Array)
    assert_type(
        jaxdnn.conv_general_dilated(x, w, (1,), ((1, 0),), operands=[w], epilogue=lambda acc, _: (acc, acc.sum(0))),
        tuple[Array, Array],
    )
    assert_type(jaxdnn.conv_transpose(x, w, (2, 2), "VALID", epilogue=lambda acc: {"y": acc}), dict[str, Array])
    assert_type(jaxdnn.causal_conv1d(x, w, activation=jax.nn.silu), Array)
    assert_type(jaxdnn.causal_conv1d(x, w, return_final_state=True), tuple[Array, Array])
    assert_type(jaxdnn.causal_conv1d(x, w, return_final_state=flag), Array | tuple[Array, Array])
    assert_type(jaxdnn.causal_conv1d_update(x, x, w), tuple[Array, Array])


def norms(x: Array, scale: Array, flag: bool) -> None:
    assert_type(jaxdnn.layer_norm(x, scale, scale), Array)
    assert_type(jaxdnn.layer_norm(x, residual=x), tuple[Array, Array])
    assert_type(jaxdnn.layer_norm(x, return_statistics=True), tuple[Array, Array, Array])
    assert_type(jaxdnn.layer_norm(x, residual=x, return_statistics=True), tuple[Array, Array, Array, Array])
    assert_type(jaxdnn.rms_norm(x, scale), Array)
    assert_type(jaxdnn.rms_norm(x, residual=x), tuple[Array, Array])
    assert_type(jaxdnn.rms_norm(x, return_statistics=True), tuple[Array, Array])
    assert_type(jaxdnn.rms_norm(x, residual=x, return_statistics=True), tuple[Array, Array, Array])


def attention(x: Array) -> None:
    assert_type(jaxdnn.dot_product_attention(x, x, x, is_causal=True), Array)
    assert_type(jaxdnn.dot_product_attention(x, x, x, score_mod=lambda s, b, h, q, k: s), Array)
    part = jaxdnn.dot_product_attention(x, x, x, segment_ids=(x, x), return_residual=True)
    assert_type(part, tuple[Array, Array])
    assert_type(jaxdnn.combine_attention(part, part), tuple[Array, Array])


@jaxdnn.options(engine="xla", knobs=None)
def decorated(x: Array) -> Array:
    return x


def options(x: Array) -> None:
    assert_type(decorated(x), Array)
    with jaxdnn.options(sm_count=100, target="sm_90", autotune="cached"):
        pass
"""

# A line, and the rule of the checker that it breaks.
MISTAKES = {
    "jaxdnn.options(engin='xla')": "reportCallIssue",
    "jaxdnn.options(autotune='yes')": "reportArgumentType",
    "jaxdnn.options(fallback='no')": "reportArgumentType",
    "jaxdnn.rms_norm(x, eps=1e-6)": "reportCallIssue",
    "jaxdnn.dot_product_attention(x, x, x, causal_alignment='end')": "reportArgumentType",
    "jaxdnn.matmul(x, x, bias=x)": "reportCallIssue",
    "jaxdnn.matmul(x, x).no_array": "reportAttributeAccessIssue",
}


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_what_a_checker_infers(tmp_path):
    mistakes = "".join(f"    {line}\n" for line in MISTAKES)
    (tmp_path / "user.py").write_text(f"{USER}\n\ndef mistakes(x: Array) -> None:\n{mistakes}")
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(Path(jaxdnn.__file__).parents[1])]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    run = subprocess.run(["pyright", "--outputjson"], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [one for one in json.loads(run.stdout)["generalDiagnostics"] if one["severity"] == "error"]
    first = len(USER.splitlines()) + 3
    broken = {one["range"]["start"]["line"] - first: one["rule"] for one in found}
    assert broken == dict(enumerate(MISTAKES.values())), run.stdout


@pytest.mark.parametrize("name", sorted(set(jaxdnn.__all__) - {"NoEngineError", "UnsupportedOperation"}))
def test_signatures_are_readable(name):
    """As they are written: annotations are not spelt out, as `ArrayLike` would be in two hundred characters."""
    function = getattr(jaxdnn, name)
    assert all(len(str(parameter)) < 110 for parameter in inspect.signature(function).parameters.values())
    assert "jax._src" not in str(inspect.signature(function))
    assert "Example:" in function.__doc__
