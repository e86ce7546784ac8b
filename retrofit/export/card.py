"""The model card that goes with an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from retrofit.models import family_of
from retrofit.surgery import spec_of

_SHOCK = "cosine of final patch tokens with the original's"


def model_card(model: nn.Module, about: Mapping[str, Any]) -> str:
    """README.md of an exported folder, from what is known and no more."""
    spec, family = spec_of(model), family_of(model)
    preprocess = family.preprocess(model)
    base = about.get("base", "an unnamed checkpoint")
    lines = [f"# {base} with QK-Norm" if spec else f"# {base}, fine-tuned", ""]
    lines += [f"- base: {base} ({family.library})"]
    if spec:
        lines += [f"- QK-Norm: {spec.describe()}"]
    if "init" in about and about.get("calibration_images"):
        lines += [f"- start: `{about['init']}`, calibrated on {about['calibration_images']} images without labels"]
    for init, shock in (about.get("shock") or {}).items():
        cosine = (shock.get("cosine_tokens") or {}).get("patch")
        if cosine is not None:
            lines += [f"- before training, start `{init}`: {_SHOCK} {cosine:.3f} on {shock['images']} held-out images"]
    if "lr" in about:
        run = f"arm {about['arm']}, learning rate {about['lr']:g}, seed {about['seed']}, {about['precision']}"
        lines += [f"- fine-tuned on {about['data']}: {run}, {about['steps']} steps"]
    for split in ("validation", "test"):
        result = about.get(split)
        if result:
            lines += [
                f"- {split}: accuracy {100 * result['accuracy']:.2f} %, loss {result['loss']:.4f}, "
                f"{result['images']} images; one run, so that no spread is known from it"
            ]
    if not about.get("test"):
        lines += ["- not fine-tuned since the norm went in: do that before you judge it" if spec else "- not evaluated"]
    lines += [
        f"- input: {preprocess.image_size} x {preprocess.image_size}, mean {_figures(preprocess.mean)}, "
        f"std {_figures(preprocess.std)}, {preprocess.interpolation}, crop {preprocess.crop_pct:g}",
        "",
        "Other loaders refuse this folder, since they would leave the norm out. To load it:",
        "",
        "```python",
        "import retrofit",
        "",
        'model = retrofit.load("this folder")',
        "```",
        "",
        "`retrofit verify` on this folder repeats the proof that it computes what it did when it was written.",
        "",
    ]
    return "\n".join(lines)


def _figures(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{v:g}" for v in values) + ")"
