"""The model card that goes with an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

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
    base = about.get("base", "an unnamed checkpoint")
    title = f"# {base} with QK-Norm" if spec else f"# {base}, fine-tuned"
    lines = [title, "", *_origin(about, family.library), *_made(model, about), *_results(about, spec is not None)]
    preprocess = family.preprocess(model)
    lines += [
        f"- input: {preprocess.image_size} x {preprocess.image_size}, mean {_figures(preprocess.mean)}, "
        f"std {_figures(preprocess.std)}, {preprocess.interpolation}, crop {preprocess.crop_pct:g}",
        f"- weights: {asked['dtype']}",
        "",
        "## Loading",
        "",
        *_loading(to, loader, spec is not None, asked),
        "",
        "`retrofit verify` on this folder repeats the proof that it computes what it did when it was written.",
        "",
        "## Limits",
        "",
        *_limits(about, spec is not None),
        "",
    ]
    return "\n".join(lines)


def _origin(about: Mapping[str, Any], library: str) -> list[str]:
    base = about.get("base", "an unnamed checkpoint")
    digest = about.get("base_sha256")
    return [f"- base: {base} ({library}{f', weights {digest[:16]}' if digest else ''})"]


def _made(model: nn.Module, about: Mapping[str, Any]) -> list[str]:
    """Formula, calibration and training."""
    spec, lines = spec_of(model), []
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
            f"(95 % interval {spread['low']:.2f} to {spread['high']:.2f})"
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


def _loading(to: str, loader: str, normed: bool, asked: Mapping[str, Any]) -> list[str]:
    if loader == "onnxruntime":
        said = "`pixel_values` is [B, 3, H, W], preprocessed as above; class names are in the metadata, `labels`."
        code = ['session = onnxruntime.InferenceSession("model.onnx")']
        code += [f'({_output(asked)},) = session.run(None, {{"pixel_values": images}})']
        return [said, "", *_python("import onnxruntime", *code)]
    if loader == "timm":
        return _python("import timm", 'model = timm.create_model("local-dir:this folder", pretrained=True)')
    if loader == "transformers":
        auto = "AutoModelForImageClassification" if asked["classifies"] else "AutoModel"
        trust = ", trust_remote_code=True" if normed else ""
        code = [f'model = {auto}.from_pretrained("this folder"{trust})']
        code += ['processor = AutoImageProcessor.from_pretrained("this folder")']
        call = ", ".join(f"{k}={v}" for k, v in asked["call"].items())
        code += [f'{_output(asked)} = model(**processor(image, return_tensors="pt"), {call})'] if call else []
        lines = _python(f"from transformers import AutoImageProcessor, {auto}", *code)
        if normed:
            lines += ["", "It needs the modeling file in this folder, which is why transformers asks for your trust."]
            lines += ["Without it transformers refuses the folder, rather than leave the norm out."]
        return lines
    refusing = "timm cannot express this model, and refuses this folder." if to == "timm" else ""
    refusing = refusing or "Other loaders refuse this folder, since they would leave the norm out."
    return [f"{refusing} To load it:", "", *_python("import retrofit", 'model = retrofit.load("this folder")')]


def _limits(about: Mapping[str, Any], normed: bool) -> list[str]:
    lines = ["- Figures hold for the images above; others were not measured."] if about.get("test") else []
    if normed:
        lines += ["- Without its norms, or with another eps, these weights compute something else."]
        lines += [
            "- In fine-tuning, query and key weights under a norm no longer scale the logits: learning rate and weight "
            "decay mean something else for them than in the original."
        ]
    return lines or ["- Nothing was measured yet."]


def _python(imports: str, *code: str) -> list[str]:
    return ["```python", imports, "", *code, "```"]


def _output(asked: Mapping[str, Any]) -> str:
    return "logits" if asked["classifies"] else "tokens"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _figures(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{v:g}" for v in values) + ")"
