"""Proof that an exported folder computes what the model computed when it was written.

The folder carries a few images and what the model said of them; verifying loads the folder and compares.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import retrofit
from retrofit.checkpoint import MANIFEST, file_hash, load, read_manifest, seal
from retrofit.errors import CheckpointError, RetrofitError
from retrofit.models import evaluating, family_of, sites_of
from retrofit.surgery import spec_of

FIXTURE = "fixture.safetensors"
TOLERANCE = 1e-5
"""Largest difference of an output, relative to the largest output where that exceeds 1."""


@dataclass(frozen=True)
class Proof:
    """What `verify` found."""

    ok: bool
    findings: list[str]
    """What was checked, or what is wrong; a line each."""


def write_fixture(model: nn.Module, images: Tensor, folder: Path) -> None:
    """Images [B, 3, H, W] and the model's outputs on them, computed here and now."""
    with evaluating(model):
        expected = _said(model, images)
    tensors = {"images": images.contiguous(), "outputs": expected.contiguous()}
    safetensors.torch.save_file(tensors, folder / FIXTURE, metadata={"format": "pt"})


def verify(folder: Path) -> Proof:
    """Checks every file's hash, that the norms are there, and that the outputs are those of the fixture.

    Raises CheckpointError for a folder that retrofit did not write.
    """
    manifest = read_manifest(folder)
    wrong = [] if manifest["seal"] == seal(manifest) else [f"{MANIFEST} has been changed since it was written"]
    for name, digest in manifest["files"].items():
        if not (folder / name).is_file():
            wrong.append(f"{name} is missing")
        elif file_hash(folder / name) != digest:
            wrong.append(f"{name} is not the file that was written: its hash differs")
    if FIXTURE not in manifest["files"]:
        wrong.append(f"there is no {FIXTURE} to prove the outputs with; `retrofit export` writes one")
    if wrong:
        return Proof(False, wrong)
    try:
        model = load(folder)
        fixture = safetensors.torch.load_file(folder / FIXTURE)
        with evaluating(model):
            difference = _difference(_said(model, fixture["images"]), fixture["outputs"])
    except (RetrofitError, SafetensorError, KeyError, RuntimeError) as error:
        return Proof(False, [str(error)])
    placed = sum(site.norms is not None for site in sites_of(model)[0])
    spec = spec_of(model)
    norms = f"{placed} attention layers with QK-Norm ({spec.describe()})" if spec else "no QK-Norm, as written"
    within = difference <= TOLERANCE
    images = len(fixture["images"])
    return Proof(
        within,
        [
            f"{len(manifest['files'])} files are those that were written",
            norms,
            f"outputs on {images} images differ by {difference:.1e}; {TOLERANCE:.0e} is allowed",
        ],
    )


def prove_in_fresh_process(folder: Path) -> Proof:
    """`retrofit verify`, by a new interpreter."""
    here = str(Path(retrofit.__file__).parents[1])  # the same code there as here, installed or not
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "retrofit", "verify", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    findings = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return Proof(done.returncode == 0, findings)


def _said(model: nn.Module, images: Tensor) -> Tensor:
    """Logits, or the final tokens of a model without a head, in float32."""
    family = family_of(model)
    like = next(p for p in model.parameters() if p.is_floating_point())
    batch = images.to(device=like.device, dtype=like.dtype)
    out = family.logits(model, batch)
    out = family.tokens(model, batch) if out is None else out
    if out is None:
        raise CheckpointError(f"{type(model).__name__} gives neither logits nor tokens to prove it by")
    return out.float().cpu()


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest expected value where that exceeds 1."""
    if a.shape != b.shape or not torch.isfinite(a).all():
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp_min(1.0))
