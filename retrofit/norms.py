"""The norm modules that a `QKNorm` describes.

Shapes: B images, H heads, N tokens, D head_dim. Parameters are one-dimensional, so that every weight-decay rule that
spares one-dimensional tensors spares them: weight and bias [D] (shared) or [H*D], shift [H*D], scale [1] or [H].
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from retrofit.qknorm import QKNorm

Role = Literal["q", "k"]
Layout = Literal["BHND", "BNHD", "(BH)ND"]
"""How q and k lie where they are normed; (BH)ND has images and heads in one axis, heads fastest."""


class HeadNorm(nn.Module):
    """Norms q or k of one attention module: ((x - shift) normed) * gain + bias, times the learned scale.

    x is laid out as `layout` says. Arithmetic is in float32 or wider, the result in x's dtype. Construction draws no
    random numbers; the norm starts as the formula's own: gain 1, bias and shift 0, scale at its initial value.

    Args:
        spec: the formula.
        role: "q" carries the learned scale, "k" the shift.
        heads, head_dim: of this projection; k has fewer heads under grouped queries.
        attention_scale: what the attention multiplies q.k with. A learned scale takes its place.
        scale_init: start of the learned scale, where the formula has one.
        shifted: whether k has a shift, a vector a head that is taken off before the norm. Softmax over the keys is
            blind to it without a rotation in between, so that it changes what the norm does and nothing else.
    """

    weight: Tensor | None
    bias: Tensor | None
    shift: Tensor | None
    scale: Tensor | None

    def __init__(
        self,
        spec: QKNorm,
        role: Role,
        heads: int,
        head_dim: int,
        *,
        layout: Layout = "BHND",
        attention_scale: float = 1.0,
        scale_init: float | None = None,
        shifted: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.role, self.layout = spec, role, layout
        self.heads, self.head_dim = heads, head_dim
        self.attention_scale = attention_scale

        def parameter(size: int, value: float) -> nn.Parameter:
            return nn.Parameter(torch.full((size,), value, device=device, dtype=dtype))

        channels = heads * head_dim if spec.gain == "per_head" else head_dim
        has_gain, has_shift = spec.gain != "none", role == "k" and shifted
        has_scale = role == "q" and spec.scale != "fixed"
        self.weight = parameter(channels, 0.0 if spec.zero_centered else 1.0) if has_gain else None
        self.bias = parameter(channels, 0.0) if spec.bias else None
        self.shift = parameter(heads * head_dim, 0.0) if has_shift else None
        self.scale = None
        if has_scale:
            assert scale_init is not None, "a learned scale needs its start"
            stored = scale_init if spec.scale_max is None else math.log(scale_init)
            self.scale = parameter(heads if spec.scale == "learned_per_head" else 1, stored)

    def forward(self, x: Tensor) -> Tensor:
        y = _wide(x)
        if self.layout == "(BH)ND":
            y = y.unflatten(0, (-1, self.heads))
        if self.shift is not None:
            y = y - self._over_channels(self.shift)
        y = self._normed(y)
        if self.weight is not None:
            y = y * self._over_channels(self.gain)
        if self.bias is not None:
            y = y + self._over_channels(self.bias)
        if self.scale is not None:
            y = y * self._over_heads(self.learned_scale / self.attention_scale)
        return y.to(x.dtype).view_as(x)

    @property
    def gain(self) -> Tensor:
        """What multiplies the normed channels, [D] or [H*D]; ones where the formula has none."""
        if self.weight is None:
            return torch.ones(self.head_dim)
        weight = _wide(self.weight)
        return 1 + weight if self.spec.zero_centered else weight

    @property
    def learned_scale(self) -> Tensor:
        """The scale that takes the place of the attention's own, [1] or [H]."""
        assert self.scale is not None, "this norm has no learned scale"
        scale = _wide(self.scale)
        if self.spec.scale_max is None:
            return scale
        return scale.clamp(max=math.log(self.spec.scale_max)).exp()

    def by_head(self, x: Tensor) -> Tensor:
        """x, laid out as this norm takes it, as [B, H, N, D]."""
        if self.layout == "(BH)ND":
            merged: Tensor = x.unflatten(0, (-1, self.heads))
            return merged
        return x.transpose(1, 2) if self.layout == "BNHD" else x

    def extra_repr(self) -> str:
        return f"{self.role}, heads={self.heads}, head_dim={self.head_dim}, {self.spec.describe()}"

    def _normed(self, y: Tensor) -> Tensor:
        axes = [i for i, letter in enumerate(self._axes) if letter == "D" or (letter == "H" and self._whole)]
        if self.spec.norm == "l2":
            length: Tensor = torch.linalg.vector_norm(y, dim=axes, keepdim=True)
            return y / length.clamp_min(self.spec.eps)
        if self.spec.norm == "layernorm":
            y = y - y.mean(axes, keepdim=True)
        return y * torch.rsqrt(y.square().mean(axes, keepdim=True) + self.spec.eps)

    @property
    def _axes(self) -> str:
        return "BHND" if self.layout == "(BH)ND" else self.layout

    @property
    def _whole(self) -> bool:
        return self.spec.axis == "projection"

    def _over_channels(self, values: Tensor) -> Tensor:
        """[D] or [H*D], shaped to broadcast against the layout."""
        heads = values.numel() // self.head_dim
        return values.view([{"H": heads, "D": self.head_dim}.get(letter, 1) for letter in self._axes])

    def _over_heads(self, values: Tensor) -> Tensor:
        """[1] or [H], shaped to broadcast against the layout."""
        return values.view([values.numel() if letter == "H" else 1 for letter in self._axes])


def _wide(x: Tensor) -> Tensor:
    """In float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def logit_bound(q_norm: HeadNorm, k_norm: HeadNorm, rotated: bool) -> float | None:
    """The largest |q.k * scale| that these norms allow, over heads; None where a bias leaves it open.

    For the head axis: s * d * max over channels |gain_q gain_k|, and s * d * max|gain_q| * max|gain_k| where a rotation
    mixes the channels in between; s the scale (1/sqrt(d) if the attention's own). For the unit L2 norm d * s is s.
    Over the whole projection the norms bound all heads together: times the number of heads. The shift does not enter.
    """
    spec = q_norm.spec
    if spec.bias:
        return None
    with torch.no_grad():
        gain_q = q_norm.gain.detach().double().abs().cpu().view(-1, q_norm.head_dim)
        gain_k = k_norm.gain.detach().double().abs().cpu().view(-1, q_norm.head_dim)
        if gain_q.shape[0] > gain_k.shape[0] > 1:  # grouped queries: several q heads share one k head
            gain_k = gain_k.repeat_interleave(gain_q.shape[0] // gain_k.shape[0], 0)
        together = gain_q.amax(-1) * gain_k.amax(-1) if rotated else (gain_q * gain_k).amax(-1)
        learned = None if q_norm.scale is None else q_norm.learned_scale.detach().double().abs().cpu()
        scale = learned if learned is not None else torch.tensor([q_norm.attention_scale], dtype=torch.float64)
        squared_length = 1 if spec.norm == "l2" else q_norm.head_dim
        if spec.axis == "projection" and spec.norm != "l2":
            squared_length *= q_norm.heads
        return float((together * scale).max() * squared_length)
