"""What attention does, read from the live computation, which it does not change.

With q, k of one head as they enter attention (after norm and rotation), d = head_dim, s the scale and b the mask or
bias, softmax sees the logits l_ij = s * q_i . k_j + b_ij. Masked logits are left out everywhere.

    q_rms, k_rms        sqrt(mean over tokens and channels of x^2)
    q_rms_projected     the same before the norm that retrofit placed; without one, as q_rms (k alike)
    q_longest           largest |x| over tokens (k alike)
    q_cv, k_cv          coefficient of variation of |x| over tokens: deviation / mean; 0 when all have one length
    key_common_share    |mean k|^2 / mean |k|^2: the share of key energy that all tokens have in common
    logit_max, _absmax  largest l_ij, largest |l_ij|
    logit_spread        largest max_j l_ij - min_j l_ij
    logit_p50, _p99     percentiles of l_ij, from 2,048 bins even in asinh(l): to about 0.012 max(1, |l|)
    entropy             mean over rows of -sum_j p_ij log p_ij, p = softmax(l), in nats
    entropy_share       the same, each row divided by the logarithm of its number of visible keys; 1 is uniform
    .._min_head         the least of the heads'; .._prefix, .._patch: of class and register tokens' rows, of the others'
    low_entropy_heads   share of heads whose entropy_share is under 0.05
    peaked_rows         share of rows whose largest p exceeds 0.95
    logit_bound         the largest |l| that a QK-Norm allows (norms.logit_bound), plus the largest |b|; else None
    gain_q, gain_k      root mean square over channels of a QK-Norm's gain, a value a head; None without one

Everything is computed in float32 from detached tensors, in blocks of rows: no N x N map of all heads is held.
Low entropy alone is no fault; sharp attention is needed at borders and for matches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import ModelError
from retrofit.models import FAMILIES, Site, left_out, sites_of
from retrofit.norms import HeadNorm, logit_bound
from retrofit.tap import Reading, tapped

_BLOCK = 1 << 22
"""Logits held at a time: 16 MiB in float32."""
_BINS, _EDGE = 2048, math.asinh(1e5)
_LOW_ENTROPY = 0.05


@dataclass(frozen=True)
class Sample:
    """How much of each forward pass the logits are read of, evenly spaced; None reads all."""

    images: int | None = None
    heads: int | None = None
    rows: int | None = None
    """Queries an image."""


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
    longest: float = 0.0

    def add(self, x: Tensor) -> None:
        x = x.float()
        squares = x.square().sum(-1)
        self.count += x.shape[0] * x.shape[2]
        self.channels = x.shape[-1]
        self.length = self.length + squares.sqrt().double().sum((0, 2))
        self.square = self.square + squares.double().sum((0, 2))
        self.total = self.total + x.double().sum((0, 2))
        self.longest = max(self.longest, float(squares.max().sqrt()))

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
    sample: Sample = field(default_factory=Sample)
    prefix: int = 0
    """Class and register tokens, which come first."""
    q: Lengths = field(default_factory=Lengths)
    k: Lengths = field(default_factory=Lengths)
    q_projected: Lengths = field(default_factory=Lengths)
    k_projected: Lengths = field(default_factory=Lengths)
    rows: int = 0
    prefix_rows: int = 0
    bias_absmax: float = 0.0
    logit_max: Tensor | None = None
    logit_absmax: Tensor | None = None
    logit_spread: Tensor | None = None
    _histogram: Tensor = field(default_factory=_zero)
    _entropy: Tensor = field(default_factory=_zero)
    _entropy_share: Tensor = field(default_factory=_zero)
    _prefix_share: Tensor = field(default_factory=_zero)
    _peaked: Tensor = field(default_factory=_zero)

    def read(self, reading: Reading) -> None:
        self.q.add(reading.q)
        self.k.add(reading.k)
        if reading.projected is not None:
            self.q_projected.add(reading.projected[0])
            self.k_projected.add(reading.projected[1])
        self.bias_absmax = max(self.bias_absmax, reading.bias_absmax())
        prefixed = reading.q.shape[2] == reading.k.shape[2] > self.prefix and self.sample.rows is None
        part = reading.sampled(self.sample.images, self.sample.heads, self.sample.rows)
        images, heads, queries, _ = part.q.shape
        self.rows += images * queries
        self.prefix_rows += images * self.prefix if prefixed else 0
        step = max(1, _BLOCK // (images * heads * part.k.shape[2]))
        for start in range(0, queries, step):
            first = max(0, self.prefix - start) if prefixed else 0
            self._read_rows(*part.logits(slice(start, start + step)), prefix=first)

    def _read_rows(self, logits: Tensor, hidden: Tensor | None, prefix: int) -> None:
        """logits: [B, H, rows, M], of which the first `prefix` rows are class and register tokens'."""
        highest = logits.amax(-1)
        lowest = (logits if hidden is None else logits.masked_fill(hidden, float("inf"))).amin(-1)
        self.logit_max = _larger(self.logit_max, highest.amax((0, 2)))
        self.logit_absmax = _larger(self.logit_absmax, torch.maximum(highest.abs(), lowest.abs()).amax((0, 2)))
        self.logit_spread = _larger(self.logit_spread, (highest - lowest).amax((0, 2)))
        seen = logits if hidden is None else logits[~hidden]
        self._histogram = self._histogram + torch.histc(seen.asinh(), _BINS, -_EDGE, _EDGE).double().cpu()
        weights = logits.softmax(-1)
        entropy = torch.special.entr(weights).sum(-1)
        visible = logits.shape[-1] if hidden is None else (~hidden).sum(-1)
        share = _share(entropy, torch.as_tensor(visible, device=entropy.device)).double()
        self._entropy = self._entropy + entropy.double().sum((0, 2))
        self._entropy_share = self._entropy_share + share.sum((0, 2))
        self._prefix_share = self._prefix_share + share[:, :, :prefix].sum((0, 2))
        self._peaked = self._peaked + (weights.amax(-1) > 0.95).double().sum((0, 2))

    @property
    def entropy(self) -> Tensor:
        return self._entropy / self.rows

    @property
    def entropy_share(self) -> Tensor:
        return self._entropy_share / self.rows

    def percentile(self, p: float) -> float:
        """Of the visible logits; p from 0 to 1."""
        reached = self._histogram.cumsum(0) / self._histogram.sum().clamp_min(1)
        at = int((reached < p).sum())
        return math.sinh((at + 0.5) * 2 * _EDGE / _BINS - _EDGE)

    def row(self) -> dict[str, Any]:
        """The layer's figures: means over heads, but maxima for logits; as probes.jsonl holds them."""
        assert self.logit_max is not None, "this site did not run"
        assert self.logit_absmax is not None
        assert self.logit_spread is not None
        norms = self.site.norms
        bound = logit_bound(*norms, rotated=self.site.rotated) if norms else None
        patch_rows = self.rows - self.prefix_rows
        prefix_share, patch_share = self._prefix_share.mean(), (self._entropy_share - self._prefix_share).mean()
        return {
            "site": self.site.name,
            "heads": self.site.heads,
            "q_rms": _rms(self.q),
            "k_rms": _rms(self.k),
            "q_rms_projected": _rms(self.q_projected if self.q_projected.count else self.q),
            "k_rms_projected": _rms(self.k_projected if self.k_projected.count else self.k),
            "q_longest": self.q.longest,
            "k_longest": self.k.longest,
            "q_cv": float(self.q.cv.mean()),
            "k_cv": float(self.k.cv.mean()),
            "key_common_share": float(self.k.common_share.mean()),
            "logit_max": float(self.logit_max.max()),
            "logit_absmax": float(self.logit_absmax.max()),
            "logit_spread": float(self.logit_spread.max()),
            "logit_p50": self.percentile(0.5),
            "logit_p99": self.percentile(0.99),
            "entropy": float(self.entropy.mean()),
            "entropy_share": float(self.entropy_share.mean()),
            "entropy_share_min_head": float(self.entropy_share.min()),
            "entropy_share_prefix": float(prefix_share) / self.prefix_rows if self.prefix_rows else None,
            "entropy_share_patch": float(patch_share) / patch_rows if patch_rows else None,
            "low_entropy_heads": float((self.entropy_share < _LOW_ENTROPY).double().mean()),
            "peaked_rows": float(self._peaked.mean() / self.rows),
            "logit_bound": None if bound is None else bound + self.bias_absmax,
            "gain_q": gains_per_head(norms[0]) if norms else None,
            "gain_k": gains_per_head(norms[1]) if norms else None,
        }


class Probe:
    """What a `probe` block saw: `layers`, one AttentionStats a site that ran, in the model's order."""

    def __init__(self, sites: Sequence[Site], sample: Sample, prefix: int) -> None:
        self.sample = sample
        self._stats = {site.name: AttentionStats(site, sample, prefix) for site in sites}

    def read(self, reading: Reading) -> None:
        self._stats[reading.site.name].read(reading)

    @property
    def layers(self) -> list[AttentionStats]:
        return [s for s in self._stats.values() if s.rows]

    def rows(self) -> list[dict[str, Any]]:
        """A mapping a layer, as JSON can hold it; a sampled probe says in each how it was sampled."""
        sampling = {"sampling": asdict(self.sample)} if self.sample != Sample() else {}
        return [{**s.row(), **sampling} for s in self.layers]


@contextmanager
def probe(
    model: nn.Module, *, images: int | None = None, heads: int | None = None, rows: int | None = None
) -> Iterator[Probe]:
    """Reads the attention of every forward pass of `model` inside the block; several passes add up.

        with probe(model) as seen:
            model(images)
        print(seen.rows())

    Args:
        images, heads, rows: read the logits of at most so many of each, evenly spaced, a forward pass. None: of all.

    Raises ModelError where the model has no supported attention or is compiled, or where nothing ran.
    """
    sites, skipped = sites_of(model)
    if not sites:
        why = left_out(skipped) or "it has no attention with q and k"
        raise ModelError(f"{type(model).__name__} has no attention that retrofit can read: {why}")
    if hasattr(model, "_orig_mod") or any(getattr(m, "_compiled_call_impl", None) for m in model.modules()):
        raise ModelError("a compiled model hides its attention; probe the model that was given to torch.compile")
    prefix = next((f.prefix_tokens(model) for f in FAMILIES if f.owns(model)), 0)
    seen = Probe(sites, Sample(images, heads, rows), prefix)
    with tapped(sites, seen.read):
        yield seen


def _share(entropy: Tensor, visible: Tensor) -> Tensor:
    """Entropy over its largest, log of the number of visible keys; a row with a single key is as even as can be."""
    return torch.where(visible > 1, entropy / visible.clamp_min(2).log(), 1.0)


def _rms(lengths: Lengths) -> float:
    return float(lengths.rms.square().mean().sqrt())


def gains_per_head(norm: HeadNorm) -> list[float]:
    """Root mean square over channels of a norm's gain, a value a head."""
    gains = norm.gain.detach().double().view(-1, norm.head_dim).square().mean(-1).sqrt()
    return [float(g) for g in gains.expand(norm.heads)]


def _larger(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else torch.maximum(a, b)
