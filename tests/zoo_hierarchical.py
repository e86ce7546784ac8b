"""One small model for every attention class that is pooled, windowed or beside convolutions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from animal import SMALL, Animal, awake, hf_model, images, timm_model


def _made(path: str, name: str, sites: int, side: int = 32, **args: Any) -> Animal:
    """A model of timm from its class, where the registered functions take no other sizes."""

    def build() -> Any:
        from importlib import import_module

        import torch
        from timm.models import build_model_with_cfg

        module, _, cls = f"timm.models.{path}".rpartition(".")
        rooms = import_module(module)
        made = {key: value(rooms) if callable(value) else value for key, value in args.items()}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return awake(build_model_with_cfg(getattr(rooms, cls), name, False, num_classes=5, **made).eval())

    return Animal(build, sites, images(side))


def _sized(name: str, sites: int, side: int = 32, **args: Any) -> Animal:
    """A registered model of timm at other sizes."""
    return timm_model(name, sites=sites, side=side, defaults=True, **args)


def _alone(path: str, dim: int, **args: Any) -> Animal:
    """A block of timm that stands in models too large to be made for a test, behind patches of its own."""

    def build() -> Any:
        from importlib import import_module

        import torch
        from torch import nn

        module, _, cls = f"timm.models.{path}".rpartition(".")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            block = getattr(import_module(module), cls)(dim, dim, **args)
            model = nn.Sequential(nn.Conv2d(3, dim, 4, 4), block).eval()
        model.pretrained_cfg, model.forward_features = {}, model.forward
        return awake(model)

    return Animal(build, 1, images(32, "input"))


def _byo(attention: str, name: str, head: str, *facts: str, side: int = 32, **settings: Any) -> Animal:
    """A ResNet whose last stage attends, and whose head is an attention pool."""

    def config(rooms: Any) -> Any:
        block = rooms.ByoBlockCfg
        return rooms.ByoModelCfg(
            blocks=(
                block(type="bottle", d=1, c=32, s=2, gs=0, br=0.5),
                block(type="self_attn", d=2, c=64, s=2, gs=0, br=0.5),
            ),
            stem_chs=16,
            stem_type="3x3",
            stem_pool="",
            fixed_input_size=True,
            head_type=head,
            head_hidden_size=64,
            self_attn_layer=attention,
            self_attn_kwargs=settings,
        )

    animal = _made("byobnet.ByobNet", name, 2, side, model_cfg=config, img_size=side)
    return replace(animal, facts=frozenset(facts))


def _hf(model: str, config: str, sites: int, side: int = 64, **args: Any) -> Animal:
    """A model of transformers whose configuration has a value for each stage."""
    drop = tuple(key for key in SMALL if key not in args)
    return hf_model(model, config, sites=sites, drop=drop, inputs=images(side, "pixel_values"), **args)


_STAGES = {"hidden_sizes": [16, 32], "num_attention_heads": [2, 4], "depths": [1, 2], "num_encoder_blocks": 2}
_WINDOWS = {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_SAM = {
    "sites": 2,
    "drop": ("intermediate_size",),
    "initializer_range": 0.2,
    "image_size": 32,
    "window_size": 2,
    "global_attn_indexes": [1],
    "output_channels": 8,
}
_PYRAMID = {"embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 2), "depths": (1, 1, 1, 1)}

HIERARCHICAL: dict[str, Animal] = {
    "beit": timm_model("beit_base_patch16_224"),
    "beit_separate": timm_model(
        "beitv2_base_patch16_224", use_rel_pos_bias=False, use_shared_rel_pos_bias=True, use_abs_pos_emb=True
    ),
    "swin": _sized(
        "swin_tiny_patch4_window7_224", 4, img_size=32, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4
    ),
    "cait": timm_model("cait_xxs24_224", sites=3, depth=1, init_values=0.5, depth_token_only=2),
    "xcit": timm_model("xcit_nano_12_p16_224", sites=2, patch_size=16, depth=1, num_heads=2),
    "mvitv2": _made(
        "mvitv2.MultiScaleVit",
        "mvitv2_tiny",
        4,
        64,
        img_size=64,
        model_cfg=lambda rooms: rooms.MultiScaleVitCfg(depths=(1, 2, 1), embed_dim=16, num_heads=1),
    ),
    "mvitv2_class": _made(
        "mvitv2.MultiScaleVit",
        "mvitv2_base_cls",
        2,
        64,
        img_size=64,
        model_cfg=lambda rooms: rooms.MultiScaleVitCfg(depths=(1, 1), embed_dim=16, num_heads=1, use_cls_token=True),
    ),
    "maxvit": _sized("test_maxvit", 8, 64, img_size=64),
    "coatnet": _sized("test_coatnet", 3, 64, img_size=64),
    "davit": _sized("davit_tiny", 2, embed_dims=(16, 32), depths=(1, 1), num_heads=(2, 4), window_size=4),
    "levit": _sized("levit_128s", 4, 64, img_size=64, embed_dim=(32, 48), key_dim=8, num_heads=(2, 3), depth=(1, 2)),
    "levit_conv": _sized(
        "levit_conv_128s", 4, 64, img_size=64, embed_dim=(32, 48), key_dim=8, num_heads=(2, 3), depth=(1, 2)
    ),
    "pvt_v2": _sized("pvt_v2_b0", 4, 64, **_PYRAMID),
    "pvt_v2_linear": _sized("pvt_v2_b2_li", 4, 64, **_PYRAMID),
    "twins_svt": _sized(
        "twins_svt_small", 4, 64, img_size=64, wss=(4, 4, 4, 4), **{**_PYRAMID, "depths": (2, 2, 0, 0)}
    ),
    "twins_pcpvt": _sized("twins_pcpvt_small", 4, 64, img_size=64, **_PYRAMID),
    "hiera": _sized("hiera_tiny_224", 4, 64, img_size=64, head_init_scale=1.0, embed_dim=16, stages=(1, 1, 1, 1)),
    "sam2": _sized(
        "sam2_hiera_tiny",
        5,
        64,
        head_init_scale=1.0,
        embed_dim=16,
        stages=(1, 1, 2, 1),
        global_att_blocks=(3,),
        window_spec=(8, 4, 4, 2),
    ),
    "caformer": _made(
        "metaformer.MetaFormer",
        "caformer_s18",
        2,
        64,
        depths=(1, 1, 1, 1),
        dims=(16, 32, 32, 64),
        token_mixers=lambda rooms: [rooms.SepConv, rooms.SepConv, rooms.Attention, rooms.Attention],
        norm_layers=lambda rooms: [rooms.LayerNorm2dNoBias] * 2 + [rooms.LayerNormNoBias] * 2,
    ),
    "nest": _made(
        "nest.Nest",
        "nest_tiny",
        3,
        64,
        img_size=64,
        drop_path_rate=0.0,
        embed_dims=(16, 32, 32),
        num_heads=(1, 2, 4),
        depths=(1, 1, 1),
    ),
    "volo": _made(
        "volo.VOLO",
        "volo_d1_224",
        5,
        img_size=32,
        layers=(1, 1, 1, 1),
        embed_dims=(16, 32, 32, 32),
        num_heads=(2, 2, 4, 4),
        stem_hidden_dim=8,
        use_aux_head=False,
    ),
    "convit": _made(
        "convit.ConVit",
        "convit_tiny",
        2,
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        local_up_to_layer=1,
    ),
    "nextvit": _alone("nextvit.NextTransformerBlock", 128, drop_path=0.0, sr_ratio=2),
    "tiny_vit": _made(
        "tiny_vit.TinyVit",
        "tiny_vit_5m_224",
        3,
        64,
        embed_dims=(16, 32, 32, 64),
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 4),
        window_sizes=(4, 4, 4, 2),
    ),
    "tnt": _sized(
        "tnt_s_patch16_224",
        4,
        img_size=32,
        embed_dim=32,
        depth=2,
        inner_dim=8,
        num_heads_inner=2,
        num_heads_outer=4,
    ),
    "visformer": _sized(
        "visformer_tiny", 4, 64, img_size=64, init_channels=8, embed_dim=32, depth=(1, 2, 2), num_heads=2
    ),
    "crossvit": _sized(
        "crossvit_tiny_240",
        4,
        48,
        img_size=48,
        img_scale=(1.0, 2 / 3),
        patch_size=(12, 16),
        embed_dim=(16, 32),
        depth=((1, 1, 1),),
        num_heads=(2, 4),
    ),
    "gcvit": _made(
        "gcvit.GlobalContextVit",
        "gcvit_xxtiny",
        5,
        64,
        img_size=64,
        depths=(2, 1, 1, 1),
        num_heads=(1, 2, 2, 4),
        embed_dim=8,
        window_ratio=(8, 8, 16, 32),
    ),
    "fastvit": _made(
        "fastvit.FastVit",
        "fastvit_sa12",
        1,
        64,
        layers=(1, 1, 1, 1),
        embed_dims=(8, 16, 16, 32),
        token_mixers=("repmixer", "repmixer", "repmixer", "attention"),
    ),
    "efficientformer": _made(
        "efficientformer.EfficientFormer",
        "efficientformer_l1",
        1,
        224,
        depths=(1, 1, 1, 1),
        embed_dims=(8, 16, 16, 32),
        num_vit=1,
    ),
    "efficientformer_v2": _made(
        "efficientformer_v2.EfficientFormerV2",
        "efficientformerv2_s0",
        3,
        64,
        img_size=64,
        depths=(1, 1, 1, 1),
        embed_dims=(8, 16, 16, 32),
        num_vit=1,
        mlp_ratios=lambda _: ((2,), (2,), (2,), (2,)),
    ),
    "efficientvit_msra": _sized(
        "efficientvit_m0",
        3,
        128,
        img_size=128,
        embed_dim=(16, 16, 32),
        key_dim=(4, 4, 8),
        depth=(1, 1, 1),
        num_heads=(2, 2, 4),
        window_size=(4, 4, 4),
    ),
    "shvit": _sized(
        "shvit_s1", 2, 64, embed_dim=(16, 32, 32), partial_dim=(8, 16, 16), depth=(1, 1, 1), types=("i", "s", "s")
    ),
    "iformer": _sized(
        "iformer_t",
        2,
        64,
        dims=(8, 16, 32, 32),
        depths=(1, 1, 3, 3),
        attn_groups=(0, 0, 1, 1),
        layer_scale_init_value=1.0,
    ),
    "lowformer": _sized(
        "lowformer_b0", 2, 64, width_list=(8, 8, 16, 32, 64), depth_list=(0, 1, 1, 1, 1), head_widths=(32, 32)
    ),
    "cpubone": _sized(
        "cpubone_nano", 2, 64, width_list=(8, 8, 16, 32, 64), depth_list=(0, 1, 1, 1, 1), head_widths=(32, 32)
    ),
    "botnet": _byo("bottleneck", "botnet26t_256", "attn_abs", "pool"),
    "halonet": _byo("halo", "halonet26t", "attn_rot", "pool", "pool_rope", block_size=4, halo_size=1),
    "multi_query": _alone(
        "_efficientnet_blocks.MobileAttention",
        32,
        num_heads=4,
        key_dim=8,
        value_dim=8,
        use_multi_query=True,
        query_strides=(2, 2),
        kv_stride=2,
        layer_scale_init_value=1.0,
    ),
    "attention_2d": _alone("_efficientnet_blocks.MobileAttention", 32, num_heads=4, layer_scale_init_value=1.0),
    "hf_swin": _hf("SwinForImageClassification", "SwinConfig", 4, 32, **_WINDOWS),
    "hf_donut_swin": _hf("DonutSwinForImageClassification", "DonutSwinConfig", 4, 32, **_WINDOWS),
    "hf_maskformer_swin": _hf("MaskFormerSwinModel", "MaskFormerSwinConfig", 4, 32, drop_path_rate=0.0, **_WINDOWS),
    "hf_segformer": _hf("SegformerForImageClassification", "SegformerConfig", 3, sr_ratios=[4, 1], **_STAGES),
    "hf_hiera": _hf(
        "HieraForImageClassification",
        "HieraConfig",
        4,
        image_size=[64, 64],
        embed_dim=16,
        depths=[1, 1, 1, 1],
    ),
    "hf_pvt": _hf(
        "PvtForImageClassification", "PvtConfig", 3, image_size=64, sequence_reduction_ratios=[4, 1], **_STAGES
    ),
    "hf_pvt_v2": _hf("PvtV2ForImageClassification", "PvtV2Config", 3, image_size=64, sr_ratios=[4, 1], **_STAGES),
    "hf_glpn": _hf("GLPNModel", "GLPNConfig", 3, sr_ratios=[4, 1], **_STAGES),
    "hf_mobilevit": _hf(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        9,
        128,
        image_size=128,
        hidden_sizes=[16, 16, 24],
        neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32],
        initializer_range=0.3,
    ),
    "hf_cvt": _hf(
        "CvtForImageClassification", "CvtConfig", 6, embed_dim=[16, 32, 32], num_heads=[1, 2, 4], depth=[1, 2, 3]
    ),
    "hf_levit": _hf(
        "LevitForImageClassification",
        "LevitConfig",
        5,
        128,
        image_size=128,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        initializer_range=0.12,
    ),
    "hf_vitdet": hf_model(
        "VitDetModel",
        "VitDetConfig",
        drop=("intermediate_size",),
        use_relative_position_embeddings=True,
        pretrain_image_size=32,
        window_block_indices=[0],
        window_size=2,
    ),
    "hf_timesformer": hf_model(
        "TimesformerModel",
        "TimesformerConfig",
        sites=4,
        inputs=images(name="pixel_values", frames=2),
        num_frames=2,
    ),
    "hf_blip2": hf_model("Blip2VisionModel", "Blip2VisionConfig", initializer_range=0.2),
    "hf_sam": hf_model("SamVisionModel", "SamVisionConfig", **_SAM),
    "hf_sam_eager": hf_model("SamVisionModel", "SamVisionConfig", attn_implementation="eager", **_SAM),
    "hf_sam_hq": hf_model("SamHQVisionModel", "SamHQVisionConfig", **_SAM),
    "hf_sam_hq_eager": hf_model("SamHQVisionModel", "SamHQVisionConfig", attn_implementation="eager", **_SAM),
    "hf_internvl": hf_model("InternVLVisionModel", "InternVLVisionConfig", image_size=[32, 32], patch_size=[8, 8]),
    "hf_vjepa2": replace(
        hf_model(
            "VJEPA2Model",
            "VJEPA2Config",
            sites=4,
            drop=("image_size", "intermediate_size"),
            inputs=images(name="pixel_values_videos", frames=4),
            hidden_size=48,
            num_attention_heads=4,
            crop_size=32,
            frames_per_clip=4,
            pred_hidden_size=48,
            pred_num_attention_heads=4,
            pred_num_hidden_layers=2,
        ),
        output=lambda result: result.predictor_output.last_hidden_state,
    ),
    "hf_eomt_dinov3": hf_model(
        "EomtDinov3ForUniversalSegmentation",
        "EomtDinov3Config",
        "rope",
        num_queries=4,
        num_blocks=1,
        num_upscale_blocks=1,
        num_register_tokens=1,
    ),
}
