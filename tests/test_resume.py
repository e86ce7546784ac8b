"""Nothing lost: runs that are killed, interrupted, out of disk or damaged come to what an uninterrupted one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_study import content, write_images

from retrofit.pair import run_pair
from retrofit.recipe import Recipe, parse
from retrofit.runfiles import read_jsonl
from retrofit.train import ArmRun

DETERMINISTIC = ("metrics.jsonl", "probes.jsonl", "predictions.npz", "final/retrofit.safetensors")
STEPS = 12  # five an epoch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"))


def study(data: Path, **train: Any) -> Recipe:
    """Two arms and a twin at two rates, with all that a step may draw or keep."""
    settings = {"steps": STEPS, "lr": [1e-3, 3e-3], "checkpoint_every": 3, "mixup": 0.2, "ema": 0.9, "probe_every": 4}
    document = content(data, **{**settings, **train})
    document["model"] = {"source": document["model"], "model_args": {"drop_path_rate": 0.3, "proj_drop_rate": 0.2}}
    return parse({**document, "aa": [1e-3]})


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study in one go. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_pair(study(data), folder)
    return folder


def same(run: Path, whole: Path, recipe: Recipe) -> None:
    for key in recipe.plan():
        for name in DETERMINISTIC:
            assert (run / key.folder / name).read_bytes() == (whole / key.folder / name).read_bytes(), (key, name)
        timed = [row["step"] for row in read_jsonl(run / key.folder / "timings.jsonl")]
        assert timed == list(range(STEPS))
        assert not (run / key.folder / "last").exists()
    assert not list(run.rglob(".*"))


class Killed(BaseException):
    """As kill -9 leaves files: no handler runs, nothing is saved."""


def killing(monkeypatch: pytest.MonkeyPatch, arm: str, step: int, before: bool = False) -> None:
    """The process dies in that step of an arm, before or after its weights have moved."""
    do = ArmRun.step

    def dying(self: ArmRun, at: int, *given: Any) -> None:
        if before and self.key.arm == arm and at == step:
            raise Killed
        do(self, at, *given)
        if self.key.arm == arm and at == step:
            raise Killed

    monkeypatch.setattr(ArmRun, "step", dying)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_study_goes_on_to_the_same_bits(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Twice within an epoch, at an epoch's end, with nothing saved yet, and with the last step done."""
    recipe, run = study(data, workers=workers), tmp_path / "run"
    places = [("baseline", 1), ("retrofit", 6), ("aa", 8), ("baseline", 10), ("retrofit", STEPS - 1)]
    for arm, step in places:
        with monkeypatch.context() as patch:
            killing(patch, arm, step, before=step == 8)
            with pytest.raises(Killed):
                run_pair(recipe, run)
    run_pair(recipe, run)
    same(run, whole, recipe)
