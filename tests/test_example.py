"""The example trains, and says so."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_train_digits(tmp_path):
    picture = tmp_path / "losses.png"
    run = subprocess.run(
        [sys.executable, ROOT / "examples/train_digits.py", "--steps", "150", "--picture", picture],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "agg", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    accuracies = [float(percent) for percent in re.findall(r"([\d.]+)% of 360", run.stdout)]
    assert len(accuracies) == 2
    assert min(accuracies) > 95, run.stdout
    for call in ("rms_norm backward", "attention backward", "convolution wgrad"):
        assert call in run.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
