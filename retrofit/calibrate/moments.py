"""`match`, calibration in closed form: key shift and gains from moments of the original's q and k.

With q, k the original's vectors of one head (of the whole projection where the norm's axis is that), over all tokens
of the calibration images:

    shift   softmax over keys is blind to one vector c taken off every key, as long as no rotation follows the norm.
            c is chosen so that |k - c| varies least over tokens, since the norm erases that variation: with
            x = k - E k, G = E x x^T and y = |x|^2 - E|x|^2 it solves 2 (G + lambda mean(diag G) I) (c - E k) = E x y.
            lambda, here 0.1, trades a truer attention for longer keys.
    length  the longer k - c is, the less its length varies, and the larger the bound on logits: a head's is
            sqrt(d) rms(q) rms(k - c). Every head is allowed ROOM times what the layer's most demanding head needs (no
            more than LOGIT_LIMIT, unless that one needs more): its keys are made longer by more shift along the
            direction in which they vary least. All heads then need the same product of gains, so that gains and
            scales that heads share hold the temperature of each.
    gain    gain_q = rms(q) and gain_k = rms(k - c): the norm takes lengths away, the gain puts their mean back.

LayerNorm takes the mean over channels off first, so its figures are those of the centred vectors. Statistics are
streamed in float64; memory does not grow with the number of images. Source: this project.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from retrofit.errors import ModelError
from retrofit.models import Site
from retrofit.norms import HeadNorm
from retrofit.probes import AttentionStats
from retrofit.qknorm import QKNorm
from retrofit.tap import Reading

SHIFT_RIDGE = 0.1
"""lambda above."""
ROOM = 1.5
LOGIT_LIMIT = 60.0
"""How far calibration may raise a head's bound on |logit|."""
_LONGEST = 8.0
"""How many times longer a shift may make keys: what tells them apart must survive rounding to bfloat16."""


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass
class Moments:
    """Streamed moments of one site's q and k, in groups: a group is a head, or the whole projection (G = 1).

    With E channels a group: q_square [G], k_mean [G, E], k_second [G, E, E], k_third = E k|k|^2 [G, E] and
    k_fourth = E|k|^4 [G].
    """

    site: Site
    spec: QKNorm
    stats: AttentionStats
    count: int = 0
    q_square: Tensor = field(default_factory=_zero)
    k_mean: Tensor = field(default_factory=_zero)
    k_second: Tensor = field(default_factory=_zero)
    k_third: Tensor = field(default_factory=_zero)
    k_fourth: Tensor = field(default_factory=_zero)

    @classmethod
    def of(cls, site: Site, spec: QKNorm) -> Moments:
        return cls(site, spec, AttentionStats(site))

    def read(self, reading: Reading) -> None:
        self.stats.read(reading)
        q, k = self._grouped(reading.q), self._grouped(reading.k[:, :: self.site.heads // self.site.kv_heads])
        before, self.count = self.count, self.count + k.shape[1]
        square = k.square().sum(-1, keepdim=True)

        def averaged(old: Tensor, total: Tensor) -> Tensor:
            return (old * before + total) / self.count

        self.q_square = averaged(self.q_square, q.square().sum((1, 2)) * (k.shape[1] / q.shape[1]))
        self.k_mean = averaged(self.k_mean, k.sum(1))
        self.k_second = averaged(self.k_second, k.transpose(1, 2) @ k)
        self.k_third = averaged(self.k_third, (k * square).sum(1))
        self.k_fourth = averaged(self.k_fourth, square.square().sum((1, 2)))
        if not all(bool(sums.isfinite().all()) for sums in (self.q_square, self.k_fourth)):
            raise ModelError(
                f"{self.site.name}: q or k is not finite on these images, so that there is nothing to calibrate by; "
                f"the weights are damaged, or {reading.q.dtype} is too narrow for them"
            )

    def _grouped(self, x: Tensor) -> Tensor:
        """[B, H, N, D] as [G, B*N, E] in float64, as the norm will see it before it divides by the length."""
        groups = 1 if self.spec.axis == "projection" else x.shape[1]
        x = x.double().permute(1, 0, 2, 3).reshape(groups, x.shape[1] // groups, -1, x.shape[-1])
        x = x.transpose(1, 2).flatten(2)
        return x - x.mean(-1, keepdim=True) if self.spec.norm == "layernorm" else x

    @property
    def q_rms(self) -> Tensor:
        """[G]"""
        channels = self.site.head_dim * (self.site.heads if self.spec.axis == "projection" else 1)
        return (self.q_square / channels).sqrt()

    def k_rms(self, shift: Tensor) -> Tensor:
        """Of k - shift, [G]."""
        return (self._k_square(shift) / shift.shape[-1]).clamp_min(0).sqrt()

    def k_cv(self, shift: Tensor) -> Tensor:
        """Coefficient of variation of |k - shift| over tokens, [G]; to first order, as half that of its square."""
        centred = self.k_second - self.k_mean.unsqueeze(-1) * self.k_mean.unsqueeze(-2)
        square = self.k_second.diagonal(dim1=-2, dim2=-1).sum(-1)
        along = (shift.unsqueeze(-2) @ centred @ shift.unsqueeze(-1)).flatten()
        together = ((self.k_third - self.k_mean * square.unsqueeze(-1)) * shift).sum(-1)
        variance = self.k_fourth - square.square() + 4 * along - 4 * together
        return variance.clamp_min(0).sqrt() / (2 * self._k_square(shift).clamp_min(1e-30))

    def best_shift(self) -> Tensor:
        """The shift that leaves |k - shift| varying least, [G, E]; zero where a rotation follows the norm."""
        if not shiftable(self.site, self.spec):
            return torch.zeros_like(self.k_mean)
        mean = self.k_mean
        square = self.k_second.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        centred = self.k_second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        own = mean.square().sum(-1, keepdim=True)
        skew = self.k_third - mean * square - 2 * ((self.k_second @ mean.unsqueeze(-1)).squeeze(-1) - mean * own)
        ridge = SHIFT_RIDGE * centred.diagonal(dim1=-2, dim2=-1).mean(-1)
        eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        # The floor keeps constant keys, whose centred moment is zero, from making the system singular.
        system: Tensor = 2 * (centred + (ridge + 1e-12 * square.squeeze(-1) + 1e-30)[:, None, None] * eye)
        best: Tensor = mean + torch.linalg.solve(system, skew)
        return best

    def lengthened(self, shift: Tensor, length: Tensor) -> Tensor:
        """`shift` moved on until the rms of k - shift is `length` [G], as the head of this file says."""
        spread = self.k_second - self.k_mean.unsqueeze(-1) * self.k_mean.unsqueeze(-2)
        if self.spec.norm == "layernorm":  # to which the direction of equal channels means nothing
            spread = spread + spread.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        along: Tensor = torch.linalg.eigh(spread).eigenvectors[..., 0]
        offset = ((shift - self.k_mean) * along).sum(-1)
        along = torch.where(offset < 0, -1.0, 1.0).unsqueeze(-1) * along
        own = self.k_rms(shift)
        missing = (length.clamp_max(_LONGEST * own).square() - own.square()).clamp_min(0) * shift.shape[-1]
        distance = (offset.square() + missing).sqrt() - offset.abs()
        return shift + distance.unsqueeze(-1) * along

    def _k_square(self, shift: Tensor) -> Tensor:
        square: Tensor = self.k_second.diagonal(dim1=-2, dim2=-1).sum(-1)
        return square - 2 * (self.k_mean * shift).sum(-1) + shift.square().sum(-1)


def shiftable(site: Site, spec: QKNorm) -> bool:
    """Whether a key shift leaves the function as it is: not where a rotation comes between the norm and q.k."""
    return not (site.rotated and spec.position == "before_rope")


@torch.no_grad()
def match(q_norm: HeadNorm, k_norm: HeadNorm, moments: Moments) -> None:
    """Sets shift, gains and scale to what the moments ask for, as far as the formula can hold it.

    Without a shift, a gain or scale that the heads share holds the mean of their temperatures. A learned scale takes
    the place of the attention's own scale and of the mean gain.
    """
    spec = moments.spec
    shift = moments.best_shift()
    unit = shift.shape[-1] ** 0.5 if spec.norm == "l2" else 1.0  # others bring to rms 1 what it brings to length 1
    product = 0.0
    if k_norm.shift is not None:
        q = moments.q_rms.view(len(shift), -1).square().mean(-1).sqrt()  # over the queries that share a key head
        product = _product(q_norm, unit**2 * float((q * moments.k_rms(shift)).max()))
        shift = moments.lengthened(shift, product / unit**2 / q.clamp_min(1e-30))
        k_norm.shift.copy_(shift.flatten())
    q, k = unit * moments.q_rms.expand(q_norm.heads), unit * moments.k_rms(shift).expand(k_norm.heads)
    if product and spec.gain == "shared":
        k = (product / q.square().mean().sqrt()).expand(k_norm.heads)
    if q_norm.scale is not None:
        temperature = q * k.repeat_interleave(q_norm.heads // k_norm.heads) * q_norm.attention_scale
        scale = temperature if q_norm.scale.numel() > 1 else temperature.mean(0, keepdim=True)
        q, k = temperature / scale.clamp_min(1e-30), torch.ones_like(k)
        if spec.scale_max is not None:
            scale = scale.clamp(1e-6, spec.scale_max).log()
        q_norm.scale.copy_(scale)
    for norm, gain in ((q_norm, q), (k_norm, k)):
        if norm.weight is not None:
            held = gain if spec.gain == "per_head" else gain.square().mean(0, keepdim=True).sqrt()
            norm.weight.copy_(held.repeat_interleave(norm.head_dim) - (1.0 if spec.zero_centered else 0.0))


def holds_temperatures(spec: QKNorm) -> bool:
    """Whether each head can have its own: by a gain or scale of its own, or since one norm spans the heads."""
    return spec.axis == "projection" or spec.gain == "per_head" or spec.scale == "learned_per_head"


def _product(q_norm: HeadNorm, needed: float) -> float:
    """Of gain_q and gain_k: what the most demanding head needs and some room, as near as the formula comes to it.

    Without a gain the formula sets it, and a clamp cuts it.
    """
    spec = q_norm.spec
    channels = 1 if spec.norm == "l2" else q_norm.head_dim
    limit = LOGIT_LIMIT / (q_norm.attention_scale * channels) if spec.axis == "head" else float("inf")
    wanted = max(needed, min(ROOM * needed, limit))
    if spec.scale == "fixed" and spec.gain == "none":
        return 1.0
    if spec.gain != "none":
        return wanted
    return wanted if spec.scale_max is None else min(wanted, spec.scale_max / q_norm.attention_scale)
