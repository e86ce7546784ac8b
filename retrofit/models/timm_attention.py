"""timm's attention classes, a line each. Lines of source that an edit leans on are timm 1.0.31's."""

from __future__ import annotations

from retrofit.models.derive import Edit
from retrofit.models.site import AttentionClass

_SLOTS = "q, k = self.q_norm(q), self.k_norm(k)"


def _after_rope(before: str) -> Edit:
    return Edit(before=before, drop=_SLOTS, place="AfterRope")


ATTENTION = (
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

_COSINE = "cosine attention already, which bounds it"
_CHANNEL = "channel attention: its softmax is over channels, not over tokens"
_LINEAR = "linear attention: it has no softmax over q.k"
_LATER = "not supported yet"

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
    "timm.models.csatv2.SpatialTransformerBlock": "attention of a single channel, which a norm would reduce to signs",
    **dict.fromkeys(
        (
            "timm.models.beit.Attention",
            "timm.models.swin_transformer.WindowAttention",
            "timm.models.cait.ClassAttn",
            "timm.models.cait.TalkingHeadAttn",
            "timm.models.mvitv2.MultiScaleAttention",
            "timm.models.mvitv2.MultiScaleAttentionPoolFirst",
            "timm.models.maxxvit.Attention2d",
            "timm.models.maxxvit.AttentionCl",
            "timm.models.davit.WindowAttention",
            "timm.models.levit.Attention",
            "timm.models.levit.AttentionDownsample",
            "timm.models.pvt_v2.Attention",
            "timm.models.twins.LocallyGroupedAttn",
            "timm.models.twins.GlobalSubSampleAttn",
            "timm.models.efficientformer.Attention",
            "timm.models.efficientformer_v2.Attention2d",
            "timm.models.efficientformer_v2.Attention2dDownsample",
            "timm.models.fastvit.Attention",
            "timm.models.hiera.MaskUnitAttention",
            "timm.models.hieradet_sam2.MultiScaleAttention",
            "timm.models.metaformer.Attention",
            "timm.models.nest.Attention",
            "timm.models.volo.Attention",
            "timm.models.volo.ClassAttention",
            "timm.models.convit.GPSA",
            "timm.models.convit.MHSA",
            "timm.models.nextvit.EfficientAttention",
            "timm.models.tiny_vit.Attention",
            "timm.models.tnt.Attention",
            "timm.models.visformer.Attention",
            "timm.models.crossvit.CrossAttention",
            "timm.models.gcvit.WindowAttentionGlobal",
            "timm.models.efficientvit_msra.CascadedGroupAttention",
            "timm.models.shvit.SHSA",
            "timm.models.iformer.SHMA",
            "timm.models.lowformer.ConvAttention",
            "timm.models.cpubone.ConvAttention",
            "timm.layers.attention2d.MultiQueryAttentionV2",
            "timm.layers.attention2d.MultiQueryAttention2d",
            "timm.layers.attention2d.Attention2d",
            "timm.layers.attention_pool2d.RotAttentionPool2d",
            "timm.layers.attention_pool2d.AttentionPool2d",
            "timm.layers.attention_pool.AttentionPoolPrr",
            "timm.layers.bottleneck_attn.BottleneckAttn",
            "timm.layers.halo_attn.HaloAttn",
        ),
        _LATER,
    ),
}
"""Attention that takes no norm, by class, and why."""
