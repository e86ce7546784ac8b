"""The target `retrofit`: a folder for retrofit.load, with labels, preprocessing, a proof and a model card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrofit import runfiles
from retrofit.checkpoint import MANIFEST, load, read_manifest, saving, write_model
from retrofit.errors import CheckpointError, RetrofitError, nearest
from retrofit.export.card import model_card
from retrofit.export.proof import prove_in_fresh_process, write_fixture
from retrofit.models import family_of
from retrofit.models.preprocess import Preprocess
from retrofit.norms import end_ramp, ramp_of
from retrofit.runfiles import read_json, write_text

_PROOF_IMAGES = 4


def export_model(
    model: nn.Module,
    folder: Path,
    *,
    about: Mapping[str, Any],
    images: Tensor | None = None,
    finish_ramp: bool = False,
    force: bool = False,
) -> list[str]:
    """Writes a model as a folder, proves it in a fresh process, and returns what the proof found.

    Args:
        about: where the model comes from, as retrofit.json and the model card tell it.
        images: preprocessed [B, 3, H, W] for the proof; made-up ones where None.
        finish_ramp: writes a model whose norms are still coming in with the whole norm, which is another function.

    Raises RetrofitError for such a model otherwise, and CheckpointError where the folder does not compute what the
    model does; it is then left for inspection.
    """
    alpha = ramp_of(model)
    if alpha is not None and not finish_ramp:
        raise RetrofitError(
            f"the norms of this model are still coming in (their ramp is at {alpha:g} of 1); train to the ramp's end, "
            "or export with --finish-ramp, which puts them at their end and so changes what the model computes"
        )
    end_ramp(model)
    sample = images[:_PROOF_IMAGES] if images is not None else _noise(family_of(model).preprocess(model))
    with saving(folder, force=force) as scratch:
        write_fixture(model, sample, scratch)
        write_text(scratch / "README.md", model_card(model, about))
        write_model(model, scratch, about=about)
    proof = prove_in_fresh_process(folder)
    if not proof.ok:
        raise CheckpointError(f"the export in {folder} is not sound: {'; '.join(proof.findings)}")
    return proof.findings


def export_run(
    run_dir: Path,
    folder: Path,
    *,
    arm: str | None = None,
    seed: int | None = None,
    lr: float | None = None,
    finish_ramp: bool = False,
    force: bool = False,
) -> list[str]:
    """Exports a fine-tuned model of a run folder, or copies a folder that retrofit wrote.

    Args:
        arm: None: the first that is not the baseline.
        seed: None: the plan's first that finished.
        lr: None: the arm's best by mean validation loss over its seeds.
        finish_ramp: as for `export_model`.

    Raises RetrofitError where there is no such finished run.
    """
    runfiles.check_free(folder, MANIFEST, force)
    if (run_dir / MANIFEST).is_file():
        about = read_manifest(run_dir).get("about", {})
        return export_model(load(run_dir), folder, about=about, finish_ramp=finish_ramp, force=force)
    result = _choose(run_dir, arm, seed, lr)
    manifest = read_json(run_dir / runfiles.MANIFEST)
    about = {
        "base": manifest["recipe"]["model"]["source"],
        "data": manifest["recipe"]["data"]["source"],
        **{k: result[k] for k in ("arm", "lr", "seed", "precision", "steps", "validation", "test")},
    }
    insertion = run_dir / result["arm"] / runfiles.INSERTION
    if insertion.is_file():
        record = read_json(insertion)
        about |= {k: record[k] for k in ("init", "calibration_images", "shock")}
    return export_model(load(run_dir / result["folder"] / runfiles.FINAL), folder, about=about, force=force)


def _choose(run_dir: Path, arm: str | None, seed: int | None, lr: float | None) -> dict[str, Any]:
    """The result.json of the run that is meant, with its folder."""
    if not (run_dir / runfiles.MANIFEST).is_file():
        raise RetrofitError(f"{run_dir} is neither a run folder ({runfiles.MANIFEST}) nor a checkpoint ({MANIFEST})")
    plan = read_json(run_dir / runfiles.MANIFEST)["plan"]
    arms = list(dict.fromkeys(key["arm"] for key in plan))
    if arm is None:
        arm = next((a for a in arms if a != "baseline"), arms[0])
    if arm not in arms:
        raise RetrofitError(f"there is no arm {arm}{nearest(arm, arms)} (arms: {', '.join(arms)})")
    finished = []
    for key in plan:
        path = run_dir / key["folder"] / runfiles.RESULT
        if key["arm"] == arm and path.is_file():
            result = read_json(path)
            if result["status"] == "finished":
                finished.append({**result, "folder": key["folder"]})
    if not finished:
        diverged = [
            k["folder"] for k in plan if k["arm"] == arm and (run_dir / k["folder"] / runfiles.RESULT).is_file()
        ]
        why = "every one that ended diverged" if diverged else "`retrofit pair` goes on with them"
        raise RetrofitError(f"no run of arm {arm} in {run_dir} has finished: {why}")
    runs = Counter(r["lr"] for r in finished)
    lrs = [rate for rate, count in runs.items() if count == max(runs.values())]  # a rate half diverged is no best one

    def mean_loss(rate: float) -> float:
        losses = [r["validation"]["loss"] for r in finished if r["lr"] == rate]
        return float(sum(losses) / len(losses))

    rate = min(lrs, key=mean_loss) if lr is None else lr
    for result in finished:
        if result["lr"] == rate and (seed is None or result["seed"] == seed):
            return result
    there = ", ".join(f"lr {r['lr']:g} seed {r['seed']}" for r in finished)
    raise RetrofitError(f"arm {arm} has no finished run with lr {rate:g} and seed {seed}; there are: {there}")


def _noise(preprocess: Preprocess) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_PROOF_IMAGES, 3, preprocess.image_size, preprocess.image_size, generator=generator)
