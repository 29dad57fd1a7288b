"""The arrows between the layers, and the bounds on files, held by reading the sources."""

import ast
import re
from pathlib import Path

import pytest

from jaxdnn.engines import table

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxdnn"

# What is built on the package rather than part of it.
TOOLS = ("doctor", "bench", "library")
# A layer may import those that come after it, and never the reverse. What is not a folder is a file.
LAYERS = (
    *TOOLS,
    "primitives",
    "planning",
    "custom_call",
    "engines",
    "pointwise",
    "plan",
    "device",
    "spec",
    "config",
    "api_boundary",
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
def test_two_files_know_jax_inside(path):
    inside = ("jax._src", "jax.interpreters", "jax.extend.core.Primitive", "jaxlib")
    found = [name for name in imported(path) if name.startswith(inside)]
    if path.name in ("_define.py", "_layout.py"):
        return
    if path.name == "custom_call.py":  # registers the handlers with the client that JAX makes
        found = [name for name in found if not name.startswith("jaxlib")]
    assert not found, f"{path.name} imports {found}; that belongs in primitives/_define.py or _layout.py"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_file_asks_the_hardware(path):
    if path.name in ("device.py", "doctor.py"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "_native":
            assert node.attr not in ("driver", "host"), f"{path.name} asks for the hardware: device.py does that"


# Builtins that only look, and build what is only looked at.
PURE = {"abs", "all", "any", "dict", "frozenset", "isinstance", "issubclass", "len", "list", "max", "min", "range"}
PURE |= {"set", "sorted", "sum", "tuple", "type", "zip"}


def changes_nothing(node):
    """Whether a node of an expression is known to: it binds no name, and calls nothing but what is pure."""
    match node:
        case ast.NamedExpr() | ast.Await() | ast.Yield() | ast.YieldFrom():
            return False
        case ast.Call(func=ast.Name(id=name)):
            return name in PURE
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module))):
            return module == "math"
    return not isinstance(node, ast.Call)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_asserts_can_be_left_out(path):
    """Under `python -O` they are: an assert must not hold a call that does something."""
    asserts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    inner = [node for one in asserts for node in ast.walk(one)]
    found = [f"line {node.lineno}: {ast.unparse(node)}" for node in inner if not changes_nothing(node)]
    assert not found, f"{path} asserts what may change something: {found}"


ENGINES = PACKAGE / "engines"
# What an engine's folder holds; a small engine is one file instead.
ENGINE_FILES = {"__init__.py", "engine.py", "knobs.py", "heuristic.py", "unit.py"}


def engine_folders():
    """Every engine that is a folder, as family and name."""
    return sorted(path.parent.relative_to(ENGINES).parts for path in ENGINES.rglob("engine.py"))


@pytest.mark.parametrize(("family", "engine"), engine_folders(), ids="/".join)
def test_an_engine_has_the_same_four_files_as_all_others(family, engine):
    assert {path.name for path in (ENGINES / family / engine).glob("*.py")} == ENGINE_FILES


def test_every_engine_has_a_place_and_a_kernel_of_its_name():
    for engine in table.ENGINES:
        family, *rest = type(engine).__module__.removeprefix("jaxdnn.engines.").split(".")
        if engine.platform == "any":
            continue
        assert rest in ([engine.name], [engine.name, "engine"]), f"{engine.name} lies in {family}.{'.'.join(rest)}"
        if engine.platform == "cuda":
            place = ROOT / "cpp" / "kernels" / family / engine.name
            assert place.is_dir() or place.with_suffix(".cuh").exists(), f"{place} is missing"
        else:
            assert list((ROOT / "cpp" / engine.name / family).glob("*.cc")), f"{engine.name} has no {family}"


def test_engines_do_not_know_their_siblings_and_ops_neither():
    for path in sorted(ENGINES.rglob("*.py")):
        if path.name == "table.py":
            continue
        own = path.relative_to(ENGINES).parts
        for name in imported(path):
            assert not name.startswith("jaxdnn.primitives"), f"{path} imports {name}"
            if name.startswith("jaxdnn.engines.") and len(own) == 3:
                other = tuple(name.removeprefix("jaxdnn.engines.").split("."))
                # One of the same name in another family is the same kernel, with other loads.
                sibling = other[1:2] != own[1:2] and (ENGINES / "/".join(other[:2])).is_dir()
                assert not sibling, f"{path} imports {name}, of another engine"


def test_engines_see_problems_and_no_spec():
    for path in sorted(ENGINES.rglob("*.py")):
        found = {name for name in imported(path) if name.startswith("jaxdnn.spec.")}
        assert found <= {"jaxdnn.spec.Signature"}, f"{path} imports {found}"


def test_host_kernels_have_types_of_their_own():
    """Two files' types of one name are one to the linker, which takes the functions of either for both."""
    files = {}
    for path in sorted((ROOT / "cpp" / "host").rglob("*.cc")):
        text = path.read_text()
        (namespace,) = re.findall(r"^namespace (\w+) \{", text, re.MULTILINE) or [""]
        for name in re.findall(r"^(?:class|struct|enum class) (\w+)", text, re.MULTILINE):
            assert files.setdefault((namespace, name), path) == path


def test_host_kernels_include_nothing_of_the_runtime():
    for path in sorted((ROOT / "cpp" / "host").rglob("*.[hc]*")):
        included = [line for line in path.read_text().splitlines() if line.startswith("#include")]
        assert not [line for line in included if "/runtime/" in line], path


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


def test_paths_in_comments_are_todays():
    folders = "cpp|jaxdnn|tests|benchmarks|core|product|norm|pointwise|ptx"
    named = re.compile(rf"\b((?:{folders})/[\w/]+\.(?:pyi?|cuh|cc|h|md))\b")
    roots = [ROOT / root for root in (".", "cpp", "cpp/kernels", "cpp/host", "jaxdnn/engines")]
    for path in measured():
        for found in named.findall(path.read_text()):
            assert any((root / found).exists() for root in roots), f"{path} names {found}, which is not there"


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


def test_instructions_include_no_more_than_instructions():
    for path in sorted((ROOT / "cpp" / "kernels" / "ptx").glob("*.cuh")):
        for line in path.read_text().splitlines():
            if line.lstrip().startswith("#include"):
                assert line.startswith('#include "ptx/'), f"{path.name}: {line}"
