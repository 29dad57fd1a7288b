"""`python -m jaxdnn`, and which copy of the package it and the tests use."""

import importlib.metadata
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxdnn
from checking.targets import H100, TARGETS
from jaxdnn import __main__ as commands
from jaxdnn import _native, device, doctor
from jaxdnn.bench import FAMILIES, report, timing, untuned
from jaxdnn.engines.table import ENGINES
from jaxdnn.planning import select

ROOT = Path(__file__).parents[2]


def test_the_installed_package_is_tested():
    origin = json.loads(importlib.metadata.distribution("jaxdnn").read_text("direct_url.json") or "{}")
    editable = origin.get("dir_info", {}).get("editable", False)
    assert editable or Path(jaxdnn.__file__).parents[1] != ROOT


def test_python_m_jaxdnn(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "jaxdnn", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout == f"jaxdnn {jaxdnn.__version__}\n"


def test_doctor_tells_everything_once_in_one_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    # Where a compiler is installed is a path of any length.
    compiler = {"version": (13, 0), "path": "/lib/libnvrtc.so.13", "builtins": "/lib", "architectures": [80, 90, 100]}
    monkeypatch.setattr(_native, "compiler", lambda: compiler)
    assert commands.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert len(lines) <= 24 + 2 * len(device.gpus()), printed
    assert max(map(len, lines)) <= 100, printed
    for word in (jaxdnn.__version__, "NVRTC", "GPU", "JAXDNN_CACHE_DIR", *(engine.name for engine in ENGINES)):
        assert word in printed
    for sentence in ("can't be loaded", "to compile for a GPU", "Install NVIDIA's driver"):
        assert printed.count(sentence) <= 1, printed


@pytest.mark.parametrize(
    ("chosen", "engines"),
    [
        (lambda engine: engine.platform == "cuda", "every engine for cuda"),
        (lambda engine: engine.name == "simt", "simt of product, simt of convolution, simt of attention"),
    ],
)
def test_doctor_says_a_reason_once_whichever_engines_it_is_against(capsys, monkeypatch, chosen, engines):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(doctor, "_why_not", lambda engine: "of a reason" if chosen(engine) else None)
    monkeypatch.setattr(doctor, "find_target", lambda *_: TARGETS["cuda"][0])
    assert commands.main(["doctor"]) == 0
    assert f"{engines}: of a reason" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: f"{engine.name}-{engine.family}")
def test_doctor_asks_an_engine_for_what_it_has(monkeypatch, engine):
    hopper = {"cuda": H100, "cpu": TARGETS["cpu"][0]}
    for module in (doctor, select):
        monkeypatch.setattr(module, "find_target", lambda platform, _: hopper[platform])
    assert doctor._why_not(engine) is None


def test_unknown_family_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        commands.main(["bench", "nothing"])
    assert "invalid choice" in capsys.readouterr().err


def row(**changes):
    values = {
        "device": "Some GPU",
        "jax": "0.10.2",
        "call": "rms_norm forward",
        "shape": "8 x 8",
        "dtype": "float32",
        "engine": "direct",
        "microseconds": 2.0,
        "rate": 100.0,
        "unit": "GB/s",
        "fraction_of_limit": 0.5,
        "xla_microseconds": 4.0,
        "speedup": 2.0,
        "limit_gb_per_second": 200.0,
        "error": 0.001,
        "xla_error": 0.002,
        "temporary_mib": 6.0,
        "xla_temporary_mib": 12.0,
    }
    return report.Row(**(values | changes))


def test_results_survive_the_csv(tmp_path):
    rows = [row(), row(dtype="bfloat16", speedup=3.25)]
    path = report.device_file(tmp_path / "new", "Some GPU", "norm")
    report.save(rows, path)
    assert path.name == "some-gpu-norm.csv"
    assert report.load(path) == rows


def test_saved_rows_take_the_place_of_those_of_their_cases(tmp_path):
    path = tmp_path / "some-gpu-norm.csv"
    report.save([row(), row(dtype="bfloat16"), row(shape="8 x 32")], path)
    report.save([row(dtype="bfloat16", speedup=3.25), row(call="layer_norm forward")], path)
    assert report.load(path) == [
        row(),
        row(dtype="bfloat16", speedup=3.25),
        row(shape="8 x 32"),
        row(call="layer_norm forward"),
    ]


def test_readme_table_is_made_from_the_csv(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nstale\n{report.END}\nafter\n")
    unknown = {"temporary_mib": math.nan, "xla_temporary_mib": math.nan}
    report.save([row(), row(shape="8 x 32", speedup=8.0, **unknown)], tmp_path / "some-gpu-norm.csv")
    report.update_readme(readme, tmp_path)
    text = readme.read_text()
    assert "stale" not in text
    assert "| rms_norm forward | 8 x 8 | 100 GB/s, 50% of limit, 2.00 x, 0.50 of the memory |" in text
    assert "| rms_norm forward | 8 x 32 | 100 GB/s, 50% of limit, 8.00 x |" in text
    assert "| rms_norm forward | geometric mean | **4.00 x** |" in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    report.update_readme(readme, tmp_path)
    assert readme.read_text() == text


def test_readme_without_markers_is_refused(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing here")
    with pytest.raises(ValueError, match="lacks the markers"):
        report.update_readme(readme, tmp_path)


@pytest.mark.parametrize("content", [None, "", "device,jax\n"], ids=["no file", "empty file", "header alone"])
def test_readme_stays_as_it_is_without_results(tmp_path, content, capsys):
    readme, results = tmp_path / "README.md", tmp_path / "results"
    readme.write_text(f"{report.BEGIN}\ntables\n{report.END}")
    if content is not None:
        results.mkdir()
        (results / "some-gpu-norm.csv").write_text(content)
    assert commands.main(["bench", "--readme", "--results", str(results)]) == 2
    assert "holds no results" in capsys.readouterr().err
    assert "tables" in readme.read_text()


def test_results_that_cannot_be_saved_are_not_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: pytest.fail("it measures"))
    (tmp_path / "file").write_text("")
    assert commands.main(["bench", "norm", "--save", "--results", str(tmp_path / "file")]) == 2
    assert "bench: --save: " in capsys.readouterr().err


def test_geometric_means_are_by_call_and_dtype():
    lines = report.means([row(speedup=2.0), row(speedup=8.0), row(dtype="bfloat16", speedup=1.0)])
    assert [re.search(r"([\d.]+) x$", line)[1] for line in lines] == ["4.00", "1.00", "2.52"]


def test_bench_measures_a_case(capsys):
    assert commands.main(["bench", "norm", "--only", r"^rms_norm forward +\d+ x 1024 +float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"rms_norm forward +\d+ x 1024 float32 .* us .* GB/s, \d+% of limit .* us .* x +\w+$", lines[2])
    assert lines[-1].startswith("all")


def test_bench_compares_attention_with_float64(capsys):
    command = [
        "bench",
        "attention",
        "--shapes",
        "1x64x2x16",
        "--dtypes",
        "float32",
        "--only",
        "^attention forward .*32",
    ]
    assert commands.main(command) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if re.match("attention forward .* us ", line))
    errors = re.findall(r"\d\.\de-\d\d", line)
    assert len(errors) == 2
    assert all(0 < float(error) < 1e-5 for error in errors)


def test_columns_stand_under_their_headers():
    header, cells = report.HEADER, str(row(call="a call", engine="direct"))
    for name, cell in {"call": "a call", "dtype": "float32", "rate": "100 GB/s", "engine": "direct"}.items():
        assert header.index(name) == cells.index(cell), f"{header}\n{cells}"
    for name, cell in {
        "shape": "8 x 8",
        "jaxdnn": "2.0 us",
        "XLA": "4.0 us",
        "speedup": "2.00 x",
        "memory": "6 MiB",
    }.items():
        assert header.index(name) + len(name) == cells.index(cell) + len(cell), f"{header}\n{cells}"


def test_bench_of_shapes_and_dtypes_of_ones_own(capsys):
    """Each family takes the shapes that have its number of sizes."""
    named = "^(rms_norm|matmul|attention)( forward)? +8"
    command = ["bench", "--shapes", "8x32", "8x16x32", "8x4x2x16", "--dtypes", "float16", "--only", named]
    assert commands.main(command) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    measured = [re.match(r"(\S+(?: \S+)*) +(\d+ x .*?) +float16 ", line) for line in lines if " us " in line]
    assert [one.groups() for one in measured] == [
        ("rms_norm forward", "8 x 32"),
        ("matmul", "8 x 16 x 32"),
        ("attention forward", "8 x 4 x 2 x 16"),
    ]


@pytest.mark.parametrize(
    "arguments",
    [["--only", "zzz"], ["matmul", "--shapes", "8x8"], ["norm", "--dtypes", "float8_e4m3fn"]],
    ids=["nothing fits", "another family's shape", "another family's dtype"],
)
def test_bench_of_nothing_is_an_error_that_lists_the_cases(capsys, arguments):
    assert commands.main(["bench", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert {"layer_norm", "rms_norm", "matmul", "bias"} <= set(said.err.split())
    assert re.search(r"\b\d+ x \d+\b", said.err), said.err
    assert len(said.err.splitlines()) == 1 + 3 * len(FAMILIES)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_that_nobody_has_tuned_for(monkeypatch, family, backend):
    """The seed says which; others come from another one, and all classes have as many."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    classes = FAMILIES[family].classes
    drawn = [[(str(case), case.bytes, case.flops) for case in untuned.draw(classes, seed)] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == len(drawn[2]) == untuned.DRAWN * len(classes)
    assert len({*drawn[0], *drawn[2]}) > 1.5 * len(drawn[0])


def test_bench_of_shapes_that_nobody_has_tuned_for(capsys):
    (*_, case) = untuned.draw(FAMILIES["norm"].classes[:2], 0)
    assert commands.main(["bench", "norm", "--untuned", "0", "--only", f"^{re.escape(str(case))}$"]) == 0
    measured = [line for line in capsys.readouterr().out.splitlines() if " us " in line]
    assert [line.split(case.shape)[0].strip() for line in measured] == [case.call]


@pytest.mark.parametrize("other", [["--shapes", "8x8"], ["--dtypes", "float32"], ["--save"]], ids=" ".join)
def test_drawn_shapes_are_no_others(capsys, other):
    assert commands.main(["bench", "--untuned", "1", *other]) == 2
    assert "--untuned draws shapes and dtypes" in capsys.readouterr().err


def test_bench_of_all_that_could_run_instead(capsys):
    """The fastest first; an arrow marks what does run."""
    command = [
        "bench",
        "norm",
        "--shapes",
        "64x128",
        "--dtypes",
        "float32",
        "--only",
        "forward .* 64",
        "--configurations",
    ]
    assert commands.main(command) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    calls = [line for line in lines if "the first choice takes" in line]
    assert len(calls) == sum(line.startswith("-> ") for line in lines) >= 2
    assert last.endswith(f"of {len(calls)} calls")
    ratios = []
    for line in lines:
        if line in calls:
            fastest = 0.0
            ratios.append(float(re.search(r"takes (\S+) x the fastest$", line)[1]))
            continue
        microseconds = float(re.match(r"(?:->|  ) (\d+\.\d) us: \w+", line)[1])
        fastest = fastest or microseconds
        assert microseconds >= fastest
        if line.startswith("->"):
            assert ratios[-1] == pytest.approx(microseconds / fastest, rel=0.05)
    engines = {engine for line in lines for engine in re.findall(r" us: (\w+)", line)}
    assert engines == {"xla", "direct" if jax.default_backend() == "gpu" else "host"}
    mean, most = map(float, re.findall(r"(\S+) x ", last))
    assert (mean, most) == (pytest.approx(sum(ratios) / len(ratios), rel=0.01), max(ratios))


def test_bench_of_all_that_could_run_saves_nothing(capsys):
    assert commands.main(["bench", "norm", "--configurations", "--save"]) == 2
    assert "leave out --save" in capsys.readouterr().err


def test_bench_of_no_pattern(capsys):
    with pytest.raises(SystemExit, match="2"):
        commands.main(["bench", "--only", "["])
    assert "'[' is no regular expression" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["8x", "x8", "0x8", "8xa", "8 x 8"])
def test_bench_of_no_shape(capsys, shape):
    with pytest.raises(SystemExit, match="2"):
        commands.main(["bench", "--shapes", shape])
    assert "sizes are joined by x, as in 512x4096" in capsys.readouterr().err


def test_without_a_command_help_is_printed(capsys):
    assert commands.main([]) == 0
    printed = capsys.readouterr().out
    assert "doctor" in printed
    assert "bench" in printed
