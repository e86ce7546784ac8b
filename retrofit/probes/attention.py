"""The figures of one attention, streamed over forward passes in blocks of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from retrofit.models import Site
from retrofit.norms import HeadNorm, logit_bound
from retrofit.probes.lengths import Lengths, zero
from retrofit.tap import Reading

_BLOCK = 1 << 20
"""Logits held at a time: 4 MiB in float32, which caches hold."""
_BINS = 1 << 14
"""Bins a sign: the exponent and the first six bits of the mantissa of a float32."""
_INFINITE = 0x7F800000 >> 17
"""The bin of infinity; those after it are of what is no number."""
_LOW_ENTROPY = 0.05


@dataclass(frozen=True)
class Sample:
    """How much of each forward pass the logits are read of, evenly spaced; None reads all."""

    images: int | None = None
    heads: int | None = None
    rows: int | None = None
    """Queries an image."""


@dataclass
class AttentionStats:
    """The figures of one site, defined at the head of this module. Per head; `row()` gives those of the layer."""

    site: Site
    sample: Sample = field(default_factory=Sample)
    prefix: int = 0
    """Class and register tokens, which come first."""
    q: Lengths = field(default_factory=Lengths)
    k: Lengths = field(default_factory=Lengths)
    q_projected: Lengths = field(default_factory=Lengths)
    k_projected: Lengths = field(default_factory=Lengths)
    rows: Tensor = field(default_factory=zero)
    """Queries that see a key, [H]."""
    prefix_rows: Tensor = field(default_factory=zero)
    bias_absmax: float = 0.0
    logit_max: Tensor | None = None
    logit_absmax: Tensor | None = None
    logit_spread: Tensor | None = None
    _histogram: Tensor = field(default_factory=zero)
    _entropy: Tensor = field(default_factory=zero)
    _entropy_share: Tensor = field(default_factory=zero)
    _prefix_share: Tensor = field(default_factory=zero)
    _peaked: Tensor = field(default_factory=zero)

    def read(self, reading: Reading) -> None:
        reading = replace(reading, q=reading.q.float().contiguous(), k=reading.k.float().contiguous())
        self.q.add(reading.q)
        self.k.add(reading.k)
        if reading.projected is not None:
            self.q_projected.add(reading.projected[0])
            self.k_projected.add(reading.projected[1])
        self.bias_absmax = max(self.bias_absmax, reading.bias_absmax())
        prefixed = reading.q.shape[2] == reading.k.shape[2] > self.prefix and self.sample.rows is None
        part = reading.sampled(self.sample.images, self.sample.heads, self.sample.rows)
        images, heads, queries, _ = part.q.shape
        step = max(1, _BLOCK // (images * heads * part.k.shape[2]))
        for start in range(0, queries, step):
            first = max(0, self.prefix - start) if prefixed else 0
            self._read_rows(*part.logits(slice(start, start + step)), prefix=first)

    def _read_rows(self, logits: Tensor, hidden: Tensor | None, prefix: int) -> None:
        """logits: [B, H, rows, M], of which the first `prefix` rows are class and register tokens'."""
        highest = logits.amax(-1)
        lowest = logits.amin(-1)
        counted = torch.ones_like(highest, dtype=torch.float64)
        visible = torch.full_like(highest, logits.shape[-1])
        below = logits - highest.unsqueeze(-1)
        if hidden is not None:
            visible = (~hidden).sum(-1)
            counted = (visible > 0).double()
            lowest = logits.masked_fill(hidden, float("inf")).amin(-1)
            below = below.masked_fill_(hidden, float("-inf"))
            highest, lowest = (x.where(visible > 0, 0.0) for x in (highest, lowest))
        self.logit_max = _larger(self.logit_max, highest.where(visible > 0, float("-inf")).amax((0, 2)))
        self.logit_absmax = _larger(self.logit_absmax, torch.maximum(highest.abs(), lowest.abs()).amax((0, 2)))
        self.logit_spread = _larger(self.logit_spread, (highest - lowest).amax((0, 2)))
        self._histogram = self._histogram + _histogram(logits if hidden is None else logits[~hidden])
        # With z = l - max l, softmax has entropy log sum e^z - sum z e^z / sum e^z, and its largest is 1 / sum e^z.
        odds = below.exp()
        total = odds.sum(-1).clamp_min(1.0)
        if hidden is not None:
            below = below.masked_fill_(hidden, 0.0)  # where e^z is 0, z e^z is
        entropy = (total.log() - odds.mul_(below).sum(-1) / total).double() * counted
        share = _share(entropy, visible) * counted
        self.rows = self.rows + counted.sum((0, 2))
        self.prefix_rows = self.prefix_rows + counted[:, :, :prefix].sum((0, 2))
        self._entropy = self._entropy + entropy.sum((0, 2))
        self._entropy_share = self._entropy_share + share.sum((0, 2))
        self._prefix_share = self._prefix_share + share[:, :, :prefix].sum((0, 2))
        self._peaked = self._peaked + ((total < 1 / 0.95) * counted).sum((0, 2))

    @property
    def entropy(self) -> Tensor:
        """Mean over rows, [H]."""
        return self._entropy / self.rows.clamp_min(1)

    @property
    def entropy_share(self) -> Tensor:
        """Mean over rows of entropy over its largest, [H]."""
        return self._entropy_share / self.rows.clamp_min(1)

    def percentile(self, p: float) -> float:
        """Of the visible logits; p from 0 to 1."""
        positive, negative = self._histogram.split(_BINS)
        counts = torch.cat([negative.flip(0), positive])
        at = int((counts.cumsum(0) < p * counts.sum()).sum()) - _BINS
        sign, at = (1.0, at) if at >= 0 else (-1.0, -1 - at)
        if at >= _INFINITE:  # as in a run that has diverged
            return sign * math.inf if at == _INFINITE else math.nan
        lower, upper = ((at + i << 17) for i in (0, 1))
        edges = torch.tensor([lower, upper], dtype=torch.int32).view(torch.float32)
        return sign * float(edges.double().mean())

    def per_head(self) -> dict[str, Tensor]:
        """The figures that each head has, [H]."""
        assert self.logit_max is not None, "this site did not run"
        assert self.logit_absmax is not None
        assert self.logit_spread is not None
        projected = {"q": self.q_projected, "k": self.k_projected} if self.q_projected.count else {}
        of = {"q": self.q, "k": self.k}
        return {
            **{f"{x}_rms": of[x].rms for x in of},
            **{f"{x}_rms_max": of[x].rms_max for x in of},
            **{f"{x}_cv": of[x].cv for x in of},
            **{f"{x}_rms_projected": projected.get(x, of[x]).rms for x in of},
            **{f"{x}_rms_max_projected": projected.get(x, of[x]).rms_max for x in of},
            **{f"{x}_cv_projected": projected.get(x, of[x]).cv for x in of},
            "key_common_share": self.k.common_share,
            "logit_max": self.logit_max,
            "logit_absmax": self.logit_absmax,
            "logit_spread": self.logit_spread,
            "entropy": self.entropy,
            "entropy_share": self.entropy_share,
            "peaked_rows": self._peaked / self.rows.clamp_min(1),
        }

    def row(self) -> dict[str, Any]:
        """The layer's figures, as probes.jsonl holds them: largest over heads of what is a largest, else means."""
        heads = {name: values.double() for name, values in self.per_head().items()}
        norms = self.site.norms
        bound = logit_bound(*norms, self.site.rotated, self.site.mixing) if norms else None
        patch_share = self._entropy_share - self._prefix_share
        untold = self.prefix > 0 and not self.prefix_rows.any()  # a sample of rows, or windows
        return {
            "site": self.site.name,
            "heads": self.site.heads,
            **{name: _over_heads(name, values) for name, values in heads.items()},
            "logit_p50": self.percentile(0.5),
            "logit_p99": self.percentile(0.99),
            "entropy_share_min_head": float(heads["entropy_share"].min()),
            "entropy_share_prefix": _mean(self._prefix_share, self.prefix_rows),
            "entropy_share_patch": None if untold else _mean(patch_share, self.rows - self.prefix_rows),
            "low_entropy_heads": float((heads["entropy_share"] < _LOW_ENTROPY).double().mean()),
            "logit_bound": None if bound is None else bound + self.bias_absmax,
            "gain_q": gains_per_head(norms[0]) if norms else None,
            "gain_k": gains_per_head(norms[1]) if norms else None,
        }


def _over_heads(name: str, values: Tensor) -> float:
    if "_max" in name or name in ("logit_absmax", "logit_spread"):
        return float(values.max())
    return float(values.square().mean().sqrt() if "_rms" in name else values.mean())


def _mean(total: Tensor, rows: Tensor) -> float | None:
    """Over heads and rows; None without rows."""
    return float(total.sum() / rows.sum()) if rows.any() else None


def _share(entropy: Tensor, visible: Tensor) -> Tensor:
    """Entropy over its largest, log of the number of visible keys; a row with a single key is as even as can be."""
    return torch.where(visible > 1, entropy / visible.clamp_min(2).log(), 1.0)


def _histogram(logits: Tensor) -> Tensor:
    """Counts by the leading bits of each float32, [2 * _BINS]: positive ones from 0 up, then negative ones from 0 down.

    Taking a logarithm first would cost more than the forward pass.
    """
    bits = logits.reshape(-1).view(torch.int32) >> 17
    return torch.bincount(bits.bitwise_and_(2 * _BINS - 1), minlength=2 * _BINS).cpu()


def gains_per_head(norm: HeadNorm) -> list[float]:
    """Root mean square over channels of a norm's gain, a value a head."""
    gains = norm.gain.detach().double().view(-1, norm.head_dim).square().mean(-1).sqrt()
    return [float(g) for g in gains.expand(norm.heads)]


def _larger(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else torch.maximum(a, b)
