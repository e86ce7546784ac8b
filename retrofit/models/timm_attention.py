"""timm's attention classes, a line each. Lines of source that an edit leans on are timm 1.0.31's.

Where q and k are pooled or convolved after their projection, the norm sees them as attention does. A relative position
bias that is computed from q (SAM, MViTv2, bottleneck and halo attention) is computed from the normed q, as timm's own
qk_norm does in SAM: QK-Norm then bounds it too.
"""

from __future__ import annotations

from functools import partial

from retrofit.models.derive import Edit
from retrofit.models.site import AttentionClass

_SLOTS = "q, k = self.q_norm(q), self.k_norm(k)"


def _after_rope(before: str) -> Edit:
    return Edit(before=before, drop=_SLOTS, place="AfterRope")


_TURNED = "q, k = self.q_norm(q.mT).mT, self.k_norm(k.mT).mT"
"""For q and k that lie as [..., channels, tokens]."""
_K_TURNED = "q, k = self.q_norm(q), self.k_norm(k.mT).mT"

_forked = partial(AttentionClass, edit=Edit(before="if self.fused_attn:"))
"""q and k are there before the forward takes the fused or the written-out way."""
_forked_turned = partial(AttentionClass, edit=Edit(before="if self.fused_attn:", line=_TURNED))
_written = partial(AttentionClass, edit=Edit(before="attn = (q @ k.transpose(-2, -1)) * self.scale"))
_levit = partial(
    AttentionClass,
    head_dim="key_dim",
    edit=Edit(
        before="attn = (q.transpose(-2, -1) @ k) * self.scale",
        line=_TURNED,
        also=Edit(before="attn = q @ k * self.scale", line=_K_TURNED),
    ),
)
_efficientformer_v2 = partial(
    AttentionClass, head_dim="key_dim", edit=Edit(before="attn = (q @ k) * self.scale", line=_K_TURNED)
)

_SLOTTED = (
    AttentionClass("timm.layers.attention.Attention"),
    AttentionClass(
        "timm.layers.attention.AttentionRope",
        kv_heads="num_kv_heads",
        rope="rope",
        after_rope=_after_rope("if self.num_kv_groups > 1:"),
    ),
    AttentionClass("timm.models.eva.EvaAttention", rope="rope", after_rope=_after_rope("if self.fused_attn:")),
    AttentionClass("timm.models.vision_transformer_relpos.RelPosAttention"),
    AttentionClass(
        "timm.models.vision_transformer_sam.Attention",
        layout="(BH)ND",
        rope="rope",
        bias_from_q=True,
        after_rope=_after_rope("if self.fused_attn:"),
    ),
    AttentionClass("timm.models.vision_transformer.ParallelScalingBlock", layout="BNHD"),
    AttentionClass("timm.models.vision_transformer.DiffParallelScalingBlock", split=2),
    AttentionClass("timm.layers.diff_attention.DiffAttention", split=2),
    AttentionClass("timm.models.gemma4_vit.Gemma4Attention", kv_heads="num_kv_heads", scale=None, layout="BNHD"),
    AttentionClass("timm.layers.attention_pool.AttentionPoolLatent", pool=True),
)

_VIT_LIKE = (
    _forked("timm.models.beit.Attention", head_dim=None),
    _forked("timm.models.swin_transformer.WindowAttention", head_dim=None, masked=-50.0),
    _forked("timm.models.cait.ClassAttn", head_dim=None),
    AttentionClass(
        "timm.models.cait.TalkingHeadAttn",
        head_dim=None,
        mixing="proj_l",
        edit=Edit(
            before="q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]",
            line="qkv = self.q_norm(qkv[0]), self.k_norm(qkv[1]), qkv[2]",
        ),
    ),
    AttentionClass(
        "timm.models.mvitv2.MultiScaleAttention",
        bias_from_q=True,
        edit=Edit(
            before="attn = (q * self.scale) @ k.transpose(-2, -1)",
            line="pooled, q, k = q, self.q_norm(q), self.k_norm(k)",
            also=Edit(instead="x = x + q", line="x = x + pooled"),  # the residual is of q as it was pooled
        ),
    ),
    _forked_turned("timm.models.maxxvit.Attention2d", head_dim="dim_head"),
    _forked("timm.models.maxxvit.AttentionCl", head_dim="dim_head"),
    _forked("timm.models.davit.WindowAttention", head_dim=None),
    _levit("timm.models.levit.Attention"),
    _levit("timm.models.levit.AttentionDownsample"),
    _forked("timm.models.pvt_v2.Attention"),
    _forked("timm.models.twins.LocallyGroupedAttn", head_dim=None, layout="BGHND"),
    _forked("timm.models.twins.GlobalSubSampleAttn", head_dim=None),
    _forked("timm.models.hiera.MaskUnitAttention", heads="heads"),
    _forked("timm.models.hieradet_sam2.MultiScaleAttention", head_dim=None),
    _forked("timm.models.metaformer.Attention"),
    _forked("timm.models.nest.Attention", head_dim=None),
    _forked("timm.models.volo.Attention", head_dim=None),
    AttentionClass(
        "timm.models.volo.ClassAttention",
        edit=Edit(
            instead="q = self.q(x[:, :1, :]).reshape(B, self.num_heads, 1, self.head_dim) * self.scale",
            line=(
                "q, k = self.q_norm(self.q(x[:, :1, :]).reshape(B, self.num_heads, 1, self.head_dim)) * self.scale, "
                "self.k_norm(k)"
            ),
        ),
    ),
    AttentionClass(
        "timm.models.convit.GPSA", head_dim=None, edit=Edit(after="q, k = qk[0], qk[1]", method="get_attention")
    ),
    AttentionClass(
        "timm.models.convit.MHSA",
        head_dim=None,
        edit=Edit(
            after="q, k, v = qkv.unbind(0)",
            also=Edit(after="q, k, v = qkv[0], qkv[1], qkv[2]", method="get_attention_map"),
        ),
    ),
    _forked("timm.models.nextvit.EfficientAttention"),
    _forked("timm.models.tiny_vit.Attention", head_dim="key_dim"),
    _written("timm.models.tnt.Attention"),
    _forked("timm.models.visformer.Attention"),
    _written("timm.models.crossvit.CrossAttention", head_dim=None),
    AttentionClass("timm.models.gcvit.WindowAttentionGlobal", edit=Edit(before="q = q * self.scale")),
    _forked("timm.models.fastvit.Attention"),
)
_HYBRID = (
    _written("timm.models.efficientformer.Attention", head_dim="key_dim"),
    _efficientformer_v2("timm.models.efficientformer_v2.Attention2d", mixing="talking_head1"),
    _efficientformer_v2("timm.models.efficientformer_v2.Attention2dDownsample"),
    AttentionClass(
        "timm.models.efficientvit_msra.CascadedGroupAttention",
        head_dim="key_dim",
        serial=True,
        edit=Edit(
            before="q = q * self.scale",
            line="q, k = self.q_norm(q.mT, head_idx).mT, self.k_norm(k.mT, head_idx).mT",
        ),
    ),
    AttentionClass(
        "timm.models.shvit.SHSA",
        heads=1,
        head_dim="qk_dim",
        layout="(BH)ND",
        edit=Edit(before="attn = (q.transpose(-2, -1) @ k) * self.scale", line=_TURNED),
    ),
    _forked_turned("timm.models.iformer.SHMA", heads=1, head_dim=None, layout="(BH)ND"),
    _forked("timm.models.lowformer.ConvAttention"),
    _forked("timm.models.cpubone.ConvAttention"),
    AttentionClass(
        "timm.layers.attention2d.MultiQueryAttention2d",
        kv_heads=1,
        head_dim="key_dim",
        edit=Edit(before="if self.einsum:"),
    ),
    _forked_turned("timm.layers.attention2d.Attention2d", head_dim="dim_head", scale=None),
    AttentionClass(
        "timm.layers.bottleneck_attn.BottleneckAttn",
        head_dim="dim_head_qk",
        layout="(BH)ND",
        bias_from_q=True,
        edit=Edit(before="if self.scale_pos_embed:", line=_K_TURNED),
    ),
    AttentionClass(
        "timm.layers.halo_attn.HaloAttn",
        head_dim="dim_head_qk",
        layout="(BH)GND",
        bias_from_q=True,
        edit=Edit(before="if self.scale_pos_embed:"),
    ),
    _forked("timm.layers.attention_pool2d.AttentionPool2d", pool=True),
    AttentionClass(
        "timm.layers.attention_pool2d.RotAttentionPool2d",
        rope="pos_embed",
        edit=Edit(before="rope = self.pos_embed.get_embed("),
        after_rope=Edit(before="if self.fused_attn:", place="AfterRope"),
        pool=True,
    ),
)
ATTENTION = (*_SLOTTED, *_VIT_LIKE, *_HYBRID)

_COSINE = "cosine attention already, which bounds it"
_CHANNEL = "channel attention: its softmax is over channels, not over tokens"
_LINEAR = "linear attention: it has no softmax over q.k"

OTHERS = {
    "timm.models.swin_transformer_v2.WindowAttention": _COSINE,
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": _COSINE,
    "timm.models.xcit.XCA": _CHANNEL,
    "timm.models.edgenext.CrossCovarianceAttn": _CHANNEL,
    "timm.models.davit.ChannelAttention": _CHANNEL,
    "timm.models.davit.ChannelAttentionV2": _CHANNEL,
    "timm.models.efficientvit_mit.LiteMLA": _LINEAR,
    "timm.models.mobilevit.LinearSelfAttention": _LINEAR,
    "timm.models.coat.FactorAttnConvRelPosEnc": _LINEAR,
    "timm.models.swiftformer.EfficientAdditiveAttention": _LINEAR,
    "timm.layers.lambda_layer.LambdaLayer": _LINEAR,
    "timm.models.volo.OutlookAttention": "outlook attention: it has no keys",
    "timm.models.nextvit.ConvAttention": "attention by convolution: it has no q and k",
    "timm.models.csatv2.SpatialAttention": "a gate from a convolution: it has no q and k",
    "timm.models.csatv2.SpatialTransformerBlock": "attention of a single channel, which a norm would reduce to signs",
    "timm.layers.attention_pool.AttentionPoolPrr": "a pool whose q and k are the tokens themselves",
    "timm.layers.attention2d.MultiQueryAttentionV2": "an einsum form that no model of timm uses",
    "timm.models.mvitv2.MultiScaleAttentionPoolFirst": "a form that no model of timm uses",
}
"""Attention that takes no norm, by class, and why."""
