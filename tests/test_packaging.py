"""A wheel runs the default outside the checkout: recipes, checkpoint and images are in it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_holds_all_that_the_default_needs(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    assert {p.stem for p in (unpacked / "retrofit/recipes").glob("*.yaml")} == {
        p.stem for p in (ROOT / "recipes").glob("*.yaml")
    }
    assert (unpacked / "retrofit/py.typed").is_file()
    small = ["train.steps=2", "train.seeds=0", "train.lr=0.001", "aa=false"]
    small += ["data.test_images=50", "data.validation_images=50"]
    run = subprocess.run(
        [sys.executable, "-m", "retrofit", "pair", "nano", "-o", "run", *small],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "run/report.html").is_file()
