"""What attention does, read from the live computation, which it does not change.

With q, k of one head as they enter attention (after norm and rotation), d = head_dim, s the scale and b the mask or
bias, softmax sees the logits l_ij = s * q_i . k_j + b_ij. Masked logits are left out everywhere.

    q_rms, k_rms        sqrt(mean over tokens and channels of x^2)
    q_cv, k_cv          coefficient of variation of |x| over tokens: deviation / mean; 0 when all have one length
    key_common_share    |mean k|^2 / mean |k|^2: the share of key energy that all tokens have in common
    logit_max, _absmax  largest l_ij, largest |l_ij|
    logit_spread        largest max_j l_ij - min_j l_ij
    entropy             mean over rows of -sum_j p_ij log p_ij, p = softmax(l), in nats
    entropy_share       the same, each row divided by the logarithm of its number of visible keys; 1 is uniform
    peaked_rows         share of rows whose largest p exceeds 0.95
    logit_bound         the largest |l| that a QK-Norm allows (norms.logit_bound), plus the largest |b|; else None

Everything is computed in float32 from detached tensors, in blocks of rows: no N x N map of all heads is held.
Low entropy alone is no fault; sharp attention is needed at borders and for matches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import ModelError
from retrofit.models import Site, sites_of
from retrofit.norms import logit_bound
from retrofit.tap import Reading, tapped

_BLOCK = 1 << 22
"""Logits held at a time: 16 MiB in float32."""


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass
class Lengths:
    """Streams the lengths of one head's vectors: x is [B, H, N, D]; sums are [H] in float64."""

    count: int = 0
    channels: int = 0
    length: Tensor = field(default_factory=_zero)
    square: Tensor = field(default_factory=_zero)
    total: Tensor = field(default_factory=_zero)

    def add(self, x: Tensor) -> None:
        x = x.float()
        squares = x.square().sum(-1)
        self.count += x.shape[0] * x.shape[2]
        self.channels = x.shape[-1]
        self.length = self.length + squares.sqrt().double().sum((0, 2))
        self.square = self.square + squares.double().sum((0, 2))
        self.total = self.total + x.double().sum((0, 2))

    @property
    def rms(self) -> Tensor:
        return (self.square / (self.count * self.channels)).sqrt()

    @property
    def cv(self) -> Tensor:
        mean = self.length / self.count
        return (self.square / self.count - mean**2).clamp_min(0).sqrt() / mean.clamp_min(1e-30)

    @property
    def common_share(self) -> Tensor:
        mean_square = self.square / self.count
        return (self.total / self.count).square().sum(-1) / mean_square.clamp_min(1e-30)


@dataclass
class AttentionStats:
    """The figures of one site, defined at the head of this module. Per head; `row()` gives those of the layer."""

    site: Site
    q: Lengths = field(default_factory=Lengths)
    k: Lengths = field(default_factory=Lengths)
    rows: int = 0
    bias_absmax: float = 0.0
    logit_max: Tensor | None = None
    logit_absmax: Tensor | None = None
    logit_spread: Tensor | None = None
    _entropy: Tensor = field(default_factory=_zero)
    _entropy_share: Tensor = field(default_factory=_zero)
    _peaked: Tensor = field(default_factory=_zero)

    def read(self, reading: Reading) -> None:
        self.q.add(reading.q)
        self.k.add(reading.k)
        if reading.bias is not None:
            bias = reading.bias.float()
            self.bias_absmax = max(self.bias_absmax, float(bias.masked_fill(_hidden(bias), 0.0).abs().max()))
        images, heads, queries, _ = reading.q.shape
        self.rows += images * queries
        step = max(1, _BLOCK // (images * heads * reading.k.shape[2]))
        for start in range(0, queries, step):
            self._read_rows(reading.logits(slice(start, start + step)))

    def _read_rows(self, logits: Tensor) -> None:
        """logits: [B, H, rows, M]."""
        hidden = _hidden(logits)
        highest = logits.amax(-1)
        lowest = logits.masked_fill(hidden, float("inf")).amin(-1)
        self.logit_max = _larger(self.logit_max, highest.amax((0, 2)))
        self.logit_absmax = _larger(self.logit_absmax, torch.maximum(highest.abs(), lowest.abs()).amax((0, 2)))
        self.logit_spread = _larger(self.logit_spread, (highest - lowest).amax((0, 2)))
        weights = logits.softmax(-1)
        entropy = torch.special.entr(weights).sum(-1)
        visible = (~hidden).sum(-1)
        self._entropy = self._entropy + entropy.double().sum((0, 2))
        self._entropy_share = self._entropy_share + (
            torch.where(visible > 1, entropy / visible.clamp_min(2).log(), 1.0).double().sum((0, 2))
        )
        self._peaked = self._peaked + (weights.amax(-1) > 0.95).double().sum((0, 2))

    @property
    def entropy(self) -> Tensor:
        return self._entropy / self.rows

    @property
    def entropy_share(self) -> Tensor:
        return self._entropy_share / self.rows

    def row(self) -> dict[str, Any]:
        """The layer's figures: means over heads, but maxima for logits; as probes.jsonl holds them."""
        assert self.logit_max is not None, "this site did not run"
        assert self.logit_absmax is not None
        assert self.logit_spread is not None
        bound = logit_bound(*self.site.norms, rotated=self.site.rotated) if self.site.norms else None
        return {
            "site": self.site.name,
            "heads": self.site.heads,
            "q_rms": float(self.q.rms.square().mean().sqrt()),
            "k_rms": float(self.k.rms.square().mean().sqrt()),
            "q_cv": float(self.q.cv.mean()),
            "k_cv": float(self.k.cv.mean()),
            "key_common_share": float(self.k.common_share.mean()),
            "logit_max": float(self.logit_max.max()),
            "logit_absmax": float(self.logit_absmax.max()),
            "logit_spread": float(self.logit_spread.max()),
            "entropy": float(self.entropy.mean()),
            "entropy_share": float(self.entropy_share.mean()),
            "entropy_share_min_head": float(self.entropy_share.min()),
            "peaked_rows": float(self._peaked.mean() / self.rows),
            "logit_bound": None if bound is None else bound + self.bias_absmax,
        }


class Probe:
    """What a `probe` block saw: `layers`, one AttentionStats a site that ran, in the model's order."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._stats = {site.name: AttentionStats(site) for site in sites}

    def read(self, reading: Reading) -> None:
        self._stats[reading.site.name].read(reading)

    @property
    def layers(self) -> list[AttentionStats]:
        return [s for s in self._stats.values() if s.rows]

    def rows(self) -> list[dict[str, Any]]:
        """A mapping a layer, as JSON can hold it."""
        return [s.row() for s in self.layers]


@contextmanager
def probe(model: nn.Module) -> Iterator[Probe]:
    """Reads the attention of every forward pass of `model` inside the block; several passes add up.

        with probe(model) as seen:
            model(images)
        print(seen.rows())

    Raises ModelError where the model has no supported attention, or where nothing ran.
    """
    sites, _ = sites_of(model)
    if not sites:
        raise ModelError(f"{type(model).__name__} has no attention that retrofit can read")
    seen = Probe(sites)
    with tapped(sites, seen.read):
        yield seen


def _hidden(logits: Tensor) -> Tensor:
    """Where a mask hides a key: -inf, or near the lowest number of a dtype, as transformers writes it."""
    return logits <= -1e30


def _larger(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else torch.maximum(a, b)
