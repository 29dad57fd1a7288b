"""What the documentation says is so: its examples run, its commands exist, its tables agree with the code."""

import ast
import doctest
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from jaxdnn.bench import report
from jaxdnn.bench.timing import geometric_mean

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FRAMEWORKS = ROOT / "docs/frameworks.md"
RING = ROOT / "docs/attention.md"
MEASURED = ROOT / "benchmarks/README.md"
PUBLIC = {name: one for name, one in sorted(vars(jaxdnn).items()) if not name.startswith("_") and callable(one)}
FUNCTIONS = [name for name, one in PUBLIC.items() if not (isinstance(one, type) and issubclass(one, Exception))]


@pytest.fixture(autouse=True)
def default_precision():
    """What a reader has, who copies an example."""
    with jax.enable_x64(False):
        yield


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_in_docstrings_run(name):
    found = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs={})
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_have_an_example(name):
    assert doctest.DocTestParser().get_examples(PUBLIC[name].__doc__ or "")


def code_of_readme():
    """The blocks that stand alone, each with those that continue it."""
    for block in re.split(r"(?=```python\n)", README)[1:]:
        yield "\n".join(re.findall(r"```python(?: continued)?\n(.*?)```", block, re.DOTALL))


@pytest.mark.parametrize("code", list(code_of_readme()))
def test_examples_in_readme_run(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    for promised in re.findall(rf"{re.escape(code)}```\nprints `(.*?)`", README):
        assert capsys.readouterr().out == f"{promised}\n"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is shown for a machine without a GPU")
def test_explain_prints_what_readme_shows(monkeypatch, capsys):
    session, shown = re.search(r"```\n(>>> .*?)\n(jaxdnn on .*?)```", README, re.DOTALL).groups()
    monkeypatch.setenv("COLUMNS", str(max(map(len, shown.splitlines()))))
    variables = {"jax": jax, "jaxdnn": jaxdnn}
    for statement in ast.parse("\n".join(line[4:] for line in session.splitlines())).body:
        exec(compile(ast.Interactive([statement]), "README.md", "single"), variables)
    assert capsys.readouterr().out == shown


def test_the_ring_computes_what_one_device_does():
    variables = {}
    exec(compile(re.search(r"```python\n(.*?)```", RING.read_text(), re.DOTALL)[1], RING.name, "exec"), variables)
    arrays = [variables[name] for name in ("query", "key", "value")]

    def loss(*arrays):
        return jnp.sum(jaxdnn.dot_product_attention(*arrays, is_causal=True) ** 2)

    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    for found, want in zip(variables["gradients"], expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-4)


def code_of_frameworks():
    """The blocks, by heading."""
    return dict(re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", FRAMEWORKS.read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("name", code_of_frameworks())
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of theirs
def test_frameworks_take_our_ops(name, capsys):
    """Each block computes what the framework's own layers do, and its products run on our engines."""
    package = name.split()[0]
    pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    variables = {}
    exec(compile(code_of_frameworks()[name], FRAMEWORKS.name, "exec"), variables)
    printed = capsys.readouterr().out
    for op in ("attention forward",) if name == "flax attention" else ("rms_norm forward", "matmul"):
        assert re.search(rf"^ +\d+  {op}: (?!xla)", printed, re.MULTILINE), printed
    x, y = variables["x"], variables["y"]
    np.testing.assert_allclose(y, PLAIN[name](variables, x), rtol=2e-2, atol=2e-3)


def plain_linen(variables, x):
    parameters = variables["parameters"]["params"]
    first, second = parameters["Dense_0"], parameters["Dense_1"]
    y = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6) * parameters["RMSNorm_0"]["scale"]
    return x + jax.nn.gelu(y @ first["kernel"] + first["bias"]) @ second["kernel"] + second["bias"]


def plain_attention(variables, x):
    layer = variables["linen"].MultiHeadDotProductAttention(num_heads=4)
    assert not np.array_equal(variables["dropped"], variables["y"])
    return layer.apply(variables["parameters"], x, mask=variables["mask"])


def plain_nnx(variables, x):
    norm, linear, _ = variables["network"].layers
    y = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + norm.epsilon) * norm.scale[...]
    return jax.nn.gelu(y @ linear.kernel[...] + linear.bias[...])


def plain_equinox(variables, x):
    hidden = variables["hidden"]
    return jax.nn.gelu(jax.vmap(lambda row: hidden.linear(hidden.norm(row)))(x))


PLAIN = {
    "flax linen": plain_linen,
    "flax nnx": plain_nnx,
    "flax attention": plain_attention,
    "equinox": plain_equinox,
}


@pytest.mark.parametrize(
    "command", ["pip install '.[examples]' && python examples/train_digits.py", "pip install '.[test]' && pytest"]
)
def test_readme_has_the_two_commands(command):
    assert f"\n{command}\n" in README


def test_readme_documents_every_environment_variable():
    sources = [path for pattern in ("jaxdnn/**/*.py", "cpp/**/*.cc") for path in ROOT.glob(pattern)]
    honoured = {name for path in sources for name in re.findall(r'"(JAXDNN_[A-Z_]+)"', path.read_text())}
    documented = set(re.findall(r"^\| `(JAXDNN_[A-Z_]+)", README, re.MULTILINE))
    assert documented == honoured


def test_the_page_of_benchmarks_holds_the_saved_measurements(tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text(MEASURED.read_text())
    report.update_readme(copy, ROOT / "benchmarks/results")
    assert copy.read_text() == MEASURED.read_text(), "run: python -P -m jaxdnn bench --readme"


def test_headline_numbers_are_saved_measurements():
    """README's table holds geometric means, and all that were measured of its calls, devices and dtypes."""
    header, _, *rows = re.search(r"<!-- headline -->\n(.*?)\n\n", README, re.DOTALL)[1].splitlines()
    assert 3 < len(rows) <= 8
    _, _, *columns, _ = re.split(r" *\| *", header)
    files = {"H200": "nvidia-h200-*.csv", "CPU": "cpu-with-avx512-16-threads-*.csv"}
    saved = {
        device: [row for path in (ROOT / "benchmarks/results").glob(pattern) for row in report.load(path)]
        for device, pattern in files.items()
    }

    def mean(call, column):
        device, dtype = column.split(", ")
        speedups = [row.speedup for row in saved[device] if (row.call, row.dtype) == (call, dtype)]
        return f"{geometric_mean(speedups):.2f} x" if speedups else ""

    for line in rows:
        _, call, *cells, _ = re.split(r" *\| *", line)
        assert cells == [mean(call, column) for column in columns], call


def test_changelog_has_unreleased_on_top():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
