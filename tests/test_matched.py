"""That nothing but the norm tells arms apart: A/A pairs to the last bit, the twin, mismatches, arms that fail."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import QK_NORM, content, write_images

from retrofit import pair
from retrofit import study as rooms
from retrofit.checkpoint import load_model
from retrofit.data import Batch
from retrofit.errors import Interrupted, PairMismatch
from retrofit.pair import run_pair
from retrofit.recipe import Recipe, Train, parse
from retrofit.report import build_report
from retrofit.runfiles import RunKey, read_json, read_jsonl
from retrofit.train import ArmRun, Seen, check_matched, runs_at_once
from retrofit.train import loop as training
from retrofit.train import memory as measuring

STEPS = 8
DETERMINISTIC = ("metrics.jsonl", "probes.jsonl", "predictions.npz", "final/retrofit.safetensors")
TWO = {"baseline": {}, "retrofit": {"qk_norm": QK_NORM}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"))


def study(
    data: Path, arms: Any = TWO, aa: Any = False, unmatched: Any = (), drops: bool = False, **train: Any
) -> Recipe:
    document = content(data, **{"steps": STEPS, **train}) | {"arms": arms, "aa": aa, "unmatched": unmatched}
    if drops:
        more = {"drop_path_rate": 0.3, "proj_drop_rate": 0.2, "attn_drop_rate": 0.1}
        document["model"] = {"source": document["model"], "model_args": more}
        document["data"] |= {"random_erasing": 0.3, "color_jitter": 0.4}
    return parse(document)


def place(run: Path, arm: str, lr: float = 1e-3) -> Path:
    return run / RunKey.of(arm, lr, 0, "fp32").folder


def equal(one: Path, other: Path) -> None:
    for name in DETERMINISTIC:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


# Baseline twice

RANDOM = {"drops": True, "mixup": 0.4, "cutmix": 0.4, "label_smoothing": 0.1, "ema": 0.9, "layer_decay": 0.8}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "random": RANDOM,
    "workers": {**RANDOM, "workers": 2},
    "bf16": {**RANDOM, "precision": "bf16"},
    "one at a time": {**RANDOM, "lockstep": 1},
    "in parts": {**RANDOM, "accumulate": 3, "grad_checkpointing": True},
}


@pytest.mark.parametrize("third", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_baseline_twice_is_equal_to_the_last_bit(data: Path, tmp_path: Path, case: str, third: bool) -> None:
    """In metrics, weights and predictions."""
    arms = {"baseline": {}, **({"retrofit": {"qk_norm": QK_NORM}} if third else {}), "again": {}}
    run_pair(study(data, arms, **CASES[case]), tmp_path / "run")
    equal(place(tmp_path / "run", "baseline"), place(tmp_path / "run", "again"))


def test_baseline_twice_is_equal_after_one_of_them_was_resumed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = study(data, {"baseline": {}, "again": {}}, lockstep=1, **RANDOM)
    step = ArmRun.step

    def interrupted(arm: ArmRun, at: int, *given: Any) -> None:
        step(arm, at, *given)
        if (arm.key.arm, at) == ("again", 4):
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(ArmRun, "step", interrupted)
        with pytest.raises(Interrupted):
            run_pair(recipe, tmp_path / "run")
    run_pair(recipe, tmp_path / "run")
    equal(place(tmp_path / "run", "baseline"), place(tmp_path / "run", "again"))
    resumed = [read_json(place(tmp_path / "run", a) / "result.json")["resumed_at"] for a in ("baseline", "again")]
    assert resumed == [[], [5]]


# The twin


def test_the_twin_begins_a_millionth_away_keyed_by_the_seed(data: Path) -> None:
    recipe = study(data, aa=True)
    model = load_model(recipe.model.source, 4, image_size=16)
    plain = model.state_dict()

    def twin(seed: int) -> dict[str, torch.Tensor]:
        key = RunKey.of("aa", 1e-3, seed, "fp32")
        return rooms.arm_model(model, recipe, key, {})[0].state_dict()

    before = torch.get_rng_state()
    one, again, other = twin(0), twin(0), twin(1)
    assert torch.equal(torch.get_rng_state(), before)
    moved = []
    for name, value in plain.items():
        assert torch.equal(one[name], again[name])
        assert torch.equal(one[name] == 0, value == 0)
        kept = value != 0
        moved.append((one[name].double()[kept] / value.double()[kept] - 1).flatten())
    relative = torch.cat(moved)
    assert float(relative.square().mean().sqrt()) == pytest.approx(1e-6, rel=0.05)
    assert float(relative.abs().max()) < 1e-5
    assert abs(float(relative.mean())) < 1e-7
    assert not torch.equal(one["patch_embed.proj.weight"], other["patch_embed.proj.weight"])


def test_the_twin_drifts_and_without_its_nudge_is_the_baseline(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = study(data, aa=True, lr=3e-3, **RANDOM)
    run_pair(recipe, tmp_path / "run")
    folders = [place(tmp_path / "run", arm, 3e-3) for arm in ("baseline", "aa")]
    losses = [[row["loss"] for row in read_jsonl(folder / "metrics.jsonl")] for folder in folders]
    drift = [abs(a - b) for a, b in zip(*losses, strict=True)]
    assert 0 < drift[0] < 1e-4
    assert drift[-1] > 0
    assert [k["arm"] for k in read_json(tmp_path / "run" / "run.json")["plan"]] == ["baseline", "retrofit", "aa"]
    monkeypatch.setattr(rooms, "_nudge", lambda *_: None)
    run_pair(recipe, tmp_path / "still")
    equal(place(tmp_path / "still", "baseline", 3e-3), place(tmp_path / "still", "aa", 3e-3))
    equal(place(tmp_path / "still", "baseline", 3e-3), folders[0])


# Mismatches


def test_a_batch_that_differs_from_an_earlier_arms_stops_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one value in one pixel, at step 5, in the arm that trains second."""
    batches, calls = training.train_batches, []

    def other(*given: Any, **more: Any) -> Iterator[Batch]:
        calls.append(1)
        for step, batch in enumerate(batches(*given, **more)):
            if len(calls) == 2 and step == 5:
                pixels = batch.pixels.clone()
                pixels[3, 1, 2, 2] += 1e-6
                batch = Batch(pixels, batch.labels, batch.ids, batch.epoch)
            yield batch

    monkeypatch.setattr(training, "train_batches", other)
    with pytest.raises(PairMismatch, match=r"^the pixels of step 5 are not those that baseline/lr0\.001-s0 was given"):
        run_pair(study(data, lockstep=1), tmp_path / "run")
    assert len(read_jsonl(place(tmp_path / "run", "retrofit") / "metrics.jsonl")) == 5
    assert not (place(tmp_path / "run", "retrofit") / "result.json").exists()


@pytest.mark.parametrize("name", ["pixels", "labels"])
def test_an_arm_that_writes_into_the_batch_of_the_others_stops_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    step = ArmRun.step

    def careless(arm: ArmRun, at: int, batch: Batch, *given: Any) -> None:
        step(arm, at, batch, *given)
        if (arm.key.arm, at) == ("baseline", 2):
            getattr(batch, name).mul_(0)

    monkeypatch.setattr(ArmRun, "step", careless)
    with pytest.raises(PairMismatch, match=r"^baseline/lr0\.001-s0 changed the batch in place"):
        run_pair(study(data), tmp_path / "run")


def test_what_was_seen_is_looked_up_by_step(data: Path, tmp_path: Path) -> None:
    recipe = study(data)
    run_pair(recipe, tmp_path / "run")
    batch = Batch(torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), ["a", "b"], 0)
    with pytest.raises(PairMismatch, match="the ids and pixels of step 0 are not"):
        Seen(tmp_path / "run", recipe.plan()).check(0, batch)
    Seen(tmp_path / "run", recipe.plan()).check(STEPS, batch)  # nobody was given it
    Seen(tmp_path / "run", []).check(0, batch)


# Arms with settings of their own


def test_arms_that_are_not_matched_say_so_first(data: Path, tmp_path: Path) -> None:
    arms = {"baseline": {}, "retrofit": {"qk_norm": QK_NORM, "train": {"weight_decay": 0.0, "warmup": 0.5}}}
    recipe = study(data, arms, unmatched=["weight_decay", "warmup"])
    run_pair(recipe, tmp_path / "run")
    assert read_json(tmp_path / "run" / "run.json")["unmatched"] == {"retrofit": {"weight_decay": 0.0, "warmup": 0.5}}
    rates = {a: [r["lr"] for r in read_jsonl(place(tmp_path / "run", a) / "metrics.jsonl")] for a in arms}
    assert rates["baseline"] != rates["retrofit"]
    assert sorted(rates["retrofit"][:5]) == rates["retrofit"][:5]
    first = build_report(tmp_path / "run")["verdict"]["sentences"][0]
    assert "do not differ in the norm alone" in first
    assert "weight_decay" in first
    with pytest.raises(PairMismatch, match="differ in images, epoch or learning rate at step 0"):
        check_matched(tmp_path / "run", recipe.plan())


# Arms that fail, and runs that diverge


def failing(monkeypatch: pytest.MonkeyPatch, *arms: str) -> None:
    step = ArmRun.step

    def broken(arm: ArmRun, at: int, *given: Any) -> None:
        if arm.key.arm in arms and at == 3:
            raise ZeroDivisionError("a fault of ours")
        step(arm, at, *given)

    monkeypatch.setattr(ArmRun, "step", broken)


def test_a_fault_in_one_arm_leaves_the_others_and_is_recorded(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = study(data, checkpoint_every=2), tmp_path / "run"
    with monkeypatch.context() as patch:
        failing(patch, "retrofit")
        assert run_pair(recipe, run)
    assert "retrofit/lr0.001-s0 failed in step 3; the others go on" in capsys.readouterr().err
    assert read_json(place(run, "baseline") / "result.json")["status"] == "finished"
    failure = read_json(place(run, "retrofit") / "failure.json")
    assert failure["step"] == 3
    assert "ZeroDivisionError: a fault of ours" in failure["error"]
    assert not (place(run, "retrofit") / "result.json").exists()
    run_pair(recipe, run)  # the fault is mended
    assert not (place(run, "retrofit") / "failure.json").exists()
    assert read_json(place(run, "retrofit") / "result.json")["resumed_at"] == [2]
    run_pair(recipe, tmp_path / "whole")
    equal(place(run, "retrofit"), place(tmp_path / "whole", "retrofit"))


def test_where_every_arm_fails_the_fault_is_raised(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "baseline", "retrofit")
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        run_pair(study(data), tmp_path / "run")


def poisoned(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Batches of these steps hold a pixel that is not a number."""
    batches = training.train_batches

    def bad(*given: Any, first_step: int = 0, **more: Any) -> Iterator[Batch]:
        for step, batch in enumerate(batches(*given, first_step=first_step, **more), first_step):
            if step in steps:
                batch.pixels[0, 0, 0, 0] = math.nan
            yield batch

    monkeypatch.setattr(training, "train_batches", bad)


def test_a_loss_that_is_not_finite_ends_the_run_and_says_what_attention_did(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, 5)
    run_pair(study(data, probe_every=4), tmp_path / "run")
    for arm in TWO:
        result = read_json(place(tmp_path / "run", arm) / "result.json")
        assert (result["status"], result["diverged_at"], result["diverged_by"]) == ("diverged", 5, "loss")
        assert result["nonfinite_steps"] == 1
        rows = {row["step"]: row["layers"] for row in read_jsonl(place(tmp_path / "run", arm) / "probes.jsonl")}
        assert [row["step"] for row in result["attention_before"]] == [4, 5]
        for row in result["attention_before"]:
            layers = rows[row["step"]]
            assert row["logit_absmax"] == max(layer["logit_absmax"] for layer in layers)
            assert row["entropy_share"] == min(layer["entropy_share"] for layer in layers)
            assert row["logit_absmax_site"] in {layer["site"] for layer in layers}


def test_steps_that_are_not_finite_are_left_out_where_the_recipe_says_so(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights, the optimizer and their average stay where they were; the count survives a resume."""
    recipe = study(data, on_nonfinite="skip", ema=0.9, checkpoint_every=1)
    poisoned(monkeypatch, 2, 5)
    step, weights = ArmRun.step, {}

    def watching(arm: ArmRun, at: int, *given: Any) -> None:
        def state() -> list[torch.Tensor]:
            return [*arm.model.state_dict().values(), *arm.result_model.state_dict().values()]

        before = [value.clone() for value in state()]
        step(arm, at, *given)
        weights[arm.key.arm, at] = all(map(torch.equal, before, state()))
        if (arm.key.arm, at) == ("retrofit", 3) and not arm.resumed_at:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ArmRun, "step", watching)
    with pytest.raises(Interrupted):
        run_pair(recipe, tmp_path / "run")
    run_pair(recipe, tmp_path / "run")
    assert {at for (_, at), still in weights.items() if still} == {2, 5}
    for arm in TWO:
        result = read_json(place(tmp_path / "run", arm) / "result.json")
        assert (result["status"], result["nonfinite_steps"], result["diverged_by"]) == ("finished", 2, None)
        rows = read_jsonl(place(tmp_path / "run", arm) / "metrics.jsonl")
        assert [row["step"] for row in rows if row["loss"] is None] == [2, 5]
        assert len(rows) == STEPS


def test_a_run_that_is_never_finite_ends(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch, *range(4, 99))
    run_pair(study(data, on_nonfinite="skip", steps=99), tmp_path / "run")
    result = read_json(place(tmp_path / "run", "baseline") / "result.json")
    assert (result["status"], result["diverged_at"], result["nonfinite_steps"]) == ("diverged", 4 + 31, 32)


# Half precision: a scaler on a CPU stands in for a GPU's


def scaled(folder: Path, scale: float | None, train: Train | None = None) -> ArmRun:
    model = load_model("nano", 10)
    arm = ArmRun.start(RunKey.of("baseline", 1e-3, 0, "fp32"), model, train or Train(), 20, folder)
    if scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000)
        arm.accelerator.scaler = scaler
        arm.optimizer = type(arm.optimizer)(arm.optimizer.optimizer, device_placement=False, scaler=scaler)
        arm.accelerator._optimizers = [arm.optimizer]
        arm.accelerator.native_amp = True
        arm.accelerator.state._mixed_precision = "fp16"
    return arm


@pytest.fixture
def one_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(8, 3, 28, 28, generator=generator)
    return Batch(pixels, torch.arange(8) % 10, [str(i) for i in range(8)], 0)


@pytest.fixture
def accelerate_reset() -> Iterator[None]:
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_logged_norms_are_of_unscaled_gradients(
    tmp_path: Path, one_batch: Batch, accelerate_reset: None, clip: float | None
) -> None:
    """A scale that is a power of two changes no bit of what follows from it."""
    train, arms = Train(clip_grad=clip), []
    for name, scale in (("plain", None), ("scaled", 1024.0)):
        arm = scaled(tmp_path / name, scale, train)
        for step in range(4):
            arm.step(step, one_batch, train, [{} for _ in arm.watch.projections()] if step == 2 else None)
        arms.append(arm)
    rows = [(arm.folder / "metrics.jsonl").read_bytes() for arm in arms]
    assert rows[0] == rows[1]
    probes = [read_jsonl(arm.folder / "probes.jsonl")[0] for arm in arms]
    assert [probe["loss_scale"] for probe in probes] == [None, 1024.0]
    assert probes[0]["layers"] == probes[1]["layers"]
    assert all(layer["grad_norm"] > 0 for layer in probes[0]["layers"])
    for one, other in zip(arms[0].model.parameters(), arms[1].model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_gradients_that_overflow_are_the_scalers_and_counted(
    tmp_path: Path, one_batch: Batch, accelerate_reset: None
) -> None:
    arm = scaled(tmp_path, 2.0**127)
    with torch.no_grad():
        arm.model.head.weight.mul_(1000)  # a steep head
    before = [p.detach().clone() for p in arm.model.parameters()]
    arm.step(0, one_batch, Train())
    assert arm.alive
    assert arm.nonfinite == 1
    assert all(map(torch.equal, before, arm.model.parameters()))
    assert arm.accelerator.scaler.get_scale() == 2.0**126
    for step in range(1, 8):
        arm.step(step, one_batch, Train())
    assert not all(map(torch.equal, before, arm.model.parameters()))
    rows = read_jsonl(tmp_path / "baseline" / "lr0.001-s0" / "metrics.jsonl")
    overflowed = sum(row["grad_norm"] is None for row in rows)
    assert arm.nonfinite == overflowed < 8
    assert all(row["loss"] is not None for row in rows)
    arm.save()


# How many side by side


def test_auto_takes_what_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("nano", 10)
    train = Train(batch_size=32)
    held, step = measuring.estimate(model, train, 28)
    weights = sum(p.nbytes for p in model.parameters())
    assert held == pytest.approx(3 * weights, rel=0.01)  # and what AdamW keeps: two values a weight
    for runs in (1, 2, 7):
        monkeypatch.setattr(measuring, "free_bytes", lambda _, n=runs: int((step + (n + 0.5) * held) / 0.8))
        assert runs_at_once(model, train, 28) == runs
    monkeypatch.setattr(measuring, "free_bytes", lambda _: 0)
    assert runs_at_once(model, train, 28) == 1


def test_the_estimate_is_near_what_a_step_then_needs(tmp_path: Path, one_batch: Batch) -> None:
    model = load_model("nano", 10)
    train = Train(batch_size=8)
    estimate = sum(measuring.estimate(model, train, 28))
    arm = ArmRun.start(RunKey.of("baseline", 1e-3, 0, "fp32"), model, train, 4, tmp_path)
    for step in range(2):
        with arm.memory.measured(arm.model, arm.optimizer):
            arm.step(step, one_batch, train)
    assert arm.memory.peak is not None
    assert estimate == pytest.approx(arm.memory.peak, rel=0.1)


def test_parts_keep_pairs_together_where_they_fit() -> None:
    plan = parse({"arms": TWO, "train": {"lr": [1e-4, 1e-3, 1e-2]}}).plan()
    sizes = {n: [len(part) for part in pair._side_by_side(plan, n)] for n in (1, 2, 3, 4, 5, 6, 99)}
    assert sizes == {1: [1] * 6, 2: [2] * 3, 3: [2] * 3, 4: [4, 2], 5: [4, 2], 6: [6], 99: [6]}
    for n in sizes:
        assert [key for part in pair._side_by_side(plan, n) for key in part] == plan
