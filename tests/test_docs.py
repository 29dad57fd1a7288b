"""What the documentation says is so: its examples run, its commands exist, its tables agree with the code."""

import doctest
import re
from pathlib import Path

import jax
import pytest

import jaxdnn
from jaxdnn.bench import report

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
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


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_examples_in_readme_run(code):
    exec(compile(code, "README.md", "exec"), {})


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


def test_readme_holds_the_saved_measurements(tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text(README)
    report.update_readme(copy, ROOT / "benchmarks/results")
    assert copy.read_text() == README, "run: python -P -m jaxdnn bench --readme"


def test_changelog_has_unreleased_on_top():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
