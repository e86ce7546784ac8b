"""retrofit.train.track: what trackers are told, over the same steps as metrics.jsonl."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny_study import QK_NORM, content, write_images

from retrofit.errors import RecipeError, RetrofitError
from retrofit.pair import run_pair
from retrofit.recipe import parse
from retrofit.runfiles import RunKey, read_json, read_jsonl
from retrofit.train import track

ARMS = ("baseline", "retrofit")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"))


def study(data: Path, *trackers: str, **train: Any) -> dict[str, Any]:
    """With None, a list and a dict in its configuration, as in most."""
    document = content(data, trackers=list(trackers), optimizer_args={"betas": [0.9, 0.99]}, **train)
    document["arms"]["retrofit"]["qk_norm"] = {**QK_NORM, "layers": [0, 1]}
    return document


def place(folder: Path, arm: str) -> Path:
    return folder / RunKey.of(arm, 1e-3, 0, "fp32").folder


def expected(folder: Path, arm: str) -> dict[str, list[tuple[int, float]]]:
    """Every value that a tracker is told, from the run's own files."""
    rows, result = read_jsonl(place(folder, arm) / "metrics.jsonl"), read_json(place(folder, arm) / "result.json")
    told = {f"train/{name}": [(row["step"], row[name]) for row in rows] for name in ("loss", "lr", "grad_norm")}
    probes = read_jsonl(place(folder, arm) / "probes.jsonl")[:-1]
    told["attention/logit_absmax"] = [
        (row["step"], max(layer["logit_absmax"] for layer in row["layers"])) for row in probes
    ]
    for split in ("validation", "test"):
        for name in ("accuracy", "loss"):
            told[f"{split}/{name}"] = [(result["steps"], result[split][name])]
    return told


def test_tensorboard_holds_a_run_for_each_run(data: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_pair(parse(study(data, "tensorboard")), tmp_path / "run")
    run_pair(parse(study(data)), tmp_path / "without")
    for arm in ARMS:
        folder = tmp_path / "run" / "tensorboard" / place(Path(), arm)
        accumulated = events.EventAccumulator(str(folder)).Reload()
        told = expected(tmp_path / "run", arm)
        assert set(accumulated.Tags()["scalars"]) == told.keys()
        for name, values in told.items():
            seen = [(e.step, e.value) for e in accumulated.Scalars(name)]
            assert [step for step, _ in seen] == [step for step, _ in values]
            assert [value for _, value in seen] == pytest.approx([value for _, value in values], rel=1e-6)
        written = next(folder.glob("*/hparams.yml")).read_text()
        assert "train.ema: None" in written
        assert "train.optimizer_args.betas: '[0.9, 0.99]'" in written
        for name in ("metrics.jsonl", "predictions.npz", "final/retrofit.safetensors"):
            one, other = (place(tmp_path / n, arm) / name for n in ("run", "without"))
            assert one.read_bytes() == other.read_bytes()


def test_what_is_done_again_after_a_kill_is_tracked_once(data: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = parse(study(data, "tensorboard"))
    key = recipe.plan()[0]
    for first in (0, 3):
        trackers = track.Trackers(recipe, key, tmp_path / "run", first)
        for step in range(first, 6):
            trackers.step({"step": step, "loss": float(first), "lr": 0.1, "grad_norm": 1.0}, None)
        trackers.close()
    folder = tmp_path / "run" / "tensorboard" / key.folder
    losses = events.EventAccumulator(str(folder)).Reload().Scalars("train/loss")
    assert [(e.step, e.value) for e in losses] == [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3), (5, 3)]


def test_trackio_holds_a_run_for_each_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio.sqlite_storage as stored

    monkeypatch.setattr(stored, "TRACKIO_DIR", tmp_path / "trackio")
    run_pair(parse(study(data, "trackio")), tmp_path / "run")
    for arm in ARMS:
        told = expected(tmp_path / "run", arm)
        logs = stored.SQLiteStorage.get_logs("run", place(Path(), arm).as_posix())
        for name, values in told.items():
            seen = sorted((log["step"], log[name]) for log in logs if name in log)
            assert seen == [(step, pytest.approx(value, rel=1e-6)) for step, value in values]


def test_wandb_holds_a_run_for_each_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    told: dict[str, list[tuple[int, dict[str, float]]]] = {}
    log = wandb.sdk.wandb_run.Run.log

    def watched(self: Any, values: dict[str, float], step: int | None = None, **more: Any) -> None:
        assert step is not None
        told.setdefault(self.name, []).append((step, values))
        log(self, values, step=step, **more)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", watched)
    run_pair(parse(study(data, "wandb")), tmp_path / "run")
    for arm in ARMS:
        for name, values in expected(tmp_path / "run", arm).items():
            seen = [(step, row[name]) for step, row in told[place(Path(), arm).as_posix()] if name in row]
            assert seen == [(step, pytest.approx(value, rel=1e-6)) for step, value in values]
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 2


def test_a_loss_that_is_not_finite_stops_no_tracker(data: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    document = study(data, "tensorboard", steps=5)
    document["train"]["lr"] = 1e30
    run_pair(parse(document), tmp_path / "run")
    folder = tmp_path / "run" / "tensorboard" / "baseline" / "lr1e+30-s0"
    losses = [e.value for e in events.EventAccumulator(str(folder)).Reload().Scalars("train/loss")]
    assert len(losses) == len(read_jsonl(tmp_path / "run" / "baseline" / "lr1e+30-s0" / "metrics.jsonl"))
    assert math.isfinite(losses[0])


def test_a_tracker_that_is_not_here_names_its_extra(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(RetrofitError, match=r"wandb is not installed; pip install 'qknorm-retrofit\[wandb\]'"):
        run_pair(parse(study(data, "tensorboard", "wandb")), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match=r"train\.trackers\.0: .* 'tensorboard', 'trackio' or 'wandb'"):
        parse(study(data, "mlflow"))
    assert parse({"train": {"trackers": "wandb"}}).train.trackers == ("wandb",)


def test_every_tracker_has_its_extra() -> None:
    import tomllib

    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert track._MAKERS.keys() <= extras["optional-dependencies"].keys()
