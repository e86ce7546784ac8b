"""The model card that goes with an export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from retrofit.checkpoint import versions
from retrofit.models import family_of
from retrofit.surgery import spec_of

_SHOCK = "cosine of final patch tokens with the original's"


def model_card(model: nn.Module, about: Mapping[str, Any], to: str, loader: str, asked: Mapping[str, Any]) -> str:
    """README.md of an exported folder, from what is known and no more.

    Args:
        to: the target; loader: the library that loads the folder.
        asked: how the model was asked for the outputs of the proof, as `write_fixture` returns it.
    """
    spec, family = spec_of(model), family_of(model)
    title = f"# {_base(about)} with QK-Norm" if spec else f"# {_base(about)}, fine-tuned"
    lines = [
        *_front_matter(about, loader, asked),
        title,
        "",
        *_origin(about, family.library),
        *_made(model, about),
        *_results(about, spec is not None),
    ]
    preprocess = family.preprocess(model)
    lines += [
        f"- input: {preprocess.image_size} x {preprocess.image_size}, mean {_figures(preprocess.mean)}, "
        f"std {_figures(preprocess.std)}, {preprocess.interpolation}, crop {preprocess.crop_pct:g}",
        f"- weights: {asked['dtype']}",
        f"- written with {', '.join(f'{name} {version}' for name, version in versions().items())}",
        "",
        "## Loading",
        "",
        *_loading(to, loader, spec is not None, asked, bool(family.labels(model))),
        "",
        "`retrofit verify` on this folder repeats the proof that it computes what it did when it was written.",
        "",
        "## Limits",
        "",
        *_limits(about, spec is not None),
        "",
    ]
    return "\n".join(lines)


def _front_matter(about: Mapping[str, Any], loader: str, asked: Mapping[str, Any]) -> list[str]:
    """What the Hugging Face hub reads of a card."""
    library = "onnx" if loader == "onnxruntime" else loader
    task = "image-classification" if asked["classifies"] else "image-feature-extraction"
    source = str(about.get("base", ""))
    hub_id = source.removeprefix("hf/") if source.startswith("hf/") else source if source.startswith("timm/") else None
    named = [f"base_model: {json.dumps(hub_id)}"] if hub_id else []
    return ["---", f"library_name: {library}", f"pipeline_tag: {task}", "tags: [qk-norm]", *named, "---", ""]


def _base(about: Mapping[str, Any]) -> str:
    return _named(str(about.get("base", "an unnamed checkpoint")))


def _named(source: str) -> str:
    """What a base or a data set is called; of a local one without the way there."""
    if source.startswith(("timm/", "hf/")):
        return source
    return Path(source.removeprefix("timm:").removeprefix("hf:")).name or source


def _origin(about: Mapping[str, Any], library: str) -> list[str]:
    digest = about.get("base_sha256")
    return [f"- base: {_base(about)} ({library}{f', weights {digest[:16]}' if digest else ''})"]


def _made(model: nn.Module, about: Mapping[str, Any]) -> list[str]:
    """Formula, calibration and training."""
    spec, lines = spec_of(model), []
    if spec:
        lines += [f"- QK-Norm: {spec.describe()}"]
    of = f"of {_named(about['data'])} " if about.get("data") else ""
    if "init" in about and about.get("calibration_images"):
        lines += [f"- start: `{about['init']}`, calibrated on {about['calibration_images']} images {of}without labels"]
    for init, shock in (about.get("shock") or {}).items():
        cosine = (shock.get("cosine_tokens") or {}).get("patch")
        if cosine is not None:
            lines += [f"- before training, start `{init}`: {_SHOCK} {cosine:.3f} on {shock['images']} held-out images"]
    if "lr" in about:
        run = f"arm {about['arm']}, learning rate {about['lr']:g}, seed {about['seed']}, {about['precision']}"
        lines += [f"- fine-tuned on {_named(about['data'])}: {run}, {about['steps']} steps"]
        told = {k: v for k, v in (about.get("recipe") or {}).items() if v not in (None, False, [], {}, "")}
        lines += [f"- recipe: {', '.join(f'{k} {_shown(v)}' for k, v in told.items())}"] if told else []
    if about.get("ema"):
        lines += [f"- weights are their moving average (decay {about['ema']:g})"]
    return lines


def _results(about: Mapping[str, Any], normed: bool) -> list[str]:
    lines, spread = [], about.get("spread") or {}
    alone = "; one run, so that no spread is known from it" if spread.get("low") is None else "; this run"
    for split in ("validation", "test"):
        result = about.get(split)
        if result:
            lines += [
                f"- {split}: accuracy {100 * result['accuracy']:.2f} %, loss {result['loss']:.4f}, "
                f"{result['images']} images{alone}"
            ]
    if spread.get("low") is not None:
        lines += [
            f"- test over {spread['seeds']} seeds: accuracy {spread['mean']:.2f} % "
            f"(95 % interval {max(spread['low'], 0.0):.2f} to {min(spread['high'], 100.0):.2f})"
        ]
    difference = spread.get("difference") or {}
    if difference.get("low") is not None:
        lines += [
            f"- against the original, fine-tuned alike, {difference['n']} pairs of the same seed: "
            f"{difference['mean']:+.2f} points (95 % interval {difference['low']:+.2f} to {difference['high']:+.2f})"
        ]
    elif difference.get("n"):
        lines += [
            f"- against the original, fine-tuned alike, {difference['n']} pairs: {difference['mean']:+.2f} points; "
            "an interval needs more pairs that differ"
        ]
    if not about.get("test"):
        untrained = "- not fine-tuned since the norm went in: do that before you judge it"
        lines += [untrained if normed else "- not evaluated"]
    return lines


def _loading(to: str, loader: str, normed: bool, asked: Mapping[str, Any], labelled: bool) -> list[str]:
    if loader == "onnxruntime":
        said = "`pixel_values` is [B, 3, H, W], preprocessed as above; class names are in the metadata, `labels`."
        code = ['session = onnxruntime.InferenceSession("model.onnx")']
        code += [f'({_output(asked)},) = session.run(None, {{"pixel_values": images}})']
        return [said, "", *_python(["import onnxruntime"], *code)]
    if loader == "timm":
        code = ['model = timm.create_model("local-dir:this folder", pretrained=True).eval()']
        code += ["transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))"]
        call = "model" if asked["classifies"] else "model.forward_features"
        code += [f'{_output(asked)} = {call}(transform(Image.open("image.jpg").convert("RGB")).unsqueeze(0))']
        code += ['print(model.pretrained_cfg["label_names"][logits.argmax()])'] if labelled else []
        return _python(["import timm", "from PIL import Image"], *code)
    if loader == "transformers":
        auto = "AutoModelForImageClassification" if asked["classifies"] else "AutoModel"
        trust = ", trust_remote_code=True" if normed else ""
        call = ", ".join(["**inputs", *(f"{k}={v}" for k, v in asked["call"].items())])
        lines = _python(
            ["from PIL import Image", f"from transformers import AutoImageProcessor, {auto}"],
            'processor = AutoImageProcessor.from_pretrained("this folder")',
            f'model = {auto}.from_pretrained("this folder"{trust})',
            'inputs = processor(Image.open("image.jpg"), return_tensors="pt").to(model.dtype)',
            f"{_output(asked)} = model({call}).{'logits' if asked['classifies'] else 'last_hidden_state'}",
            *(["print(model.config.id2label[int(logits.argmax())])"] if labelled else []),
        )
        if normed:
            lines += ["", "It needs the modeling file in this folder, which is why transformers asks for your trust."]
            lines += ["Without it transformers refuses the folder, rather than leave the norm out."]
        return lines
    refusing = "timm cannot express this model, and refuses this folder." if to == "timm" else ""
    refusing = refusing or "Other loaders refuse this folder, since they would leave the norm out."
    return [f"{refusing} To load it:", "", *_python(["import retrofit"], 'model = retrofit.load("this folder")')]


def _limits(about: Mapping[str, Any], normed: bool) -> list[str]:
    lines = ["- Figures hold for the images above; others were not measured."] if about.get("test") else []
    if normed:
        lines += ["- Without its norms, or with another eps, these weights compute something else."]
        lines += [
            "- In fine-tuning, query and key weights under a norm no longer scale the logits: learning rate and weight "
            "decay mean something else for them than in the original."
        ]
    return lines or ["- Nothing was measured yet."]


def _python(imports: list[str], *code: str) -> list[str]:
    return ["```python", *imports, "", *code, "```"]


def _output(asked: Mapping[str, Any]) -> str:
    return "logits" if asked["classifies"] else "features"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _figures(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{v:g}" for v in values) + ")"
