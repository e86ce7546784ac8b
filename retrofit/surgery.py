"""Puts QK-Norm into a loaded model, and takes it out again. Everything is checked before anything is changed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn

from retrofit.calibrate import (
    Images,
    Init,
    LayerCalibration,
    Measured,
    batches_for,
    check_takes,
    remarks,
    shiftable,
)
from retrofit.errors import ModelError, RetrofitError
from retrofit.models import Site, Skipped, left_out, owner_of, sites_of
from retrofit.norms import HeadNorm
from retrofit.qknorm import QKNorm
from retrofit.shock import Shock, outputs, shock


@dataclass(frozen=True)
class Insertion:
    """What `insert_qk_norm` did."""

    spec: QKNorm
    init: Init
    sites: list[str]
    """The attention modules that now have the norm."""
    skipped: list[Skipped]
    """The attention modules that have none, and why."""
    layers: list[LayerCalibration] = field(default_factory=list)
    """What calibration did at each site; empty with init="ones" and no images."""
    shock: dict[str, Shock] = field(default_factory=dict)
    """Shock on `held_out`, for `ones` and for the chosen init; empty without held-out images."""
    remarks: list[str] = field(default_factory=list)
    """What calibration could not hold, and which layers the remaining shock comes from."""
    norms: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """The norms' parameters as they went in, by site from where the sites' names differ, for `insert_same`."""


@torch.inference_mode(False)  # what it makes and measures is trained, by the fit and by the user
def insert_qk_norm(
    model: nn.Module,
    spec: QKNorm,
    images: Images | None = None,
    init: Init = "fit",
    held_out: Images | None = None,
) -> Insertion:
    """Puts QK-Norm into every supported attention of `model`, in place.

    Args:
        model: any module of timm or transformers, or one that contains such attention.
        spec: the formula, such as QKNorm.preset("qwen3", gain="per_head").
        images: preprocessed images to calibrate on, [B, 3, H, W] or an iterable of such; a few dozen do. No labels.
            Videos, [B, frames, 3, H, W], where the model takes those.
        init: "fit" keeps the attention that the model had as far as the formula can, fitted layer by layer; "match"
            does so in closed form (calibrate/); "ones" is the formula's own start, and needs no images.
        held_out: other images, on which insertion shock is measured.

    Global random state, gradients, modes, hooks and every weight of the model stay as they are; its state dict gains
    keys that end in q_norm.* and k_norm.*.

    Raises:
        RetrofitError: before any change, where the model has no supported attention, has QK-Norm already, or where
            `match` or `fit` has no images.
    """
    if not isinstance(spec, QKNorm):
        raise RetrofitError(f'spec must be a QKNorm, such as QKNorm.preset("qwen3"), not {spec!r}')
    if init not in get_args(Init):
        raise RetrofitError(f"init={init!r} is not one of {', '.join(get_args(Init))}")
    if init != "ones" and images is None:
        raise RetrofitError(
            f'init="{init}" reads the model\'s attention: pass images=..., a preprocessed tensor [B, 3, H, W], '
            'or take init="ones", which starts at the formula\'s own gain'
        )
    sites, skipped = _chosen(model, spec)
    norms = [_norms(model, site, spec) for site in sites]
    test = list(batches_for(model, held_out)) if held_out is not None else []
    if test:
        check_takes(model, test[0])
    count = sum(len(b) for b in test)
    before = outputs(model, test) if test else None
    measured = Measured.on(model, sites, spec, images) if images is not None else None

    shocks: dict[str, Shock] = {}
    layers: list[LayerCalibration] = []
    try:
        for site, (q_norm, k_norm) in zip(sites, norms, strict=True):
            site.place(q_norm, k_norm)
        if before is not None:
            shocks["ones"] = shock(before, outputs(model, test), count)
        if measured is not None:
            layers = measured.calibrate(model, init)
        if before is not None and init != "ones":
            shocks[init] = shock(before, outputs(model, test), count)
    except BaseException:
        for site in sites:
            if site.norms is not None:
                site.restore()
        raise
    cosines = [c for c in (shocks[init].cosine_class, shocks[init].cosine_patch) if c is not None] if shocks else []
    said = remarks(spec, init, layers, min(cosines, default=None), measured.count if measured else 0)
    state = {
        f"{name}.{key}": value.detach().clone()
        for names, pair in zip(_names(sites), norms, strict=True)
        for name, norm in zip(names, pair, strict=True)
        for key, value in norm.state_dict().items()
    }
    return Insertion(spec, init, [s.name for s in sites], skipped, layers, shocks, said, state)


def insert_same(model: nn.Module, spec: QKNorm, norms: Mapping[str, Tensor]) -> None:
    """Puts the norms of an earlier insertion (`Insertion.norms`) into another copy of the model, whatever its head.

    Raises ModelError, before any change, where they are those of another one.
    """
    sites, _ = _chosen(model, spec)
    placed = [_norms(model, site, spec) for site in sites]
    left = dict(norms)
    for names, pair in zip(_names(sites), placed, strict=True):
        for name, norm in zip(names, pair, strict=True):
            own = {key: left.pop(f"{name}.{key}", torch.empty(0)) for key in norm.state_dict()}
            lacking = [key for key, value in norm.state_dict().items() if value.shape != own[key].shape]
            if lacking:
                raise ModelError(f"the insertion has no {name}.{lacking[0]} of this size: not the same model")
            norm.load_state_dict(own)
    if left:
        raise ModelError(f"the insertion has {next(iter(left))}, the model has not: not the same model")
    for site, pair in zip(sites, placed, strict=True):
        site.place(*pair)


def _names(sites: Sequence[Site]) -> list[tuple[str, str]]:
    """Of the norms of q and k at each site, from where the sites' names differ: a head may move them all inwards."""
    paths = [site.name.split(".") for site in sites]
    shared = sum(1 for _ in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
    places = ["".join(f"{part}." for part in path[shared:]) for path in paths]
    return [(f"{place}q_norm", f"{place}k_norm") for place in places]


def insert_blank(model: nn.Module, spec: QKNorm) -> None:
    """Puts norms in whose parameters a checkpoint is about to fill."""
    for site in _chosen(model, spec)[0]:
        site.place(*_norms(model, site, spec, scale_init=1.0))


def remove_qk_norm(model: nn.Module) -> int:
    """Takes out every norm that retrofit put in, and says how many sites had one. The base model is as it was.

    Raises ModelError where there is none.
    """
    sites = [site for site in sites_of(model)[0] if site.norms is not None]
    if not sites:
        raise ModelError(f"{type(model).__name__} has no QK-Norm that retrofit put in")
    for site in sites:
        site.restore()
    return len(sites)


def spec_of(model: nn.Module) -> QKNorm | None:
    """The formula that a model was retrofitted with; None for a model without."""
    placed = [site.norms[0].spec for site in sites_of(model)[0] if site.norms is not None]
    return placed[0] if placed else None


@dataclass(frozen=True)
class Survey:
    """What surgery would do to a model, found out without touching it."""

    sites: list[Site]
    """The attention modules that would be normed; those that could be, where `refusal` says why they are not."""
    skipped: list[Skipped]
    refusal: str | None
    """Why nothing can be done, or None."""


def survey(model: nn.Module, spec: QKNorm | None = None) -> Survey:
    """Which attention modules of a model `spec` (by default the plain formula) would norm, or why it cannot."""
    spec = spec or QKNorm()
    try:
        sites, skipped = sites_of(model)
    except ModelError as error:
        return Survey([], [], str(error))
    if not spec.pools:
        skipped += [Skipped(s.name, "an attention pool; pools=True norms it too") for s in sites if s.kind.pool]
        sites = [s for s in sites if not s.kind.pool]
    refusal = _refusal(model, spec, sites, skipped)
    if refusal is None and spec.layers is not None:
        wanted = {i % len(sites) for i in spec.layers}
        skipped += [Skipped(s.name, "not in layers") for i, s in enumerate(sites) if i not in wanted]
        sites = [s for i, s in enumerate(sites) if i in wanted]
    return Survey(sites, skipped, refusal)


def _refusal(model: nn.Module, spec: QKNorm, sites: list[Site], skipped: list[Skipped]) -> str | None:
    if not sites:
        return left_out(skipped) or "it has no attention with q and k"
    if any(site.norms is not None for site in sites):
        return "it already has QK-Norm from retrofit; remove_qk_norm(model) takes it out"
    native = [site for site in sites if site.native]
    if native:
        kind = type(native[0].module.q_norm).__name__
        return f"it has QK-Norm of its own in {len(native)} of {len(sites)} attention layers ({native[0].name}: {kind})"
    hooked = [site.name for site in sites if "forward" in vars(site.module)]
    if hooked:
        return f"{hooked[0]} has had its forward replaced, as accelerate's hooks do; retrofit the model before that"
    try:
        for site in sites:
            site.check(spec)
    except ModelError as error:
        return str(error)
    beyond = [i for i in spec.layers or () if not -len(sites) <= i < len(sites)]
    if beyond:
        return f"layers={beyond} are not there: it has {len(sites)} attention layers, 0 to {len(sites) - 1}"
    return None


def _chosen(model: nn.Module, spec: QKNorm) -> tuple[list[Site], list[Skipped]]:
    """The sites that `spec` means. Raises ModelError where there are none or they cannot be normed."""
    found = survey(model, spec)
    if found.refusal is not None:
        raise ModelError(f"{type(model).__name__} cannot take QK-Norm: {found.refusal}")
    return found.sites, found.skipped


def _norms(model: nn.Module, site: Site, spec: QKNorm, scale_init: float | None = None) -> tuple[HeadNorm, HeadNorm]:
    """Fresh norms for one site, in the projection's dtype and on its device."""
    weight = site.weight
    dtype = weight.dtype if weight.dtype.is_floating_point else torch.float32
    if spec.scale != "fixed":
        scale_init = scale_init or spec.scale_init or _published_scale(model)
    common: dict[str, Any] = {
        "layout": site.layout(spec),
        "attention_scale": site.scale,
        "scale_init": scale_init,
        "shifted": shiftable(site, spec),
        "device": weight.device,
        "dtype": dtype,
    }
    with torch.inference_mode(False):  # parameters made in inference mode could never be trained
        q_norm = HeadNorm(spec, "q", site.heads, site.head_dim, **common)
        k_norm = HeadNorm(spec, "k", site.kv_heads, site.head_dim, **common)
    return q_norm.train(site.module.training), k_norm.train(site.module.training)


def _published_scale(model: nn.Module) -> float:
    """log2(n^2 - n) for n tokens (Henry et al. 2020)."""
    family = owner_of(model)
    tokens = family.token_count(model) if family else None
    if tokens is None:
        raise RetrofitError("scale_init is needed: the number of tokens, which it follows from, is not known here")
    return math.log2(tokens**2 - tokens)
