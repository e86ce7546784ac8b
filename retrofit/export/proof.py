"""Proof that an exported folder computes what the model computed when it was written.

The folder carries a few images and what the model said of them; verifying loads the folder with the library that it is
for, in a process in which this package cannot be imported, and compares.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import retrofit
from retrofit.checkpoint import MANIFEST, blank, file_hash, load, read_manifest, seal
from retrofit.errors import CheckpointError, RetrofitError
from retrofit.export.modeling import Wrapped, modeling_source
from retrofit.export.to_hf import in_transformers
from retrofit.models import evaluating, family_of, sites_of
from retrofit.qknorm import QKNorm
from retrofit.runfiles import read_json
from retrofit.surgery import spec_of

FIXTURE = "fixture.safetensors"
TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest difference of an output, relative to the largest output where that exceeds 1, by the weights' dtype."""
SAME = {"timm": ("timm", "transformers"), "onnxruntime": ("onnxruntime",)}
"""Who loads a folder and computes the same, by the `loader` that its manifest names. See reload.py."""
FEATURES = "transformers_features"
REFUSED = {
    "retrofit": ("timm", "timm_file", "transformers", "transformers_trusting", "transformers_class"),
    "transformers": ("timm", "transformers", "transformers_class"),
    "onnxruntime": ("timm", "transformers", "transformers_trusting", "transformers_class"),
    "timm": ("timm_file",),
}
"""Who would leave the norm out, and must refuse it."""


@dataclass(frozen=True)
class Proof:
    """What `verify` found."""

    ok: bool
    findings: list[str]
    """What was checked, or what is wrong; a line each."""


def write_fixture(model: nn.Module, images: Tensor, folder: Path) -> dict[str, Any]:
    """Images [B, 3, H, W] and the model's outputs and features on them; returns how the model was asked."""
    family = family_of(model)
    with evaluating(model):
        expected = _said(model, images)
        features = family.features(model, images.to(_like(model)))
    tensors = {"images": images.contiguous(), "outputs": expected.contiguous()}
    tensors |= {} if features is None else {"features": features.float().cpu().contiguous()}
    safetensors.torch.save_file(tensors, folder / FIXTURE, metadata={"format": "pt"})
    return {
        "classifies": family.head(model) is not None,
        "dtype": str(_like(model).dtype).removeprefix("torch."),
        "call": family.call(model, images),
    }


def verify(folder: Path) -> Proof:
    """Checks every file's hash, that the norms are there, and that the outputs are those of the fixture.

    Code that lies in the folder is run only where it is, byte for byte, what this version would write for the model.
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
    files = f"{len(manifest['files'])} files are those that were written"
    try:
        ours = manifest["loader"] == "retrofit"
        findings = _by_retrofit(folder, manifest) if ours else _by_others(folder, manifest)
    except (RetrofitError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        return Proof(False, [str(error)])
    return Proof(True, [files, *findings])


def prove_in_fresh_process(folder: Path) -> Proof:
    """`retrofit verify`, by a new interpreter; for another library's loader it starts one of its own."""
    if read_manifest(folder)["loader"] != "retrofit":
        return verify(folder)
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


def reloaded(folders: Sequence[Path], loaders: Sequence[str], code: Collection[str]) -> list[dict[str, Any]]:
    """What each loader makes of each folder, by one new process: `refused` with the reason, or `difference` from the
    fixture's outputs, `labels` and `norms`.

    Args:
        code: the text of every modeling file that may run. Where a loader would run another, the process ends.

    Raises CheckpointError where the process itself fails.
    """
    script = (Path(__file__).parent / "reload.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        job: dict[str, Any] = {"folders": [str(f.resolve()) for f in folders], "loaders": list(loaders)}
        job["out"] = str(Path(scratch).resolve())
        job["code"] = [sha256(text.encode()).hexdigest() for text in code]
        done = subprocess.run(
            [sys.executable, "-c", script, json.dumps(job)],
            capture_output=True,
            text=True,
            check=False,
            cwd=scratch,
            stdin=subprocess.DEVNULL,  # transformers would ask whether it may run code
            env={**os.environ, "HF_MODULES_CACHE": job["out"], "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode != 0:
            raise CheckpointError(f"the process that loads it ended with {' '.join(done.stderr.split())[-300:]}")
        tried: list[dict[str, Any]] = json.loads(Path(scratch, "tried.json").read_text(encoding="utf-8"))
        for one in tried:
            if "outputs" in one:
                said = safetensors.torch.load_file(one.pop("outputs"))["outputs"]
                fixture = safetensors.torch.load_file(Path(one["folder"]) / FIXTURE)
                expected = fixture.get("features" if one["loader"] == FEATURES else "outputs")
                if expected is None:
                    one["refused"] = "the fixture holds no features to compare with"
                else:
                    one["difference"] = _difference(said, expected)
    return tried


def _by_retrofit(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Raises RetrofitError where the folder does not compute what it should."""
    model = load(folder)
    fixture = safetensors.torch.load_file(folder / FIXTURE)
    with evaluating(model):
        difference = _difference(_said(model, fixture["images"]), fixture["outputs"])
    placed = sum(site.norms is not None for site in sites_of(model)[0])
    findings = [_norms(placed, spec_of(model)), _within(difference, manifest, len(fixture["images"]), "")]
    if manifest["target"] == "timm":
        refused = REFUSED["retrofit"]
        for one in reloaded([folder], refused, _known_code(folder, manifest)):
            _check_refused(one)
        findings.append(_refused(refused))
    return findings


def _by_others(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Raises RetrofitError where a library that should does not load the folder as what it is, or one that should not
    does."""
    spec = None if manifest["qk_norm"] is None else QKNorm(**manifest["qk_norm"])
    same = SAME.get(manifest["loader"]) or (("transformers",) if spec is None else ("transformers_trusting",))
    refused = REFUSED[manifest["loader"]] if spec is not None and manifest["loader"] != "timm" else ()
    code = _known_code(folder, manifest)
    fixture = safetensors.torch.load_file(folder / FIXTURE)
    images = len(fixture["images"])
    if manifest["loader"] == "transformers" and "features" in fixture:
        same = (*same, FEATURES)
    findings = [_norms(len(manifest["sites"]), spec)]
    for one in reloaded([folder], [*same, *refused], code):
        name = one["loader"].replace("_", " ")
        if one["loader"] in refused:
            _check_refused(one)
            continue
        if "refused" in one:
            raise CheckpointError(f"{name} cannot load {folder}: {one['refused']}")
        if one["norms"] != len(manifest["sites"]):
            raise CheckpointError(f"{name} finds {one['norms']} attention layers with QK-Norm in {folder}")
        if manifest["labels"] and one["labels"] != manifest["labels"] and one["loader"] != FEATURES:
            raise CheckpointError(f"{name} reads other class names than were written: {one['labels'][:5]}")
        findings.append(_within(one["difference"], manifest, images, f" in {name}"))
    if refused:
        findings.append(_refused(refused))
    return findings


def _check_refused(one: Mapping[str, Any]) -> None:
    if "refused" not in one:
        raise CheckpointError(f"{one['loader'].replace('_', ' ')} loads {one['folder']}, and leaves out the norm")


def _refused(loaders: Sequence[str]) -> str:
    return f"refused by {', '.join(name.replace('_', ' ') for name in loaders)}, as it should be"


def _known_code(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """The modeling file's text where the model needs one: the only code in a folder that may run.

    Raises CheckpointError for Python that this version would not write, and where config.json leads elsewhere.
    """
    expected: dict[str, str] = {}
    leads: dict[str, Any] = {"auto_map": None, "configuration_files": None}
    to = "the library's own classes alone"
    if manifest["loader"] == "transformers" and manifest["qk_norm"] is not None:
        model = in_transformers(blank(manifest))
        wrapped = Wrapped.of(model)
        expected = {f"{wrapped.module}.py": modeling_source(model)}
        leads |= {"model_type": wrapped.model_type, "auto_map": wrapped.auto_map}
        to = f"{wrapped.model_type} and its own classes"
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    if not isinstance(config, dict) or {key: config.get(key) for key in leads} != leads:
        raise CheckpointError(f"{path} does not name {to}")
    code = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    if code != expected:
        raise CheckpointError(
            f"{', '.join(sorted(code)) or 'no modeling file'} is not what retrofit writes for this model with the "
            f"libraries installed here, and is not run (written with {manifest.get('versions')})"
        )
    return list(expected.values())


def _norms(placed: int, spec: QKNorm | None) -> str:
    return f"{placed} attention layers with QK-Norm ({spec.describe()})" if spec else "no QK-Norm, as written"


def _within(difference: float, manifest: Mapping[str, Any], images: int, where: str) -> str:
    """The finding. Raises CheckpointError where the difference is too large."""
    allowed = TOLERANCES[manifest["dtype"]]
    told = f"outputs on {images} images{where} differ by {difference:.1e}; {allowed:.0e} is allowed"
    if not difference <= allowed:
        raise CheckpointError(told)
    return told


def _said(model: nn.Module, images: Tensor) -> Tensor:
    """Logits, or the features of a model without a head, in float32."""
    family = family_of(model)
    batch = images.to(_like(model))
    out = family.logits(model, batch)
    out = family.features(model, batch) if out is None else out
    if out is None:
        raise CheckpointError(f"{type(model).__name__} gives neither logits nor features to prove it by")
    return out.float().cpu()


def _like(model: nn.Module) -> Tensor:
    """A weight, whose device and dtype images take."""
    return next(p for p in model.parameters() if p.is_floating_point())


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest expected value where that exceeds 1."""
    if a.shape != b.shape or not torch.isfinite(a).all():
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp_min(1.0))
