"""What calibration did to each layer, in numbers, and what of it deserves a warning."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from retrofit.calibrate.excerpt import Excerpt, Maps
from retrofit.calibrate.fit import divergence, fit
from retrofit.calibrate.moments import Moments, holds_temperatures, match
from retrofit.norms import HeadNorm, logit_bound
from retrofit.probes import gains_per_head
from retrofit.qknorm import QKNorm

LARGE_KL, LEAST_COSINE = 0.05, 0.95
"""What counts as a large remaining shock: KL in nats of a layer's attention, mean cosine of final tokens. A fitted
DINOv2-small lies near 0.005 and at a cosine of 0.997, one whose norm starts at ones near 0.5 and at 0.4."""
_FEW = 32
"""Images under which a fit is closer to them than to others."""
Init = Literal["ones", "match", "fit"]
_QUERIES = 4096
"""A head and block, in which KL is computed."""


@dataclass(frozen=True)
class LayerCalibration:
    """What calibration did at one site, as insertion.json holds it. Gains are a value a head.

    KL is that of the original's attention from the normed one, on the original's own q and k of the calibration
    images: mean over heads, in nats, with the weights of fit.py.
    """

    site: str
    gain_q: list[float]
    gain_k: list[float]
    kl_ones: float
    """Of the formula's own start."""
    kl_match: float
    """Of `match`, whether or not that is where the norms now are."""
    kl_match_per_head: float | None
    """Of `match` with a gain per head, where the formula has one temperature for several heads; else None."""
    kl: float
    """Of the norms as they went in."""
    shifted: bool
    """Whether there is a shift: not where a rotation follows the norm."""
    shift_share: float
    """Share of key energy that the shift takes off; negative where the shifted keys are longer."""
    key_norm_cv_before: float
    """Coefficient of variation of |k| over tokens: what the norm erases, and so the predictor of shock."""
    key_norm_cv_after: float
    query_norm_cv_before: float
    query_norm_cv_after: float
    logit_absmax_before: float
    """Largest |logit| of the original on the calibration images."""
    logit_bound: float | None
    """Largest |logit| that the norms now allow."""


def calibrate(q_norm: HeadNorm, k_norm: HeadNorm, moments: Moments, excerpt: Excerpt, init: Init) -> LayerCalibration:
    """Takes the norms of one site from the formula's own start to what `init` asks for, and says what that did."""
    maps = excerpt.batches(_QUERIES)

    def kl(q: HeadNorm, k: HeadNorm) -> float:
        return float(divergence(maps, q, k).mean())

    kl_ones = kl(q_norm, k_norm)
    q, k = (copy.deepcopy(norm) if init == "ones" else norm for norm in (q_norm, k_norm))
    match(q, k, moments)
    kl_match = kl(q, k)
    kl_per_head = None
    if not holds_temperatures(moments.spec):
        spec = replace(moments.spec, gain="per_head")
        q, k = (_like(norm, spec) for norm in (q_norm, k_norm))
        match(q, k, replace(moments, spec=spec))
        kl_per_head = kl(q, k)
    if init == "fit":
        fit(q_norm, k_norm, moments, excerpt)

    with torch.no_grad():
        zero = torch.zeros_like(moments.k_mean)
        shift = zero if k_norm.shift is None else k_norm.shift.double().view_as(zero)
        before, after = moments.k_rms(zero).square().sum(), moments.k_rms(shift).square().sum()
        absmax = moments.stats.logit_absmax
        assert absmax is not None
        return LayerCalibration(
            site=moments.site.name,
            gain_q=gains_per_head(q_norm),
            gain_k=gains_per_head(k_norm),
            kl_ones=kl_ones,
            kl_match=kl_match,
            kl_match_per_head=kl_per_head,
            kl=kl(q_norm, k_norm),
            shifted=k_norm.shift is not None,
            shift_share=float(1 - after / before.clamp_min(1e-30)),
            key_norm_cv_before=float(moments.k_cv(zero).mean()),
            key_norm_cv_after=float(moments.k_cv(shift).mean()),
            query_norm_cv_before=_query_cv(maps, q_norm, shifted=False),
            query_norm_cv_after=_query_cv(maps, q_norm, shifted=True),
            logit_absmax_before=float(absmax.max()),
            logit_bound=logit_bound(q_norm, k_norm, moments.site.rotated, moments.site.mixing),
        )


def remarks(
    spec: QKNorm, init: Init, layers: Sequence[LayerCalibration], cosine: float | None, images: int
) -> list[str]:
    """What the result must say in words: what the formula could not hold, and where the remaining shock comes from.

    Args:
        images: how many it was calibrated on.
        cosine: the least mean cosine of final tokens, prefix or patch, on held-out images; None where it is not known.
    """
    said: list[str] = []
    if not layers:
        return said
    kl = sum(layer.kl for layer in layers) / len(layers)
    unshifted = sum(not layer.shifted for layer in layers)
    if unshifted and init != "ones":
        said.append(
            f"no shift in {unshifted} of {len(layers)} layers: a rotation (RoPE) follows the norm there, and softmax "
            "would see it"
        )
    alone = [layer.kl_match_per_head for layer in layers if layer.kl_match_per_head is not None]
    if alone and init != "ones":
        shared, own = sum(layer.kl_match for layer in layers) / len(layers), sum(alone) / len(alone)
        if shared > 1.5 * own:
            said.append(
                f"the heads share one temperature, which costs: KL of attention after match {shared:.3g}, with "
                f"gain=per_head {own:.3g}"
            )
    if init == "fit" and images < _FEW:
        said.append(
            f"fitted to {images} images, which is few: others may keep less; take {_FEW} or more, or init=match"
        )
    if (cosine is not None and cosine < LEAST_COSINE) or (cosine is None and kl > LARGE_KL):
        worst = sorted(layers, key=lambda layer: -layer.kl)[:3]
        named = ", ".join(f"{layer.site} (KL {layer.kl:.2g})" for layer in worst if 3 * layer.kl >= worst[0].kl)
        measure = f"cosine of final tokens {cosine:.3f}" if cosine is not None else f"KL of attention {kl:.2g}"
        remedy = {"ones": "init=fit keeps more", "match": "init=fit keeps more"}.get(
            init, "a ramp starts without shock"
        )
        said.append(
            f"the norm still changes the model much before training: {measure}; most of it comes from {named}; {remedy}"
        )
    return said


def _query_cv(maps: Sequence[Maps], q_norm: HeadNorm, *, shifted: bool) -> float:
    """Coefficient of variation of |q| or |q - shift| over the kept queries, mean over heads."""
    spec = q_norm.spec
    axes = (1, 3) if spec.axis == "projection" else (3,)
    lengths = []
    for m in maps:
        x = m.q
        if shifted and q_norm.shift is not None:
            x = x - q_norm.shift.view(1, q_norm.heads, 1, -1)
        if spec.norm == "layernorm":
            x = x - x.mean(axes, keepdim=True)
        lengths.append(x.square().sum(axes, keepdim=True).sqrt().squeeze(-1).transpose(0, 1).flatten(1))
    together = torch.cat(lengths, 1)
    return float((together.std(1, correction=0) / together.mean(1).clamp_min(1e-30)).mean())


def _like(norm: HeadNorm, spec: QKNorm) -> HeadNorm:
    """A norm of another formula in the same place."""
    like = next(norm.parameters(), None)
    return HeadNorm(
        spec,
        norm.role,
        norm.heads,
        norm.head_dim,
        layout=norm.layout,
        attention_scale=norm.attention_scale,
        scale_init=1.0,
        shifted=norm.shift is not None,
        device=None if like is None else like.device,
        dtype=None if like is None else like.dtype,
    )
