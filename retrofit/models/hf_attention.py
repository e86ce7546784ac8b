"""transformers' attention classes, a line each. Lines of source that an edit leans on are transformers 5.24's.

Each helper below names, for a group of classes that are written alike, the line after which q and k are there and what
the source calls them.

A relative position bias that is computed from q (SAM, ViTDet) is computed from the normed q, as timm's qk_norm does in
SAM. V-JEPA 2's rotation is none: it pairs channels otherwise than it turns them and so changes their lengths; the norm
goes after it, where attention sees q and k.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from retrofit.models.derive import Edit
from retrofit.models.site import AttentionClass


def _kind(path: str, *, made: str, names: str, **facts: Any) -> AttentionClass:
    q, k = names.split(", ")
    return AttentionClass(f"transformers.models.{path}", edit=Edit(after=made, q=q, k=k), **facts)


_STATES = "query_states, key_states"
_vit = partial(
    _kind,
    made="key_states = self.k_proj(hidden_states).view(",
    names=_STATES,
    heads="num_attention_heads",
    scale="scaling",
)
_clip = partial(_kind, made="keys = keys.view(", names="queries, keys")
_siglip = partial(_kind, made="keys = self.k_proj(hidden_states).view(", names="queries, keys")
_yolos = partial(
    _kind,
    made="query_layer = self.query(hidden_states).view(",
    names="query_layer, key_layer",
    heads="num_attention_heads",
    head_dim="attention_head_size",
    scale="scaling",
)
_data2vec = partial(
    _kind,
    made="key_layer = self.key(hidden_states).view(",
    names="query_layer, key_layer",
    heads="num_attention_heads",
    head_dim="attention_head_size",
    scale=None,
)
_pvt = partial(_data2vec, made="key_layer = self.transpose_for_scores(self.key(hidden_states))")
_sam = partial(
    _kind,
    made="query, key, value = qkv.reshape(3, ",
    names="query, key",
    heads="num_attention_heads",
    head_dim=None,
    layout="(BH)ND",
    bias_from_q=True,
)
_levit = partial(
    AttentionClass,
    heads="num_attention_heads",
    head_dim="key_dim",
    edit=Edit(before="attention = query @ key.transpose(-2, -1) * self.scale", q="query", k="key"),
)
_rotary = partial(
    _kind,
    made="key_states = key_states.view(",
    names=_STATES,
    scale="scaling",
    after_rope=Edit(f"{_STATES} = apply_rotary_pos_emb(", q="query_states", k="key_states", place="AfterRope"),
)

_FLAT = (
    _vit("vit.modeling_vit.ViTAttention"),
    _vit("deit.modeling_deit.DeiTAttention"),
    _vit("dinov2.modeling_dinov2.Dinov2Attention"),
    _vit("dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersAttention"),
    _vit("beit.modeling_beit.BeitAttention"),
    _vit("vit_mae.modeling_vit_mae.ViTMAEAttention"),
    _vit("vit_msn.modeling_vit_msn.ViTMSNAttention"),
    _vit("ijepa.modeling_ijepa.IJepaAttention"),
    _vit("pixio.modeling_pixio.PixioAttention"),
    _vit("vivit.modeling_vivit.VivitAttention"),
    _vit("rf_detr.modeling_rf_detr.RfDetrDinov2Attention"),
    _vit("lw_detr.modeling_lw_detr.LwDetrViTAttention"),
    _vit("tipsv2.modeling_tipsv2.Tipsv2VisionAttention"),
    _clip("clip.modeling_clip.CLIPAttention"),
    _clip("metaclip_2.modeling_metaclip_2.MetaClip2Attention"),
    _clip("chinese_clip.modeling_chinese_clip.ChineseCLIPVisionAttention"),
    _siglip("siglip.modeling_siglip.SiglipAttention"),
    _siglip("siglip2.modeling_siglip2.Siglip2Attention"),
    _siglip("aimv2.modeling_aimv2.Aimv2Attention"),
    _siglip("eomt.modeling_eomt.EomtAttention"),
    _siglip("idefics3.modeling_idefics3.Idefics3VisionAttention"),
    _siglip("smolvlm.modeling_smolvlm.SmolVLMVisionAttention"),
    _yolos("yolos.modeling_yolos.YolosSelfAttention"),
    _yolos("dpt.modeling_dpt.DPTSelfAttention"),
    _yolos("vitpose_backbone.modeling_vitpose_backbone.VitPoseBackboneSelfAttention"),
    _yolos(
        "videomae.modeling_videomae.VideoMAESelfAttention",
        made="queries = self.query(hidden_states).view(",
        names="queries, keys",
    ),
    _data2vec("data2vec.modeling_data2vec_vision.Data2VecVisionSelfAttention"),
    _data2vec("data2vec.modeling_data2vec_vision.Data2VecVisionSdpaSelfAttention"),
    _rotary("dinov3_vit.modeling_dinov3_vit.DINOv3ViTAttention", rope="rope_embeddings"),
    _rotary("eomt_dinov3.modeling_eomt_dinov3.EomtDinov3Attention", rope="rope_embeddings"),
    _rotary("pixtral.modeling_pixtral.PixtralAttention", rope="patch_positional_embedding"),
)
_HIERARCHICAL = (
    _vit("swin.modeling_swin.SwinAttention", masked=-50.0),
    _vit("segformer.modeling_segformer.SegformerAttention", made="key_states = self.k_proj(kv_hidden_states).view("),
    AttentionClass(
        "transformers.models.hiera.modeling_hiera.HieraMaskUnitAttention",
        edit=Edit(before="attn_weights = (query * self.scale) @ key", q="query", k="key"),
    ),
    _pvt("pvt.modeling_pvt.PvtEfficientSelfAttention"),
    _pvt("pvt_v2.modeling_pvt_v2.PvtV2SelfAttention"),
    _data2vec("glpn.modeling_glpn.GLPNEfficientSelfAttention"),
    _data2vec("mobilevit.modeling_mobilevit.MobileViTSelfAttention"),
    _data2vec("donut.modeling_donut_swin.DonutSwinSelfAttention", masked=-50.0),
    _data2vec("maskformer.modeling_maskformer_swin.MaskFormerSwinSelfAttention", masked=-50.0),
    AttentionClass(
        "transformers.models.vitdet.modeling_vitdet.VitDetAttention",
        head_dim=None,
        layout="(BH)ND",
        bias_from_q=True,
        edit=Edit(before="attention_scores = (queries * self.scale) @ keys", q="queries", k="keys"),
    ),
    AttentionClass(
        "transformers.models.cvt.modeling_cvt.CvtSelfAttention",
        head_dim=None,
        edit=Edit(before="attention_score = torch.einsum(", q="query", k="key"),
    ),
    _levit("transformers.models.levit.modeling_levit.LevitAttention"),
    _levit("transformers.models.levit.modeling_levit.LevitAttentionSubsample"),
    _kind(
        "timesformer.modeling_timesformer.TimesformerSelfAttention",
        made="query, key, value = qkv[0], qkv[1], qkv[2]",
        names="query, key",
        head_dim=None,
    ),
    _kind(
        "blip_2.modeling_blip_2.Blip2Attention",
        made="query_states, key_states, value_states = mixed_qkv[0], mixed_qkv[1]",
        names=_STATES,
    ),
    _sam("sam.modeling_sam.SamVisionAttention"),
    _sam("sam.modeling_sam.SamVisionSdpaAttention"),
    _sam("sam_hq.modeling_sam_hq.SamHQVisionAttention"),
    _sam("sam_hq.modeling_sam_hq.SamHQVisionSdpaAttention"),
    AttentionClass("transformers.models.internvl.modeling_internvl.InternVLVisionAttention", layout="BN(HD)"),
    _yolos("vjepa2.modeling_vjepa2.VJEPA2RopeAttention", made="query_layer = self.apply_rotary_embeddings(query_layer"),
)
ATTENTION = (*_FLAT, *_HIERARCHICAL)

_COSINE = "cosine attention already, which bounds it"
_LINEAR = "linear attention: it has no softmax over q.k"

OTHERS = {
    "transformers.models.swinv2.modeling_swinv2.Swinv2SelfAttention": _COSINE,
    "transformers.models.swin2sr.modeling_swin2sr.Swin2SRSelfAttention": _COSINE,
    "transformers.models.mobilevitv2.modeling_mobilevitv2.MobileViTV2LinearSelfAttention": _LINEAR,
    "transformers.models.swiftformer.modeling_swiftformer.SwiftFormerEfficientAdditiveAttention": _LINEAR,
    "torch.nn.modules.activation.MultiheadAttention": "attention in torch's packed form, as pooling heads have it",
}
"""Attention that takes no norm, by class, and why."""
