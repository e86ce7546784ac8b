"""Writes a model for one target, and proves it before it is announced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from retrofit.checkpoint import saving, write_manifest, write_model
from retrofit.data import eval_batches, open_images
from retrofit.errors import CheckpointError, RetrofitError
from retrofit.export.card import model_card
from retrofit.export.proof import prove_in_fresh_process, write_fixture
from retrofit.export.to_hf import write_hf
from retrofit.export.to_onnx import check_onnx, write_onnx
from retrofit.export.to_timm import write_timm
from retrofit.models import family_of, unwrapped
from retrofit.models.preprocess import Preprocess
from retrofit.norms import end_ramp, ramp_of
from retrofit.runfiles import write_text

Target = Literal["retrofit", "timm", "hf", "onnx"]
_WRITERS: dict[Target, Callable[[nn.Module, Path, Tensor], tuple[str, list[str]]]] = {
    "retrofit": lambda *_: ("retrofit", []),
    "timm": write_timm,
    "hf": write_hf,
    "onnx": write_onnx,
}
"""From a model, a folder and a few images to the library that loads the folder (a loader of reload.py), and what the
user should know. To add a target, write one in a file of its own and list it here."""
_PROOF_IMAGES = 4


def export_model(
    model: nn.Module,
    folder: Path,
    *,
    about: Mapping[str, Any],
    images: Tensor | None = None,
    to: Target = "retrofit",
    dtype: torch.dtype | None = None,
    finish_ramp: bool = False,
    force: bool = False,
) -> list[str]:
    """Writes a model as a folder, proves it in a fresh process, and returns what the proof found, with how to load it.

    Args:
        about: where the model comes from, as retrofit.json and the model card tell it.
        images: preprocessed [B, 3, H, W] for the proof; of the embedded set where None.
        to: whose layout. `timm` where timm cannot express the model is a folder that timm refuses and retrofit.load
            reads; what stands in the way is among the findings.
        dtype: of the weights, norms included; None keeps the model's. The model itself is converted.
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
    if dtype is not None:
        model.to(dtype)
    findings = write_export(model, folder, about=about, images=images, to=to, force=force)
    proof = prove_in_fresh_process(folder)
    if not proof.ok:
        raise CheckpointError(f"the export in {folder} is not sound: {'; '.join(proof.findings)}")
    return [*findings, *proof.findings]


def write_export(
    model: nn.Module,
    folder: Path,
    *,
    about: Mapping[str, Any],
    images: Tensor | None = None,
    to: Target = "retrofit",
    force: bool = False,
) -> list[str]:
    """`export_model` without the proof."""
    model = unwrapped(model)
    check_target(to, next(p.dtype for p in model.parameters() if p.is_floating_point()))
    sample = _images(family_of(model).preprocess(model)) if images is None else images
    with saving(folder, force=force) as scratch:
        findings = _write(model, scratch, to, about, sample[:_PROOF_IMAGES])
    return [line.replace(str(scratch), str(folder)) for line in findings]


def check_target(to: str, dtype: torch.dtype = torch.float32) -> None:
    """Raises RetrofitError for a target that is none, or that cannot be written or proven here."""
    if to not in get_args(Target):
        raise RetrofitError(f"to={to!r} is not one of {', '.join(get_args(Target))}")
    if to == "onnx":
        check_onnx(dtype)


def _write(model: nn.Module, folder: Path, to: Target, about: Mapping[str, Any], images: Tensor) -> list[str]:
    """Everything that the folder holds; returns what the user should know of it."""
    said = write_fixture(model, images, folder)
    loader, findings = _WRITERS[to](model, folder, images)
    more = {"target": to, **said}
    write_text(folder / "README.md", model_card(model, about, to, loader, said))
    if loader == "retrofit":
        write_model(model, folder, about=about, **more)
    else:
        write_manifest(model, folder, about=about, loader=loader, **more)
    return findings


def _images(preprocess: Preprocess) -> Tensor:
    return next(eval_batches(open_images("nano", _PROOF_IMAGES), preprocess, _PROOF_IMAGES)).pixels
