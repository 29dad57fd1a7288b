"""The arrows between the layers, and the bounds on files, held by reading the sources."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxdnn"

# What is built on the package rather than part of it.
TOOLS = ("doctor", "bench", "library")
# A layer may import those that come after it, and never the reverse. What is not a folder is a file.
LAYERS = (
    *TOOLS,
    "primitives",
    "planning",
    "lowering",
    "engines",
    "pointwise",
    "plan",
    "device",
    "spec",
    "config",
    "_libraries",
    "_native",
)
# The face of the package and its command line may import everything; nobody imports them.
FRONT = ("__init__", "__main__")
SOURCES = sorted(PACKAGE.rglob("*.py"))


def layer(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imported(path):
    """Full names of the modules, and of what is taken from them, that a file imports when it is run."""
    names, stack = set(), [ast.parse(path.read_text())]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        stack += node.orelse if is_type_checking(node) else list(ast.iter_child_nodes(node))
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = layer(path)
    assert own in (*LAYERS, *FRONT), f"{own} has no place among the layers"
    if own in FRONT:
        return
    for name in imported(path):
        package, _, inner = name.partition(".")
        if package != "jaxdnn":
            continue
        other = inner.partition(".")[0]
        if other not in LAYERS:  # `from jaxdnn import layer_norm`
            assert own in TOOLS, f"{own} imports the package's face ({name})"
            continue
        assert LAYERS.index(own) <= LAYERS.index(other), f"{own} is below {other}, and imports it"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_file_knows_jax_inside(path):
    inside = ("jax._src", "jax.interpreters", "jax.extend.core.Primitive", "jaxlib")
    found = [name for name in imported(path) if name.startswith(inside)]
    if path.name == "_define.py":
        return
    if path.name == "lowering.py":  # registers the handlers with the client that JAX makes
        found = [name for name in found if not name.startswith("jaxlib")]
    assert not found, f"{path.name} imports {found}; that belongs in primitives/_define.py"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_file_asks_the_hardware(path):
    if path.name in ("device.py", "doctor.py"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "_native":
            assert node.attr not in ("driver", "host"), f"{path.name} asks for the hardware: device.py does that"


def test_engines_do_not_know_each_other_and_ops_neither():
    """One engine, one file: what two engines of an op share has a name of its own (`norm_geometry`)."""
    for path in sorted((PACKAGE / "engines").glob("*.py")):
        if path.stem in ("__init__", "base"):
            continue
        for name in imported(path):
            assert not name.startswith("jaxdnn.primitives")


BOUNDS = {".py": 350, ".cuh": 500, ".cu": 500, ".cc": 500, ".h": 500}


def measured():
    for folder in ("jaxdnn", "tests", "examples", "cpp"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in BOUNDS:
                yield path


def test_files_stay_short():
    lengths = {path: len(path.read_text().splitlines()) for path in measured()}
    long = {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > BOUNDS[path.suffix]}
    assert not long, f"split these by meaning: {long}"


def test_there_is_no_utils():
    assert not [path for path in measured() if path.stem in ("utils", "util", "helpers", "misc", "common")]


def test_kernels_include_nothing_from_outside():
    kernels = ROOT / "cpp" / "kernels"
    for path in sorted(kernels.rglob("*.cuh")):
        for line in path.read_text().splitlines():
            if line.lstrip().startswith("#include"):
                assert "<" not in line, f"{path.name}: {line}"
                included = line.split('"')[1]
                assert (kernels / included).exists() or (path.parent / included).exists(), f"{path.name}: {line}"
