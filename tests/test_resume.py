"""Nothing lost: runs that are killed, interrupted, out of disk or damaged come to what an uninterrupted one does."""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kill_nine
import pytest
import torch
import yaml
from conftest import ROOT
from tiny_study import TIMM_ARGS, content, write_images

from retrofit import runfiles
from retrofit import study as rooms
from retrofit.checkpoint import file_hash, load_model
from retrofit.cli import main
from retrofit.data import Batch
from retrofit.errors import Interrupted, RecipeError, RetrofitError
from retrofit.pair import run_pair
from retrofit.recipe import Recipe, Train, parse
from retrofit.runfiles import RunKey, read_json, read_jsonl
from retrofit.train import ArmRun, resume
from retrofit.train import finish as finishing

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
    document["arms"]["retrofit"]["ramp"] = 0.8
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


@pytest.mark.parametrize(
    ("name", "after"),
    [("predictions.npz", True), ("retrofit.safetensors", True), ("result.json", False), ("result.json", True)],
)
def test_a_kill_while_results_are_written_loses_nothing(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: bool
) -> None:
    """Before and after each file of an arm's end has got its name."""
    recipe, run = study(data), tmp_path / "run"
    replace, rmtree, unlink, dead = os.replace, shutil.rmtree, Path.unlink, []

    def dying(source: Any, target: Any) -> None:
        hit = Path(target).name == name and "retrofit/lr0.001" in str(target)
        if not hit or after:
            replace(source, target)
        if hit:
            dead.append(name)
            raise Killed

    with monkeypatch.context() as patch:  # the dead tidy nothing up
        patch.setattr(os, "replace", dying)
        patch.setattr(shutil, "rmtree", lambda *given, **more: None if dead else rmtree(*given, **more))
        patch.setattr(Path, "unlink", lambda *given, **more: None if dead else unlink(*given, **more))
        with pytest.raises(Killed):
            run_pair(recipe, run)
    assert list((run / "retrofit" / "lr0.001-s0" / "last").iterdir())
    for lock in run.rglob(".lock"):
        lock.unlink()  # no process holds them any more
    run_pair(recipe, run)
    same(run, whole, recipe)


def test_arms_that_were_saved_at_different_steps_catch_up(data: Path, whole: Path, tmp_path: Path) -> None:
    """As where the kill comes between two arms' checkpoints; lockstep and workers may change meanwhile."""
    recipe, run = study(data), tmp_path / "run"
    keys = recipe.plan()
    halt(recipe, run, after=9)
    for key, step in zip(keys, (3, 6, 3, 9, 6), strict=True):
        other = tmp_path / str(step)
        if not other.is_dir():
            halt(recipe, other, after=step)
        shutil.rmtree(run / key.folder)
        shutil.copytree(other / key.folder, run / key.folder)
    run_pair(study(data, lockstep=2, workers=1, checkpoint_every=0), run)
    same(run, whole, recipe)
    resumed = [read_json(run / key.folder / "result.json")["resumed_at"] for key in keys]
    assert resumed == [[3], [6], [3], [9], [6]]


def halt(recipe: Recipe, run: Path, after: int) -> None:
    """Trains so many steps of every arm, and is then interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        step, arms = ArmRun.step, len(recipe.plan())
        done = []

        def interrupting(self: ArmRun, at: int, *given: Any) -> None:
            step(self, at, *given)
            done.append(at)
            if done.count(after - 1) == arms:
                signal.raise_signal(signal.SIGTERM)

        patch.setattr(ArmRun, "step", interrupting)
        with pytest.raises(Interrupted):
            run_pair(recipe, run)
    assert {path.name.split("-")[0] for path in run.rglob("last/*")} == {str(after)}


@pytest.mark.parametrize(
    "optimizer", ["adamw", "nadamw", "sgd", "lion", "muon", "adan", "adafactorbv", "lookahead_adamw"]
)
def test_every_kind_of_optimizer_goes_on_as_it_was(tmp_path: Path, optimizer: str) -> None:
    """Their states differ in kind: steps beside weights, values a group, other dtypes."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        Batch(torch.randn(4, 3, 16, 16, generator=generator), torch.tensor([0, 1, 2, 3]), list("abcd"), 0)
        for _ in range(6)
    ]
    train, key = Train(optimizer=optimizer), RunKey.of("baseline", 1e-3, 0, "fp32")

    def arm(name: str) -> ArmRun:
        model = load_model("timm/test_vit", 4, image_size=16, model_args=TIMM_ARGS, pretrained=False)
        return ArmRun.start(key, model, train, 6, tmp_path / name)

    def steps(arm: ArmRun, numbers: range) -> ArmRun:
        for step in numbers:
            arm.step(step, batches[step], train)
        return arm

    one = steps(arm("one"), range(6))
    steps(arm("two"), range(3)).save()
    two = steps(arm("two"), range(3, 6))
    assert two.resumed_at == [3]
    assert two.losses == one.losses
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, two.model.state_dict()[name]), name


@pytest.mark.parametrize("lockstep", [1, 2, 3, 4, 100])
def test_results_do_not_depend_on_how_many_train_side_by_side(
    data: Path, whole: Path, tmp_path: Path, lockstep: int
) -> None:
    recipe = study(data, lockstep=lockstep)
    run_pair(recipe, tmp_path / "run")
    same(tmp_path / "run", whole, recipe)


# Checkpoints


def damage_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pickled(path: Path) -> None:
    """Another file under the name that its hash gives it: what it would run is not run."""
    torch.save({"format": 1, "step": 9, "code": Path("x")}, path)
    path.rename(path.with_name(f"9-{file_hash(path)[:32]}.pt"))


def rows_lost(path: Path) -> None:
    metrics = path.parents[1] / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:5]))


@pytest.mark.parametrize("hurt", [damage_middle, cut, empty, pickled, rows_lost])
def test_a_damaged_checkpoint_is_named_and_the_run_begins_anew(
    data: Path, whole: Path, tmp_path: Path, hurt: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = study(data), tmp_path / "run"
    halt(recipe, run, after=9)
    (path,) = (run / "retrofit" / "lr0.001-s0" / "last").iterdir()
    hurt(path)
    capsys.readouterr()
    run_pair(recipe, run)
    said = capsys.readouterr().err
    assert "retrofit/lr0.001-s0/last/9-" in said
    assert "is damaged and is left out" in said
    assert "lr0.001-s0 has no whole checkpoint: it starts again from its first step" in said
    same(run, whole, recipe)
    resumed = {key.folder: read_json(run / key.folder / "result.json")["resumed_at"] for key in recipe.plan()}
    assert resumed.pop("retrofit/lr0.001-s0") == []
    assert set(map(tuple, resumed.values())) == {(9,)}


def test_the_one_before_serves_where_the_newest_is_damaged(data: Path, whole: Path, tmp_path: Path) -> None:
    """As a kill between the two leaves both there."""
    recipe, run = study(data), tmp_path / "run"
    place = run / "baseline" / "lr0.001-s0"
    halt(recipe, run, after=6)
    shutil.copytree(place / "last", tmp_path / "earlier")
    halt(recipe, run, after=9)
    (path,) = (place / "last").iterdir()
    cut(path)
    shutil.copytree(tmp_path / "earlier", place / "last", dirs_exist_ok=True)
    run_pair(recipe, run)
    same(run, whole, recipe)
    assert read_json(place / "result.json")["resumed_at"] == [6]


@pytest.mark.parametrize("broken", ["write", "fsync", "replace", "rename"])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    resume.write(tmp_path, 3, {"logs": {}, "x": torch.ones(1000)})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pt")}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if broken == "write":
            patch.setattr(resume._Hashing, "write", full)
        elif broken == "rename":
            patch.setattr(Path, "rename", full)
        else:
            patch.setattr(os, broken, full)
        with pytest.raises(OSError, match="No space left"):
            resume.write(tmp_path, 6, {"logs": {}, "x": torch.zeros(1000)})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*-*.pt")} == before
    read = resume.read(tmp_path)
    assert read is not None
    assert read["step"] == 3
    resume.write(tmp_path, 6, {"logs": {}, "x": torch.zeros(1000)})
    assert [path.name.split("-")[0] for path in (tmp_path / "last").iterdir()] == ["6"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    key = RunKey.of("baseline", 1e-3, 0, "fp32")

    def arm(**changes: Any) -> ArmRun:
        args = {**TIMM_ARGS, **changes}
        model = load_model("timm/test_vit", 4, image_size=16, model_args=args, pretrained=False)
        return ArmRun.start(key, model, Train(), 6, tmp_path)

    arm().save()
    for changes in ({"depth": 3}, {"depth": 1}, {"embed_dim": 64}):
        with pytest.raises(RetrofitError, match=r"last is of another model or optimizer.*; remove it, and the run"):
            arm(**changes)


def test_checkpoints_take_a_fiftieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for cost, between in ((0.0, 15.0), (0.2, 15.0), (2.0, 100.0)):
        cadence, saved = resume.Cadence(0, now[0]), []
        for step in range(1, 2001):
            now[0] += 0.5
            if cadence.due(step):
                with cadence.saving():
                    now[0] += cost
                saved.append(step)
        assert saved[0] == 30
        assert {b - a for a, b in itertools.pairwise(saved)} == {between / 0.5}
    assert [step for step in range(1, 10) if resume.Cadence(3).due(step)] == [3, 6, 9]


# Through the command line


@pytest.fixture
def recipe_file(data: Path, tmp_path: Path) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content(data, steps=STEPS, checkpoint_every=3)))
    return path


@pytest.fixture
def restored_signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def saved_at(run: Path) -> list[int]:
    return [int(path.name.split("-")[0]) for path in run.rglob("last/*")]


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint(
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restored_signals: None,
) -> None:
    """The system lets no file grow beyond some bytes, as a full disk does, from the third checkpoint on."""
    words, run = ["pair", str(recipe_file), "-o", str(tmp_path / "run")], tmp_path / "run"
    save, (soft, hard) = ArmRun.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(arm: ArmRun) -> None:
        if arm.at > 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
        save(arm)

    with monkeypatch.context() as patch:
        patch.setattr(ArmRun, "save", limited)
        try:
            assert main(words) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"retrofit: {run}/baseline/lr0.001-s0/last/.* cannot be written: File too large", said)
    assert saved_at(run) == [6, 6]
    assert main(words) == 0
    assert [read_json(path)["resumed_at"] for path in run.rglob("result.json")] == [[6], [6]]


def test_ctrl_c_to_all_processes_saves_with_workers_too(recipe_file: Path, tmp_path: Path) -> None:
    """A terminal sends it to the workers as well. It may come while a batch is waited for."""
    run = tmp_path / "run"
    process = subprocess.Popen(
        [*(sys.executable, "-m", "retrofit", "pair", recipe_file, "-o", run), "train.steps=3000", "train.workers=2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics, until = run / "retrofit" / "lr0.001-s0" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size > 2000):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "what was trained is saved, and the same command goes on from there" in said
    taken = [[row["step"] for row in read_jsonl(path)] for path in run.rglob("metrics.jsonl")]
    assert sorted(map(len, taken)) == sorted(saved_at(run))
    assert all(steps == list(range(len(steps))) for steps in taken)
    assert 0 < len(taken[0]) < 3000


def test_a_second_interrupt_ends_at_once(
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restored_signals: None,
) -> None:
    """The step is not waited for, and nothing is saved; until then the first is."""
    reached = []

    def endless(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        reached.append("a first signal is held back")
        signal.raise_signal(signal.SIGINT)
        reached.append("a second is not")

    monkeypatch.setattr(ArmRun, "step", endless)
    assert main(["pair", str(recipe_file), "-o", str(tmp_path / "run")]) == 130
    assert reached == ["a first signal is held back"]
    assert capsys.readouterr().err.splitlines()[-1].startswith("retrofit: interrupted; what was saved is kept")
    assert not saved_at(tmp_path / "run")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_training_just_ends(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_signals: None, sent: signal.Signals
) -> None:
    monkeypatch.setattr(rooms, "insert_qk_norm", lambda *_, **__: signal.raise_signal(sent))
    assert main(["pair", str(recipe_file), "-o", str(tmp_path / "run")]) == 128 + sent


def test_a_signal_while_an_arm_is_evaluated_loses_nothing(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = study(data), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(finishing, "predictions", lambda *_: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Interrupted):
            run_pair(recipe, run)
    assert saved_at(run) == [STEPS] * 5
    run_pair(recipe, run)
    same(run, whole, recipe)


@pytest.mark.slow
def test_kill_nine_at_random_moments(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kill_nine.main(["-n", "4", str(recipe_file), "train.steps=60"]) == 0
    assert "4 of 4 bit-equal (8 files each)" in capsys.readouterr().out


# What may change meanwhile


def test_a_changed_recipe_is_refused_and_what_does_not_matter_is_not(data: Path, whole: Path, tmp_path: Path) -> None:
    recipe, run = study(data), tmp_path / "run"
    halt(recipe, run, after=6)
    with pytest.raises(RecipeError, match="another recipe") as caught:
        run_pair(study(data, weight_decay=0.1, on_nonfinite="skip", lockstep=1), run)
    words = str(caught.value).partition("Differing: ")[2]
    assert words == "train.on_nonfinite (end there, skip now), train.weight_decay (0.05 there, 0.1 now)"
    run_pair(study(data, lockstep=1, workers=1, checkpoint_every=100), run)
    same(run, whole, recipe)


def test_another_version_of_a_library_goes_on_and_is_recorded(data: Path, tmp_path: Path) -> None:
    recipe, run = study(data), tmp_path / "run"
    halt(recipe, run, after=6)
    manifest = read_json(run / "run.json")
    assert manifest["continued"] == []
    manifest["environment"]["timm"] = "0.9"
    runfiles.write_json(run / "run.json", manifest)
    run_pair(recipe, run, command=["retrofit", "pair", "again"])
    later = read_json(run / "run.json")
    (entry,) = later["continued"]
    assert entry["command"] == ["retrofit", "pair", "again"]
    assert list(entry["other"]) == ["timm"]
    for name in ("environment", "created", "command"):
        assert later[name] == manifest[name]


def test_another_checkpoint_under_the_same_name_is_refused(data: Path, tmp_path: Path) -> None:
    recipe, run = study(data), tmp_path / "run"
    halt(recipe, run, after=6)
    manifest = read_json(run / "run.json")
    runfiles.write_json(run / "run.json", {**manifest, "weights": "0" * 64})
    with pytest.raises(RecipeError, match="a study of other weights: the model has changed since; take another -o"):
        run_pair(recipe, run)


def test_signals_are_left_as_they_were(data: Path, tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run_pair(study(data, steps=1), tmp_path / "run")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
