"""The norm modules that a `QKNorm` describes.

Shapes: B images, G windows, H heads, N tokens, D head_dim. Parameters are one-dimensional, so that every weight-decay
rule that spares one-dimensional tensors spares them: weight and bias [D] (shared) or [H*D], shift [H*D], scale [1] or
[H].

A ramp leads from the identity to the norm: with alpha from 0 to 1, and m the mean over channels that a LayerNorm takes
off, s what the norm multiplies with (1/rms, or 1/|x|) and t the learned scale over the attention's own,

    y = (x - alpha shift - alpha m) * s^alpha * gain^alpha + alpha bias, times t^alpha

At alpha 0 that is x, bit for bit, and at alpha 1 the norm, bit for bit; in between a head's logits, without a shift,
are those of q.k to the power 1 - alpha and of the norm to the power alpha. Source: this project.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrofit.qknorm import QKNorm

Role = Literal["q", "k"]
Layout = Literal["BHND", "BNHD", "BN(HD)", "BGHND", "(BH)ND", "(BH)GND"]
"""How q and k lie where they are normed; G are windows. Of axes in one, such as (BH), the last is fastest. Where heads
stand before tokens, windows may stand in between: BHND takes BHGND too."""


class HeadNorm(nn.Module):
    """Norms q or k of one attention module: ((x - shift) normed) * gain + bias, times the learned scale.

    x is laid out as `layout` says. Arithmetic is in float32 or wider, the result in x's dtype. Construction draws no
    random numbers; the norm starts as the formula's own: gain 1, bias and shift 0, scale at its initial value.

    Args:
        spec: the formula.
        role: "q" carries the learned scale.
        heads, head_dim: of this projection; k has fewer heads under grouped queries.
        attention_scale: what the attention multiplies q.k with. A learned scale takes its place.
        scale_init: start of the learned scale, where the formula has one.
        shifted: whether there is a shift, a vector a head that is taken off before the norm. Softmax is blind to one
            of the keys without a rotation in between, so that it changes what the norm does and nothing else; one of
            the queries is another query bias.
    """

    weight: Tensor | None
    bias: Tensor | None
    shift: Tensor | None
    scale: Tensor | None
    alpha: Tensor | None
    """Where the ramp stands, a float32 scalar; None without one. A buffer, and so a part of the saved state."""

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
        has_gain = spec.gain != "none"
        has_scale = role == "q" and spec.scale != "fixed"
        self.weight = parameter(channels, 0.0 if spec.zero_centered else 1.0) if has_gain else None
        self.bias = parameter(channels, 0.0) if spec.bias else None
        self.shift = parameter(heads * head_dim, 0.0) if shifted else None
        self.scale = None
        if has_scale:
            assert scale_init is not None, "a learned scale needs its start"
            stored = scale_init if spec.scale_max is None else math.log(scale_init)
            self.scale = parameter(heads if spec.scale == "learned_per_head" else 1, stored)
        self.register_buffer("alpha", None)
        self.ramping = False

    def forward(self, x: Tensor, head: int | None = None) -> Tensor:
        """x normed. With `head`, x is [B, N, D] of that head alone."""
        alpha = self.alpha if self.ramping else None
        y, axes = self._by_axes(_wide(x), head)
        if self.shift is not None:
            y = y - _times(alpha, self._over_channels(self.shift, axes, head))
        y = self._normed(y, axes, alpha)
        if self.weight is not None:
            y = y * _power(alpha, self._over_channels(self.gain, axes, head))
        if self.bias is not None:
            y = y + _times(alpha, self._over_channels(self.bias, axes, head))
        if self.scale is not None:
            y = y * _power(alpha, self._over_heads(self.learned_scale / self.attention_scale, axes, head))
        return y.to(x.dtype).view_as(x)

    def set_ramp(self, alpha: float) -> None:
        """Puts the ramp where it shall stand: from 0, the identity, to 1, the norm, where the plain path is taken."""
        if self.alpha is None:
            parameter = next(self.parameters(), None)
            self.alpha = torch.zeros((), device=None if parameter is None else parameter.device)
        self.alpha.fill_(alpha)
        self.ramping = alpha < 1

    def end_ramp(self) -> None:
        """The plain norm, as if there had been no ramp."""
        self.alpha, self.ramping = None, False

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

    def by_head(self, x: Tensor, head: int | None = None) -> Tensor:
        """x, laid out as this norm takes it, as [B, H, N, D]; windows count as images."""
        y, axes = self._by_axes(x, head)
        order = [axes.index(letter) for letter in "BGHND" if letter in axes]
        return y.permute(order).flatten(0, len(order) - 4)

    def as_laid_out(self, x: Tensor) -> Tensor:
        """The inverse of `by_head`, where windows have no axis of their own and heads none with channels."""
        if self.layout == "(BH)ND":
            return x.flatten(0, 1)
        return x.transpose(1, 2) if self.layout == "BNHD" else x

    def extra_repr(self) -> str:
        return f"{self.role}, heads={self.heads}, head_dim={self.head_dim}, {self.spec.describe()}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A ramp comes and goes with the state that is loaded."""
        alpha = state_dict.get(f"{prefix}alpha")
        if alpha is None:
            self.end_ramp()
        else:
            self.set_ramp(float(alpha))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _normed(self, y: Tensor, axes: str, alpha: Tensor | None = None) -> Tensor:
        over = [i for i, letter in enumerate(axes) if letter == "D" or (letter == "H" and self._whole)]
        if self.spec.norm == "l2":
            length: Tensor = torch.linalg.vector_norm(y, dim=over, keepdim=True)
            return y / _power(alpha, length.clamp_min(self.spec.eps))
        if self.spec.norm == "layernorm":
            y = y - _times(alpha, y.mean(over, keepdim=True))
        return y * _power(alpha, torch.rsqrt(y.square().mean(over, keepdim=True) + self.spec.eps))

    def _by_axes(self, x: Tensor, head: int | None = None) -> tuple[Tensor, str]:
        """x with an axis for each of B, H, N, D and perhaps G, and the letters of its axes in order."""
        if head is not None:
            return x.unsqueeze(1), "BHND"
        axes = self.layout.replace("(", "").replace(")", "")
        if self.layout.startswith("(BH)"):
            x = x.unflatten(0, (-1, self.heads))
        elif self.layout.endswith("(HD)"):
            x = x.unflatten(-1, (self.heads, -1))
        return x, axes.replace("HN", "HGN") if x.ndim > len(axes) else axes

    @property
    def _whole(self) -> bool:
        return self.spec.axis == "projection"

    def _over_channels(self, values: Tensor, axes: str, head: int | None) -> Tensor:
        """[D] or [H*D], shaped to broadcast against the axes."""
        heads = values.numel() // self.head_dim
        values = values.view([{"H": heads, "D": self.head_dim}.get(letter, 1) for letter in axes])
        return values if head is None or heads == 1 else values[:, head, None]

    def _over_heads(self, values: Tensor, axes: str, head: int | None) -> Tensor:
        """[1] or [H], shaped to broadcast against the axes."""
        values = values.view([values.numel() if letter == "H" else 1 for letter in axes])
        return values if head is None or values.numel() == 1 else values[:, head, None]


def _wide(x: Tensor) -> Tensor:
    """In float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _times(alpha: Tensor | None, x: Tensor) -> Tensor:
    return x if alpha is None else alpha * x


def _power(alpha: Tensor | None, x: Tensor) -> Tensor:
    """x^alpha with x's sign; at alpha 0 that is 1 also where a gain has become negative."""
    if alpha is None:
        return x
    size = x.abs().clamp_min(1e-12).pow(alpha)
    return torch.where(x < 0, 1 - alpha - alpha * size, size)


def set_ramp(model: nn.Module, alpha: float) -> None:
    """Puts the ramp of every norm of a model at alpha, 0 to 1 (`HeadNorm`); a model without norms stays as it is."""
    for norm in model.modules():
        if isinstance(norm, HeadNorm):
            norm.set_ramp(alpha)


def end_ramp(model: nn.Module) -> None:
    """Makes every norm of a model the plain one, whose state holds no alpha."""
    for norm in model.modules():
        if isinstance(norm, HeadNorm):
            norm.end_ramp()


def ramp_of(model: nn.Module) -> float | None:
    """Where the ramp of a model's norms stands; None where it is at its end, or where there is none."""
    alphas = [float(n.alpha) for n in model.modules() if isinstance(n, HeadNorm) and n.ramping and n.alpha is not None]
    return min(alphas, default=None)


def logit_bound(q_norm: HeadNorm, k_norm: HeadNorm, rotated: bool, mixing: Tensor | None = None) -> float | None:
    """The largest |q.k * scale| that these norms allow, over heads; None where a bias or a ramp leaves it open.

    mixing: [H, H], what the heads' logits are multiplied by before softmax, if anything.
    """
    bounds = logit_bounds(q_norm, k_norm, rotated)
    if bounds is None:
        return None
    if mixing is not None:
        bounds = mixing.abs().double().cpu() @ bounds.expand(len(mixing))
    return float(bounds.max())


@torch.no_grad()
def logit_bounds(q_norm: HeadNorm, k_norm: HeadNorm, rotated: bool) -> Tensor | None:
    """The bound of each query head, in float64 on the CPU; one for all heads where they share gain and scale.

    For the head axis: s * d * max over channels |gain_q gain_k|, and s * d * max|gain_q| * max|gain_k| where a rotation
    mixes the channels in between; s the scale (1/sqrt(d) if the attention's own). For the unit L2 norm d * s is s.
    Over the whole projection the norms bound all heads together: times the number of heads. The shift does not enter.
    """
    spec = q_norm.spec
    if spec.bias or q_norm.ramping:
        return None
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
    return together * scale * squared_length
