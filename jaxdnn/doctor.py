"""`python -m jaxdnn doctor`: what was found, where, and which engines can run here."""

import argparse
import importlib.metadata
import platform
from collections.abc import Mapping

import jax
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

import jaxdnn
from jaxdnn import _native
from jaxdnn.config import Options
from jaxdnn.device import find_target, gpus
from jaxdnn.engines.base import Engine
from jaxdnn.engines.convolution.problem import Window
from jaxdnn.engines.table import ENGINES
from jaxdnn.planning.candidates import engines_for
from jaxdnn.planning.select import select
from jaxdnn.pointwise import trace
from jaxdnn.primitives.attention.spec import AttentionSpec
from jaxdnn.primitives.convolution.spec import ConvolutionSpec
from jaxdnn.primitives.fused.derivative import EpilogueSpec
from jaxdnn.primitives.fused.epilogue import Epilogue
from jaxdnn.primitives.matmul.spec import MatmulSpec
from jaxdnn.primitives.norm.spec import NormSpec
from jaxdnn.spec import Signature, Spec


def _round(acc: jax.Array) -> tuple[jax.Array]:
    return (acc.astype("bfloat16"),)


_ROWS = jax.ShapeDtypeStruct((64, 256), "float32")
_FACTORS = {name: jax.ShapeDtypeStruct((rows, 256), "bfloat16") for name, rows in (("a", 64), ("b", 256))}
_QUERY, _KEY = (jax.ShapeDtypeStruct((1, 64, 2, *group, 64), "bfloat16") for group in ((1,), ()))
_IMAGE = jax.ShapeDtypeStruct((2, 8, 8, 64), "float32")
_DENSE, _DEPTHWISE = (jax.ShapeDtypeStruct((3, 3, channels, 64), "float32") for channels in (64, 1))
_WINDOWS = (Window(8, 3, 8, low=1),) * 2
# ConvNeXt's, which is large enough for an engine that leaves small ones to others; and with MobileNet's windows.
_STAGE, *_TAPS = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((32, 56, 56, 96), (7, 7, 1, 96), (3, 3, 1, 96)))
_REACH, _SHORT_REACH = ((Window(56, width, 56, low=width // 2),) * 2 for width in (7, 3))
_ROUNDED = Epilogue(_round, trace(_round, _STAGE.shape, ("float32",)))
_SQUARE = Epilogue(lambda acc: (acc * acc,), trace(lambda acc: acc * acc, _ROWS.shape, (_ROWS.dtype,)))
_DERIVATIVE = EpilogueSpec(epilogue=_SQUARE, direction="backward", active=("accumulator0",), seeded=("y0",))

# Calls of each op, which the engines of its problem are asked to make ready: the spec, the operands, the results.
_SAMPLES: tuple[tuple[Spec, dict[str, jax.ShapeDtypeStruct], dict[str, jax.ShapeDtypeStruct]], ...] = (
    (NormSpec(kind="rms_norm"), {"x": _ROWS}, {"y": _ROWS}),
    (MatmulSpec(), _FACTORS, {"y": _ROWS}),
    (AttentionSpec(), {"query": _QUERY, "key": _KEY, "value": _KEY}, {"out": _QUERY}),
    (ConvolutionSpec(windows=_WINDOWS), {"a": _IMAGE, "b": _DENSE}, {"y": _IMAGE}),
    (ConvolutionSpec(windows=_WINDOWS, group=(1, 1)), {"a": _IMAGE, "b": _DEPTHWISE}, {"y": _IMAGE}),
    *(
        (ConvolutionSpec(windows=windows, group=(1, 1), epilogue=_ROUNDED), {"a": _STAGE, "b": taps}, {"y": _STAGE})
        for windows, taps in zip((_REACH, _SHORT_REACH), _TAPS, strict=True)
    ),
    (_DERIVATIVE, {"accumulator0": _ROWS, "d_y0": _ROWS}, {"d_accumulator0": _ROWS}),
)


def main(arguments: argparse.Namespace | None = None) -> int:
    """Prints everything that decides what can run here; always returns 0, for a missing GPU is no fault."""
    del arguments
    console = Console()
    found = _table()
    for name, value in (_software() | _processor() | _gpu() | _compiler() | _cache()).items():
        found.add_row(name, escape(str(value)))
    console.print(found)
    console.print()
    reasons = {engine: _why_not(engine) for engine in ENGINES}
    console.print(_engine_table(reasons))
    for reason in dict.fromkeys(filter(None, reasons.values())):
        kept = [engine for engine in ENGINES if reasons[engine] == reason]
        platforms = {engine.platform for engine in kept}
        if all(engine in kept for engine in ENGINES if engine.platform in platforms):
            engines = f"every engine for {' and '.join(sorted(platforms))}"
        else:
            engines = ", ".join(f"{engine.name} of {engine.family}" for engine in kept)
        console.print(f"{engines}: {reason}", markup=False, highlight=False)
    return 0


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, show_header=bool(columns), padding=(0, 2, 0, 0), header_style="bold")
    if not columns:
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
    return table


def _software() -> dict[str, object]:
    return {
        "jaxdnn": f"{jaxdnn.__version__}, for Python {platform.python_version()} on {platform.system()} "
        f"({platform.machine()})",
        "JAX": f"{jax.__version__} with jaxlib {importlib.metadata.version('jaxlib')}, which computes on "
        f"{jax.default_backend()}: {', '.join(str(device) for device in jax.devices())}",
    }


def _processor() -> dict[str, object]:
    try:
        host = _native.host()
    except ValueError as error:
        return {"processor": str(error)}
    return {
        "processor": f"{host['threads']} threads with {host['isa']}, of "
        f"{', '.join(host['extensions'] + host['isas'])} (JAXDNN_HOST_ISA)",
    }


def _gpu() -> dict[str, object]:
    try:
        driver = _native.driver()
    except _native.Unavailable as unavailable:
        return {"GPU": f"none: {unavailable}"}
    rows: dict[str, object] = {"driver": f"CUDA {_version(driver['version'])}, from {driver['path']}"}
    for number, device in enumerate(driver["devices"]):
        rows[f"GPU {number}"] = (
            f"{device['name']}: compute capability {_version(device['compute_capability'])}, "
            f"{device['sm_count']} multiprocessors, {decimal(device['memory_bytes'])} of memory, "
            f"{decimal(device['l2_bytes'])} of L2, {decimal(device['shared_memory_per_block'])} of shared memory"
        )
    if not driver["devices"]:
        rows["GPU"] = gpus()
    elif jax.default_backend() == "cpu":
        rows["GPU in JAX"] = 'none: pip install "jax[cuda13]"'
    return rows


def _compiler() -> dict[str, object]:
    try:
        compiler = _native.compiler()
    except _native.Unavailable as unavailable:
        return {"NVRTC": unavailable}
    return {
        "NVRTC": f"{_version(compiler['version'])}, from {compiler['path']}",
        "compiles for": f"sm_{', '.join(map(str, compiler['architectures']))}",
    }


def _cache() -> dict[str, object]:
    cache = _native.cache()
    return {
        "kernel cache": f"{cache['directory']} (JAXDNN_CACHE_DIR)",
        "": f"{cache['entries']} entries, {decimal(cache['bytes'])} of at most {decimal(cache['limit'])}, "
        + ("writable" if cache["writable"] else "not writable: kernels are compiled anew in every process"),
    }


def _engine_table(reasons: Mapping[Engine, str | None]) -> Table:
    table = _table("engine, best first", "family", "platform", "runs here", "notes")
    for engine, reason in reasons.items():
        runs = "yes" if reason is None else "no"
        table.add_row(engine.name, engine.family, engine.platform, runs, ", ".join(engine.notes))
    return table


def _why_not(engine: Engine) -> str | None:
    """Why the engine can't serve any small call on this machine; None if it can."""
    if engine.platform == "any":
        return None
    if isinstance(find_target(engine.platform, Options()), str):
        return "there is no such device here"
    options = Options(engine=engine.name, deterministic=False)
    reasons = []
    for spec, operands, results in _SAMPLES:
        signature = Signature(operands, results)
        if engine in engines_for(spec, spec.problem(signature)):
            selection = select(spec.replace(options=options), signature, engine.platform)
            reasons.append(dict(selection.rejected).get(engine.name))
    return None if None in reasons else reasons[0]


def _version(parts: tuple[int, int]) -> str:
    return ".".join(map(str, parts))
