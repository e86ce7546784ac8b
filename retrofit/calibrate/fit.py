"""`fit`: shifts, gains, scales and biases that bring the normed attention nearest to the original's.

For one site, over kept queries i with weights w_i (excerpt.py) and over its heads, Adam minimises

    sum_i w_i KL(softmax_j of the original's logits || softmax_j of the normed logits)

from `match` on. Masks, relative biases, grouped queries and rotations stand in both logits as they stand in the model.
Each parameter moves in units of what it starts from. No head may come to be bounded more loosely than by MORE times
the bound that `match` gave its layer, nor than by LOGIT_LIMIT. Source: this project.

What pays, by the mean cosine of DINOv2-small's final class / patch tokens with the original's (98x98, 96 images to fit,
200 others to measure, RMS norm per head, 300 steps): a shift of the keys alone .9951 / .9965, of the queries too .9963
/ .9972; class tokens counting a tenth .9976 / .9974, and .9975 / .9972 with half the queries a step, as now; from a
`match` with room .9980 / .9977. What does not:

    layer after layer, the layers below already normed: .9965 / .9973 with the original's attention as the target,
        .9963 / .9972 with that of the drifted inputs, against .9963 / .9973 for all layers at once
    attention's output, |(softmax - softmax') V W_o|^2, for KL: .9933 / .9947 against .9936 / .9951, at twice the time
    L-BFGS for Adam: KL .0064 against .0056 in like time, and bounds up to 70
    shifts in the eigenbasis of the keys' covariance: KL .0055 against .0059
    class tokens counting a fifth: .9976 / .9970
    800 steps: .9973 / .9980 against .9963 / .9973, for 2.7 times the time
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from retrofit.calibrate.excerpt import Excerpt, Maps
from retrofit.calibrate.moments import LOGIT_LIMIT, Moments
from retrofit.norms import HeadNorm, logit_bounds

MORE = 4 / 3
"""With the room that `match` leaves, twice what the layer's most demanding head needs."""
STEPS = 300
_QUERIES = 300
"""A head and step."""
_GAIN_RATE, _SHIFT_RATE = 0.04, 0.1
"""Learning rates, relative to the size of what they move; they fall linearly to 0."""
_BETAS = (0.9, 0.95)
_LEAST_GAIN = 0.02
"""Of what it was: a gain keeps its sign."""


def divergence(maps: Sequence[Maps], q_norm: HeadNorm, k_norm: HeadNorm) -> Tensor:
    """Mean weighted KL of the original's attention from the normed one, in nats, a value a head [H]."""
    q_norm, k_norm = (_working(norm, maps[0].q.dtype) for norm in (q_norm, k_norm))
    with torch.no_grad():
        total = sum(_divergence(m, m.logits(q_norm, k_norm), m.logits().softmax(-1)) * len(m.q) for m in maps)
        assert isinstance(total, Tensor)
        return total / sum(len(m.q) for m in maps)


def _divergence(maps: Maps, logits: Tensor, target: Tensor) -> Tensor:
    gap = target * (target.clamp_min(torch.finfo(target.dtype).tiny).log() - logits.log_softmax(-1))
    return (gap.sum(-1) * maps.weight).sum(-1).mean(0)


@dataclass(frozen=True)
class _Free:
    """A parameter on its way: start + unit * moved, with moved between its limits."""

    norm: HeadNorm
    name: str
    unit: Tensor
    rate: float
    least: Tensor
    most: Tensor

    @property
    def start(self) -> Tensor:
        return self.norm.get_parameter(self.name).detach()


def fit(q_norm: HeadNorm, k_norm: HeadNorm, moments: Moments, excerpt: Excerpt) -> None:
    """Fits the norms, which `match` has set, on what the excerpt holds. They stay as they are where that gains nothing.

    Deterministic; draws no random numbers.
    """
    batches = excerpt.batches(_QUERIES)
    q, k = (_working(norm, batches[0].q.dtype) for norm in (q_norm, k_norm))
    free = _free(q, k, moments)
    if not free:
        return
    before = divergence(batches, q, k).sum()
    with torch.enable_grad(), torch.autocast(before.device.type, enabled=False):
        _descend(q, k, batches, free)
    if divergence(batches, q, k).sum() < before:
        for norm, fitted in ((q_norm, q), (k_norm, k)):
            norm.load_state_dict(fitted.state_dict())


def _descend(q: HeadNorm, k: HeadNorm, batches: Sequence[Maps], free: Sequence[_Free]) -> None:
    targets = [m.logits().softmax(-1) for m in batches]
    moved = [torch.zeros_like(f.start, requires_grad=True) for f in free]
    optimizer = torch.optim.Adam(
        [{"params": [m], "lr": f.rate} for m, f in zip(moved, free, strict=True)], betas=_BETAS
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for step in range(STEPS):
        at = step % len(batches)
        values: dict[HeadNorm, dict[str, Tensor]] = {q: {}, k: {}}
        for f, m in zip(free, moved, strict=True):
            values[f.norm][f.name] = f.start + f.unit * m
        normed = (partial(functional_call, norm, values[norm]) for norm in (q, k))
        loss = _divergence(batches[at], batches[at].logits(*normed), targets[at]).sum()
        for m, gradient in zip(moved, torch.autograd.grad(loss, moved), strict=True):
            m.grad = gradient
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for f, m in zip(free, moved, strict=True):
                m.clamp_(f.least, f.most)
    with torch.no_grad():
        for f, m in zip(free, moved, strict=True):
            f.norm.get_parameter(f.name).add_(f.unit * m)


def _free(q: HeadNorm, k: HeadNorm, moments: Moments) -> list[_Free]:
    """What may move. A key bias may not, unless it is rotated: softmax is blind to it, and so is the loss."""
    site = moments.site
    found: list[_Free] = []

    def add(norm: HeadNorm, name: str, unit: Tensor, rate: float, least: float, most: Tensor | float) -> None:
        like = norm.get_parameter(name).detach()
        wide = (torch.as_tensor(x, dtype=like.dtype, device=like.device).expand_as(like) for x in (unit, least, most))
        found.append(_Free(norm, name, next(wide), rate, *wide))

    norms = [k] if site.kind.bias_from_q else [q, k]
    scaled = q.scale is not None and q in norms
    gains = [norm for norm in norms if norm.weight is not None]
    factors = len(gains) + scaled
    room = _headroom(q, k, site.rotated) ** (1 / max(factors, 1))
    for norm in gains:
        assert norm.weight is not None
        per_head = room.view(norm.heads, -1).amin(-1).repeat_interleave(norm.head_dim)
        most = per_head if moments.spec.gain == "per_head" else room.min()
        add(norm, "weight", norm.gain, _GAIN_RATE / factors, _LEAST_GAIN - 1, most - 1)
    if scaled:
        assert q.scale is not None
        most = room if q.scale.numel() > 1 else room.min()
        if moments.spec.scale_max is None:
            add(q, "scale", q.scale, _GAIN_RATE / factors, _LEAST_GAIN - 1, most - 1)
        else:
            add(q, "scale", torch.ones_like(q.scale), _GAIN_RATE / factors, -float("inf"), most.log())
    for norm in norms:
        if norm.bias is not None and (norm is q or site.rotated):
            add(norm, "bias", norm.gain.abs(), _SHIFT_RATE, -float("inf"), float("inf"))
        if norm.shift is not None:
            length = moments.q_rms if norm is q else moments.k_rms(norm.shift.double().view_as(moments.k_mean))
            unit = length.expand(norm.heads).repeat_interleave(norm.head_dim)
            add(norm, "shift", unit, _SHIFT_RATE, -float("inf"), float("inf"))
    return found


def _headroom(q: HeadNorm, k: HeadNorm, rotated: bool) -> Tensor:
    """By which factor each head's bound may grow, [H] in float64: to MORE times the layer's, and to LOGIT_LIMIT."""
    bounds = logit_bounds(q, k, rotated)
    if bounds is None or q.spec.axis == "projection":
        return torch.full((q.heads,), float("inf"), dtype=torch.float64)
    limit = min(LOGIT_LIMIT, MORE * float(bounds.max()))
    return (limit / bounds.clamp_min(1e-30)).clamp_min(1).expand(q.heads)


def _working(norm: HeadNorm, dtype: torch.dtype) -> HeadNorm:
    """A copy that takes [B, H, N, D] and computes in `dtype`."""
    copied = copy.deepcopy(norm).to(dtype).requires_grad_(False)
    copied.layout = "BHND"
    return copied
