"""What calibration keeps of the attention it saw: all keys of some attention maps, and evenly spaced queries of each.

Shapes: I attention maps (an image, or a window of one), H query heads, K key heads, N tokens, R kept queries, M keys,
D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from retrofit.calibrate.rotation import Rotation
from retrofit.models import Site
from retrofit.tap import Reading, mixed

Norm = Callable[[Tensor], Tensor]
"""Of q or k, laid out [I, H, N, D]."""

_QUERIES = 64
"""Kept of an attention map, at most, beside those of class and register tokens."""
PREFIX_SHARE = 0.1
"""What the queries of class and register tokens count together, few as they are: the model speaks through them."""
_LEAST = -1e4
"""Stands for the -inf of a mask: its key gets no weight, and its gradient is a number."""


@dataclass(frozen=True)
class Maps:
    """Some attention maps of one shape: q [I, H, R, D], k [I, K, M, D], bias [I or 1, H or 1, R or 1, M]."""

    q: Tensor
    k: Tensor
    bias: Tensor | None
    rows: Tensor
    """[I, R], which tokens the queries belong to."""
    weight: Tensor
    """[R], how much each query counts; the sum is 1."""
    scale: float
    mixing: Tensor | None = None
    """[H, H], as Reading has it."""
    rotation: Rotation | None = None
    """What comes between the norm and attention."""

    def logits(self, q_norm: Norm | None = None, k_norm: Norm | None = None) -> Tensor:
        """What softmax sees, [I, H, R, M]: the original's, or with these norms on q and k."""
        q = self.q if q_norm is None else q_norm(self.q)
        k = self.k if k_norm is None else k_norm(self.k)
        if k.shape[1] < q.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        if self.rotation is not None:
            q, k = self.rotation.at(self.rows)(q), self.rotation(k)
        logits = mixed((self.scale * q) @ k.transpose(-2, -1), self.mixing)
        return logits if self.bias is None else logits + self.bias


@dataclass
class Excerpt:
    """The kept attention of one site. With more maps than fit, every second is dropped, so that they stay even."""

    site: Site
    prefix: int
    """Class and register tokens, which come first. Their queries are always kept."""
    budget: int
    """Bytes that may be kept."""
    maps: list[Maps] = field(default_factory=list)
    """One a map, q and k as the norm will see them or, until `derotate`, as attention saw them."""
    stride: int = 1
    seen: int = 0
    held: int = 0

    def read(self, reading: Reading) -> None:
        q, k = reading.q, reading.k[:, :: self.site.heads // self.site.kv_heads]
        bias = reading.bias
        if bias is not None:
            bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        prefix = self.prefix if q.shape[2] == k.shape[2] > self.prefix else 0
        others = q.shape[2] - prefix
        step = -(-others // _QUERIES)
        evenly = prefix + step * torch.arange(others // step, device=q.device)
        share = PREFIX_SHARE if prefix else 0.0
        parts = ((prefix, share), (len(evenly), 1 - share))
        weight = torch.cat([torch.full((n,), part / n, device=q.device) for n, part in parts if n])
        for i in range(len(q)):
            at, self.seen = self.seen, self.seen + 1
            if at % self.stride:
                continue
            rows = torch.cat([torch.arange(prefix, device=q.device), evenly + (at // self.stride) % step])
            own = None
            if bias is not None:
                own = bias[i : i + 1] if len(bias) > 1 else bias
                own = _kept(own if own.shape[2] == 1 else own[:, :, rows]).clamp_min(_LEAST)
            kept = _kept(q[i : i + 1, :, rows]), _kept(k[i : i + 1])
            self._keep(Maps(*kept, own, rows[None], weight, reading.scale, reading.mixing))

    def _keep(self, one: Maps) -> None:
        self.maps.append(one)
        self.held += _size(one)
        while self.held > self.budget and len(self.maps) > 1:
            self.maps, self.stride = self.maps[::2], 2 * self.stride
            self.held = sum(_size(m) for m in self.maps)

    def derotate(self, rotation: Rotation) -> None:
        """Takes the rotation that follows the norm off again; maps of another size than its own are left out."""
        step = self.site.heads // self.site.kv_heads if rotation.own.shape[0] > 1 else 1
        of_keys = Rotation(rotation.own[::step], rotation.other[::step], rotation.partner)
        self.maps = [
            replace(m, q=rotation.at(m.rows).undone(m.q), k=of_keys.undone(m.k), rotation=rotation)
            for m in self.maps
            if m.k.shape[2] == rotation.own.shape[1]
        ]

    def batches(self, queries: int) -> list[Maps]:
        """The maps, in batches of about so many queries a head, each of one shape and spread over all that was seen."""
        shapes: dict[object, list[Maps]] = {}
        for m in self.maps:
            shapes.setdefault((m.q.shape, m.k.shape, None if m.bias is None else m.bias.shape), []).append(m)
        batches = []
        for maps in shapes.values():
            parts = max(1, len(maps) * maps[0].q.shape[2] // queries)
            batches += [_joined(maps[part::parts]) for part in range(parts)]
        return batches


def _joined(maps: list[Maps]) -> Maps:
    bias = None if maps[0].bias is None else torch.cat([m.bias for m in maps if m.bias is not None])
    return replace(
        maps[0],
        q=torch.cat([m.q for m in maps]),
        k=torch.cat([m.k for m in maps]),
        rows=torch.cat([m.rows for m in maps]),
        bias=bias,
    )


def _kept(x: Tensor) -> Tensor:
    """A copy in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


def _size(maps: Maps) -> int:
    return sum(x.numel() * x.element_size() for x in (maps.q, maps.k, maps.bias) if x is not None)
