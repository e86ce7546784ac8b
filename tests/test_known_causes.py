"""Training runs whose trouble has a cause that is known, since it was planted: what the diagnosis says of their files.

Half-precision overflow is in test_diagnose.py, as made files: CPUs do not train in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import content, write_images

from retrofit.data import Batch
from retrofit.diagnose import Diagnosis, Trained, diagnose
from retrofit.models import family_of
from retrofit.pair import run_pair
from retrofit.recipe import parse
from retrofit.train import ArmRun, arm, loop

LOW, HIGH = 1e-3, 2e-3
STEPS = 200
BLAMED = "blocks.1.attn"


pytestmark = pytest.mark.slow


def trained(folder: Path, contrast: int = 8) -> list[Diagnosis]:
    """The diagnoses of the baseline at two rates, two seeds each, by their run folder; the lower rate is the best."""
    data = write_images(folder / "data", {"train": 160, "validation": 40, "test": 8}, contrast=contrast)
    document = content(data, steps=STEPS, lr=[LOW, HIGH], seeds=[0, 1], probe_every=10)
    recipe = parse({**document, "arms": {"baseline": {}}})
    run_pair(recipe, folder / "run")
    return diagnose([Trained.read(folder / "run", key) for key in recipe.plan()], {("fp32", "baseline"): LOW})


def test_nothing_planted_nothing_found(tmp_path: Path) -> None:
    assert trained(tmp_path, contrast=40) == []


def test_a_head_that_learns_too_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = arm.optimizer_of

    def fast_head(model: Any, train: Any, lr: float, *more: Any) -> Any:
        optimizer = of_all(model, train, lr, *more)
        if lr == HIGH:
            head = list(family_of(model).head(model).parameters())
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if not any(p is h for h in head)]
                group["lr_scale"] = LOW / HIGH
            optimizer.add_param_group({"params": head, "lr": lr, "lr_scale": 3000.0})
        return optimizer

    monkeypatch.setattr(arm, "optimizer_of", fast_head)
    found = trained(tmp_path)
    assert [d.key.lr for d in found] == [HIGH, HIGH]
    for d in found:
        assert (d.event, d.answer, d.reason) == ("degradation", "no", "no logit moved")


def test_a_blow_up_of_the_logits_of_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = ArmRun.step

    def growing(self: ArmRun, at: int, *args: Any, **kwargs: Any) -> None:
        step(self, at, *args, **kwargs)
        if self.key.lr == HIGH and at >= 40:
            with torch.no_grad():
                self.model.get_submodule(BLAMED).qkv.weight[:64] *= 1.5  # q and k, until float32 overflows

    monkeypatch.setattr(ArmRun, "step", growing)
    found = trained(tmp_path)
    assert [d.key.lr for d in found] == [HIGH, HIGH]
    for d in found:
        assert (d.event, d.answer, d.reason) == ("divergence", "yes", "logits first")
        logit = next(m for m in d.moved if m.figure == "largest logit")
        assert logit.sites == (BLAMED,)
        assert 40 <= logit.by <= 60


def test_a_bad_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = loop.train_batches

    def one_bad(*args: Any, **kwargs: Any) -> Iterator[Batch]:
        for i, batch in enumerate(batches(*args, **kwargs)):
            yield replace(batch, pixels=-30 * batch.pixels) if i == 160 else batch

    monkeypatch.setattr(loop, "train_batches", one_bad)
    found = trained(tmp_path, contrast=40)
    assert {(d.key.lr, d.key.seed) for d in found} == {(lr, seed) for lr in (LOW, HIGH) for seed in (0, 1)}
    for d in found:
        assert (d.event, d.step) == ("loss spike", 160)
        assert (d.answer, d.reason) == (("no", "no logit moved") if d.key.lr == LOW else ("no", "same batch"))
