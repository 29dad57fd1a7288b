"""`python -m jaxdnn`, and which copy of the package it and the tests use."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxdnn
from jaxdnn import __main__ as commands
from jaxdnn.bench import report
from jaxdnn.engines.table import ENGINES

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


def test_doctor_tells_of_every_engine(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert commands.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in (jaxdnn.__version__, "NVRTC", "driver", "JAXDNN_CACHE_DIR", *(engine.name for engine in ENGINES)):
        assert word in printed


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
    }
    return report.Row(**(values | changes))


def test_results_survive_the_csv(tmp_path):
    rows = [row(), row(dtype="bfloat16", speedup=3.25)]
    path = report.device_file(tmp_path / "new", "Some GPU", "norm")
    report.save(rows, path)
    assert path.name == "some-gpu-norm.csv"
    assert report.load(path) == rows


def test_readme_table_is_made_from_the_csv(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nstale\n{report.END}\nafter\n")
    report.save([row(), row(shape="8 x 32", speedup=8.0)], tmp_path / "some-gpu-norm.csv")
    report.update_readme(readme, tmp_path)
    text = readme.read_text()
    assert "stale" not in text
    assert "| rms_norm forward | 8 x 8 | 100 GB/s, 50% of limit, 2.00 x |" in text
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


def test_geometric_means_are_by_call_and_dtype():
    lines = report.means([row(speedup=2.0), row(speedup=8.0), row(dtype="bfloat16", speedup=1.0)])
    assert [re.search(r"([\d.]+) x$", line)[1] for line in lines] == ["4.00", "1.00", "2.52"]


def test_bench_measures_a_case(capsys):
    assert commands.main(["bench", "norm", "--only", r"^rms_norm forward +\d+ x 1024 +float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"rms_norm forward +\d+ x 1024 float32 .* GB/s, \d+% of limit +XLA .* x", lines[1])
    assert lines[-1].startswith("all")
