"""The target `timm`: timm's own layout where timm can express the model, else a folder that timm refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from timm.layers import RmsNorm
from timm.models import save_for_hf
from torch import Tensor, nn

from retrofit.checkpoint import plain_tensors
from retrofit.models import Site, family_of, own_random_state, sites_of
from retrofit.norms import HeadNorm
from retrofit.runfiles import read_json, write_json
from retrofit.surgery import spec_of

REFUSED = "qknorm_"
"""Before the name of an architecture that timm does not have."""


def write_timm(model: nn.Module, folder: Path, images: Tensor) -> tuple[str, list[str]]:
    """A folder for timm, or one for retrofit.load with what stands in timm's way."""
    native, obstacles = native_timm(model)
    if native is not None:
        _write_native(native, folder, list(family_of(model).labels(model)))
        return "timm", []
    _write_refused(model, folder)
    settings = native_settings(model)
    native_with = f"; native would be: {settings}" if settings else ""
    return "retrofit", [
        f"timm cannot express this model: {'; '.join(obstacles)}{native_with}",
        f'timm refuses the folder; retrofit.load("{folder}") loads it',
    ]


def native_timm(model: nn.Module) -> tuple[nn.Module | None, list[str]]:
    """The same model as timm itself builds it, and what stands in the way where there is none.

    With QK-Norm that is timm's `qk_norm=True`: the norm of the model's blocks over each head, its gain and bias shared
    by the heads, in every block. A shift is folded into the bias of the projection, a scalar scale into the gain of q.
    """
    inner: Any = getattr(model, "timm_model", model)
    family = family_of(inner)
    if family.library != "timm":
        return None, ["it is a model of transformers, which timm does not have; export it with --to hf"]
    spec, told = spec_of(model), family.config(inner)
    if spec is None:
        return inner, []
    try:
        with own_random_state(0):
            native: Any = timm.create_model(
                told["architecture"], num_classes=told["num_classes"], **told["model_args"], qk_norm=True
            )
    except (TypeError, AssertionError, RuntimeError) as error:
        return None, [f"timm's {told['architecture']} takes no qk_norm ({str(error).splitlines()[0]})"]
    slots = {name: norm for name, norm in native.named_modules() if name.endswith(".q_norm")}
    slots = {name.removesuffix(".q_norm"): norm for name, norm in slots.items() if not isinstance(norm, nn.Identity)}
    sites = {site.name: site for site in sites_of(inner)[0] if site.norms is not None}
    obstacles = _obstacles(sites, slots)
    if obstacles:
        return None, obstacles
    state = inner.state_dict()
    for name, site in sites.items():
        for key in [k for k in state if k.startswith((f"{name}.q_norm.", f"{name}.k_norm."))]:
            del state[key]
        assert site.norms is not None
        for slot, norm in zip(("q_norm", "k_norm"), site.norms, strict=True):
            for key, value in _native(norm, slots[name]).items():
                state[f"{name}.{slot}.{key}"] = value.to(site.weight.dtype)
            bias = _bias(site, slot)
            if norm.shift is not None and norm.shift.any():
                assert bias is not None
                key, rows = bias
                state[key] = state[key].clone()
                state[key][rows] -= norm.shift.detach()
    native.load_state_dict(plain_tensors(state), strict=True, assign=True)
    native._model_args = {**told["model_args"], "qk_norm": True}
    native.pretrained_cfg = dict(inner.pretrained_cfg)
    family.set_preprocess(native, family.preprocess(inner))
    return native.eval(), []


def _write_native(native: Any, folder: Path, labels: list[str]) -> None:
    """config.json and model.safetensors, as timm's own hub folders have them."""
    args = {k: v for k, v in native._model_args.items() if k != "num_classes"}
    more = {"label_names": labels} if labels else {}
    save_for_hf(native, str(folder), model_config={"model_args": args, **more}, safe_serialization=True)
    safetensors.torch.save_file(
        plain_tensors(native.state_dict()), folder / "model.safetensors", metadata={"format": "pt"}
    )
    config = read_json(folder / "config.json")
    config.get("model_args", {}).pop("num_classes", None)  # transformers' wrapper would pass it twice
    write_json(folder / "config.json", config)


def _write_refused(model: nn.Module, folder: Path) -> None:
    """config.json with the name of an architecture that timm does not have, so that stock loaders refuse the folder."""
    inner = getattr(model, "timm_model", model)
    family = family_of(inner)
    told = family.config(inner)
    config = {
        "architecture": REFUSED + str(told.get("architecture", told.get("config", {}).get("model_type"))),
        "num_classes": len(family.labels(inner)) or told.get("num_classes", 0),
        "pretrained_cfg": told.get("pretrained_cfg", {}),
    }
    write_json(folder / "config.json", json.loads(json.dumps(config)))


def native_settings(model: nn.Module) -> str | None:
    """Which formula timm could express in this model, as `apply` takes it; None where there is none."""
    inner = getattr(model, "timm_model", model)
    if family_of(inner).library != "timm":
        return None
    told = family_of(inner).config(inner)
    try:
        with own_random_state(0), torch.device("meta"):
            native = timm.create_model(told["architecture"], **{**told["model_args"], "qk_norm": True})
    except (TypeError, AssertionError, RuntimeError, NotImplementedError):
        return None
    norms = (m for name, m in native.named_modules() if name.endswith(".q_norm"))
    norm = next((m for m in norms if isinstance(m, nn.LayerNorm | RmsNorm)), None)
    if norm is None:
        return None
    kind = "--preset timm" if isinstance(norm, nn.LayerNorm) else "--preset qwen3"
    return f"{kind} eps={norm.eps:g}"


def _obstacles(sites: dict[str, Site], slots: dict[str, nn.Module]) -> list[str]:
    """What timm's own norms cannot express of these."""
    found: dict[str, None] = {}  # ordered, each once
    if sites.keys() != slots.keys():
        beyond = sorted(sites.keys() ^ slots.keys())
        found[f"timm norms all blocks and no pools, this model others ({beyond[0]}, …)"] = None
    for name in sorted(sites.keys() & slots.keys()):
        site, slot = sites[name], slots[name]
        assert site.norms is not None
        spec = site.norms[0].spec
        kind = "layernorm" if isinstance(slot, nn.LayerNorm) else "rms" if isinstance(slot, RmsNorm) else None
        if kind is None:
            found[f"timm's own norm here is {type(slot).__name__}, which is no formula of QKNorm"] = None
            continue
        if spec.norm != kind:
            found[f"norm={spec.norm}: timm's own norm here is {kind}"] = None
        eps = float(getattr(slot, "eps", 0.0))
        if spec.eps != eps:
            found[f"eps={spec.eps:g}: timm's own norm here has {eps:g}"] = None
        if spec.axis != "head":
            found[f"axis={spec.axis}: timm norms each head"] = None
        if spec.gain == "per_head" and spec.axis == "head":
            found["gain=per_head: timm's heads share one gain"] = None
        if spec.scale == "learned_per_head":
            found["scale=learned_per_head: timm's heads share one gain, which holds no scale a head"] = None
        if spec.bias and kind == "rms":
            found["bias=True: timm's RMS norm has none"] = None
        if site.rotated and spec.position == "after_rope":
            found["position=after_rope: timm norms before RoPE"] = None
        for slot_name, norm in zip(("q_norm", "k_norm"), site.norms, strict=True):
            if norm.shift is not None and norm.shift.any() and _bias(site, slot_name) is None:
                found[f"the shift: {type(site.module).__name__} has no bias of its own to fold it into"] = None
    return list(found)


def _native(norm: HeadNorm, slot: nn.Module) -> dict[str, Tensor]:
    """weight and bias of timm's norm that do what `norm` does to x - shift."""
    with torch.no_grad():
        weight = norm.gain.detach().to(slot.weight.device)  # type: ignore[arg-type]
        bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.detach().to(weight.dtype)
        if norm.scale is not None:
            factor = norm.learned_scale / norm.attention_scale
            weight, bias = weight * factor, bias * factor
    values = {"weight": weight.clone(), "bias": bias.clone()}
    return {name: values[name] for name, _ in slot.named_parameters()}


def _bias(site: Site, slot: str) -> tuple[str, slice] | None:
    """The name of the bias that q or k comes with, and its rows there; None where there is none of its own."""
    q, k = site.heads * site.head_dim, site.kv_heads * site.head_dim
    fused = getattr(site.module, "qkv", None)
    if isinstance(fused, nn.Linear) and fused.bias is not None and len(fused.bias) == q + 2 * k:
        return f"{site.name}.qkv.bias", slice(0, q) if slot == "q_norm" else slice(q, q + k)
    single = getattr(site.module, f"{slot[0]}_proj", None)
    if isinstance(single, nn.Linear) and single.bias is not None:
        return f"{site.name}.{slot[0]}_proj.bias", slice(None)
    return None
