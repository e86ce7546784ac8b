"""QKNorm: which QK-Norm is meant, as plain data. It knows no torch, and does nothing by itself.

"QK-Norm" names several formulas. With q, k of one head (d = head_dim values), n() the norm and s the scale, all of
them compute softmax(s * n(q) . n(k)); they differ in n, in the axis of its statistics, in the gain, in s, and in
whether n acts before or after the rotation of RoPE.

    rms         n(x) = x / sqrt(mean(x^2) + eps)
    layernorm   n(x) = (x - mean(x)) / sqrt(var(x) + eps), var biased
    l2          n(x) = x / max(|x|, eps)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from retrofit.errors import RetrofitError, nearest

Norm = Literal["rms", "layernorm", "l2"]
Axis = Literal["head", "projection"]
Gain = Literal["shared", "per_head", "none"]
Position = Literal["before_rope", "after_rope"]
Scale = Literal["fixed", "learned", "learned_per_head"]


@dataclass(frozen=True)
class QKNorm:
    """One QK-Norm formula. `QKNorm.preset("qwen3")` gives a published one; `dataclasses.replace` works on it.

    Raises RetrofitError when the parts contradict each other.
    """

    norm: Norm = "rms"
    axis: Axis = "head"
    """Statistics over each head's head_dim channels, or over all channels of the projection."""
    gain: Gain = "shared"
    """One gain of head_dim values for all heads, one of heads * head_dim values, or none."""
    bias: bool = False
    """A bias added after the gain, of the same shape as the gain."""
    zero_centered: bool = False
    """The gain is stored as w and applied as 1 + w."""
    eps: float = 1e-6
    position: Position = "before_rope"
    """Before or after the rotation, where the model rotates q and k; without meaning elsewhere."""
    scale: Scale = "fixed"
    """`fixed` keeps the model's own scale (1/sqrt(head_dim)); a learned one takes its place."""
    scale_init: float | None = None
    """Start of a learned scale. None: log2(n^2 - n) for n tokens (Henry et al. 2020)."""
    scale_max: float | None = None
    """Clamp of a learned scale. With one, the scale is learned as its logarithm (Swin V2)."""
    layers: tuple[int, ...] | None = None
    """Which attention layers get the norm, counted from 0 in the model's order (negative: from the end). None: all."""

    pools: bool = False
    """Also norm attention pools (a learned query over all tokens), which are otherwise left alone."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("norm", Norm),
            ("axis", Axis),
            ("gain", Gain),
            ("position", Position),
            ("scale", Scale),
        ):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise RetrofitError(f"{name}={value!r} is not one of {', '.join(get_args(kind))}")
        for name in ("bias", "zero_centered", "pools"):
            if not isinstance(getattr(self, name), bool):
                raise RetrofitError(f"{name}={getattr(self, name)!r} must be true or false")
        if not (isinstance(self.eps, int | float) and math.isfinite(self.eps) and self.eps > 0):
            raise RetrofitError(f"eps={self.eps!r} must be a positive number, 1e-6 for most models")
        if self.gain == "none" and (self.bias or self.zero_centered):
            raise RetrofitError("bias and zero_centered need a gain; set gain to shared or per_head")
        if self.scale == "fixed" and (self.scale_init is not None or self.scale_max is not None):
            raise RetrofitError("scale_init and scale_max need scale=learned or scale=learned_per_head")
        for name in ("scale_init", "scale_max"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise RetrofitError(f"{name}={value!r} must be a positive number")
        if self.scale_init and self.scale_max and self.scale_init > self.scale_max:
            raise RetrofitError(f"scale_init={self.scale_init:g} lies above scale_max={self.scale_max:g}")
        if self.layers is not None:
            if not isinstance(self.layers, tuple | list) or not all(type(i) is int for i in self.layers):
                raise RetrofitError(f"layers={self.layers!r} must be a list of whole numbers, such as [0, 1, 2]")
            if not self.layers:
                raise RetrofitError("layers=[] leaves nothing to norm; leave it out to norm every layer")
            object.__setattr__(self, "layers", tuple(self.layers))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> QKNorm:
        """A published formula, with `changes` to any field of it. Presets: see `PRESETS`."""
        if name not in PRESETS:
            raise RetrofitError(f"unknown preset {name!r}{nearest(name, PRESETS)} (presets: {', '.join(PRESETS)})")
        known = [f.name for f in fields(cls)]
        for key in changes:
            if key not in known:
                raise RetrofitError(f"QKNorm has no {key!r}{nearest(key, known)} (fields: {', '.join(known)})")
        return replace(PRESETS[name](), **changes)

    def describe(self) -> str:
        """The formula in one line, for tables and model cards."""
        norm = {"rms": "RMSNorm", "layernorm": "LayerNorm", "l2": "L2 norm"}[self.norm]
        axis = {"head": "each head", "projection": "the whole projection"}[self.axis]
        gain = {"shared": "gain shared by the heads", "per_head": "gain per head", "none": "no gain"}[self.gain]
        parts = [f"{norm} over {axis}", ("1 + w " if self.zero_centered else "") + gain]
        parts += ["with bias"] if self.bias else []
        parts += {"fixed": [], "learned": ["learned scale"], "learned_per_head": ["learned scale per head"]}[self.scale]
        return ", ".join([*parts, f"eps {self.eps:g}", self.position.replace("_rope", " RoPE")])


def qwen3() -> QKNorm:
    """RMSNorm over head_dim, one gain for all heads, before RoPE, 1/sqrt(d) kept.

    Source: transformers `Qwen3Attention`. Gemma 3 differs by storing 1 + w, Llama 4 by acting after RoPE without gain.
    """
    return QKNorm()


def gemma3() -> QKNorm:
    """As qwen3, with the gain stored as w and applied as 1 + w, so that weight decay would pull it to 1, not to 0.

    Source: transformers `Gemma3RMSNorm`. Gemma 3 also replaces 1/sqrt(d) by its query_pre_attn_scalar; a retrofit
    keeps the model's own scale.
    """
    return QKNorm(zero_centered=True)


def vit22b() -> QKNorm:
    """LayerNorm over head_dim, centred, gain shared by the heads, no bias, eps 1e-6.

    Source: flax `MultiHeadDotProductAttention(normalize_qk=True)`, whose comment names ViT-22B (arXiv:2302.05442), and
    Wortsman et al. (arXiv:2309.14322). Differs from timm's by the missing bias.
    """
    return QKNorm(norm="layernorm")


def henry2020() -> QKNorm:
    """Unit L2 over head_dim; one learned scale a module takes the place of 1/sqrt(d), from log2(n^2 - n), n tokens.

    Source: Henry et al. (arXiv:2010.04245), code CyndxAI/QKNorm. Unlike Swin V2's, the scale is not per head,
    not a logarithm and not clamped.
    """
    return QKNorm(norm="l2", gain="none", eps=1e-12, scale="learned")


def olmo2() -> QKNorm:
    """RMSNorm over the whole projection (heads * head_dim), before the head split, gain of the same size.

    Source: transformers `Olmo2Attention`. The heads' relative sizes survive, unlike in per-head norms.
    """
    return QKNorm(axis="projection", gain="per_head")


def chameleon() -> QKNorm:
    """LayerNorm with statistics over head_dim, gain and bias for each head, eps 1e-5.

    Source: transformers `ChameleonLayerNorm`. timm's shares gain and bias among the heads.
    """
    return QKNorm(norm="layernorm", gain="per_head", bias=True, eps=1e-5)


def llama4() -> QKNorm:
    """RMS over head_dim without gain, after RoPE, eps 1e-5.

    Source: transformers `Llama4TextL2Norm`. Its name says L2, as does Megatron's `L2Norm`, and both are RMS: the
    logits are head_dim times those of TransformerEngine's `L2Normalization`, which is the true unit L2.
    """
    return QKNorm(gain="none", eps=1e-5, position="after_rope")


def swinv2() -> QKNorm:
    """Cosine attention: unit L2 over head_dim, learned scale per head from 10, at most 100, learned as a logarithm.

    Source: Liu et al. (arXiv:2111.09883), timm `swin_transformer_v2.WindowAttention`. Its relative position bias is a
    part of Swin, not of the norm.
    """
    return QKNorm(norm="l2", gain="none", eps=1e-12, scale="learned_per_head", scale_init=10.0, scale_max=100.0)


def sd3() -> QKNorm:
    """RMSNorm over head_dim with a gain shared by the heads, eps 1e-6.

    Source: Esser et al. (arXiv:2403.03206), who say that it can be put into pretrained models. The formula is qwen3's.
    """
    return QKNorm()


def timm() -> QKNorm:
    """What timm's `qk_norm=True` builds in a standard ViT: LayerNorm over head_dim, shared gain and bias, eps 1e-6.

    Source: timm `layers/attention.py`, which takes the model's block norm; some models' block norm has eps 1e-5.
    """
    return QKNorm(norm="layernorm", bias=True)


PRESETS: dict[str, Callable[[], QKNorm]] = {
    f.__name__: f for f in (qwen3, gemma3, vit22b, henry2020, olmo2, chameleon, llama4, swinv2, sd3, timm)
}
