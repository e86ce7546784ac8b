"""One small model for every attention class that surgery knows, made offline, with how to run it.

Those whose attention is pooled, windowed or beside convolutions stand in zoo_hierarchical.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from animal import SMALL, Animal, hf_model, images, timm_model
from zoo_hierarchical import HIERARCHICAL


def _siglip2_inputs() -> dict[str, Any]:
    import torch

    pixels = torch.randn(2, 16, 192, generator=torch.Generator().manual_seed(7))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[4, 4], [4, 3]])}


def _pixtral_inputs() -> dict[str, Any]:
    return {**images(name="pixel_values")(), "image_sizes": [(32, 32), (32, 32)]}


def _last_map(result: Any) -> Any:
    return result.feature_maps[-1]


_RATIO = {"drop": ("intermediate_size",), "mlp_ratio": 2}

FLAT: dict[str, Animal] = {
    "vit": timm_model("vit_tiny_patch16_224", "native"),
    "deit_distilled": timm_model("deit_tiny_distilled_patch16_224", "native"),
    "dinov2": timm_model("vit_small_patch14_reg4_dinov2", "native"),
    "siglip": timm_model("vit_base_patch16_siglip_224", "pool", "native"),
    "parallel_things": timm_model("vit_small_patch16_18x2_224", "native", sites=4),
    "naflexvit": timm_model("naflexvit_base_patch16_gap", "native", img_size=None),
    "relpos": timm_model("vit_relpos_small_patch16_224", "native"),
    "sam": timm_model("samvit_base_patch16_224", "native", side=64, img_size=64, patch_size=16, window_size=2),
    "parallel": timm_model("vit_pwee_patch16_reg1_gap_256", "native"),
    "diff_parallel": timm_model("vit_dpwee_patch16_reg1_gap_256", "native"),
    "diff": timm_model("vit_dlittle_patch16_reg1_gap_256", "native"),
    "eva": timm_model("eva_giant_patch14_224", "native"),
    "eva02": timm_model("eva02_tiny_patch14_224", "rope", "native"),
    "dinov3": timm_model("vit_small_patch16_dinov3", "rope", "native"),
    "pe": timm_model("vit_pe_core_tiny_patch16_384", "rope", "pool", "native"),
    "rope_grouped": timm_model("vit_small_patch16_rope_224", "rope", attn_type="rope", num_kv_heads=2, qkv_fused=False),
    "hf_vit": hf_model("ViTForImageClassification", "ViTConfig"),
    "hf_deit": hf_model("DeiTForImageClassification", "DeiTConfig"),
    "hf_dinov2": hf_model("Dinov2ForImageClassification", "Dinov2Config", **_RATIO),
    "hf_dinov2_registers": hf_model(
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", num_register_tokens=2, **_RATIO
    ),
    "hf_beit": hf_model("BeitForImageClassification", "BeitConfig", use_relative_position_bias=True),
    "hf_vit_mae": hf_model("ViTMAEModel", "ViTMAEConfig", mask_ratio=0.0),
    "hf_vit_msn": hf_model("ViTMSNForImageClassification", "ViTMSNConfig"),
    "hf_ijepa": hf_model("IJepaForImageClassification", "IJepaConfig"),
    "hf_pixio": hf_model("PixioModel", "PixioConfig", **_RATIO),
    "hf_vivit": hf_model(
        "VivitModel",
        "VivitConfig",
        inputs=images(name="pixel_values", frames=4),
        num_frames=4,
        tubelet_size=[2, 8, 8],
        drop=("patch_size",),
    ),
    "hf_rf_detr_dinov2": replace(
        hf_model("RfDetrDinov2Backbone", "RfDetrDinov2Config", "unpicklable", num_windows=2, **_RATIO), output=_last_map
    ),
    "hf_lw_detr_vit": replace(
        hf_model(
            "LwDetrViTBackbone",
            "LwDetrViTConfig",
            "unpicklable",
            num_windows=4,
            pretrain_image_size=32,
            window_block_indices=[0],
            **_RATIO,
        ),
        output=_last_map,
    ),
    "hf_tipsv2": hf_model("Tipsv2VisionModel", "Tipsv2VisionConfig", **_RATIO),
    "hf_clip": hf_model("CLIPVisionModel", "CLIPVisionConfig"),
    "hf_metaclip_2": hf_model("MetaClip2VisionModel", "MetaClip2VisionConfig"),
    "hf_siglip": hf_model("SiglipVisionModel", "SiglipVisionConfig"),
    "hf_chinese_clip": hf_model("ChineseCLIPVisionModel", "ChineseCLIPVisionConfig"),
    "hf_idefics3": hf_model("Idefics3VisionTransformer", "Idefics3VisionConfig"),
    "hf_smolvlm": hf_model("SmolVLMVisionTransformer", "SmolVLMVisionConfig"),
    "hf_siglip2": hf_model(
        "Siglip2VisionModel", "Siglip2VisionConfig", inputs=_siglip2_inputs, num_patches=16, drop=("image_size",)
    ),
    "hf_aimv2": hf_model("Aimv2VisionModel", "Aimv2VisionConfig"),
    "hf_eomt": hf_model(
        "EomtForUniversalSegmentation", "EomtConfig", num_queries=4, num_blocks=1, num_upscale_blocks=1, **_RATIO
    ),
    "hf_yolos": hf_model("YolosModel", "YolosConfig", num_detection_tokens=3, image_size=[32, 32]),
    "hf_dpt": hf_model("DPTModel", "DPTConfig"),
    "hf_vitpose": replace(
        hf_model(
            "VitPoseBackbone", "VitPoseBackboneConfig", "unpicklable", image_size=[32, 32], patch_size=[8, 8], **_RATIO
        ),
        output=_last_map,
    ),
    "hf_videomae": hf_model(
        "VideoMAEModel", "VideoMAEConfig", inputs=images(name="pixel_values", frames=4), num_frames=4, tubelet_size=2
    ),
    "hf_data2vec": hf_model(
        "Data2VecVisionForImageClassification", "Data2VecVisionConfig", use_relative_position_bias=True
    ),
    "hf_data2vec_eager": hf_model(
        "Data2VecVisionForImageClassification",
        "Data2VecVisionConfig",
        use_shared_relative_position_bias=True,
        attn_implementation="eager",
    ),
    "hf_dinov3": hf_model("DINOv3ViTModel", "DINOv3ViTConfig", "rope", num_register_tokens=1),
    "hf_pixtral": hf_model("PixtralVisionModel", "PixtralVisionConfig", "rope", inputs=_pixtral_inputs),
    "hf_timm_wrapper": hf_model(
        "TimmWrapperForImageClassification",
        "TimmWrapperConfig",
        architecture="vit_tiny_patch16_224",
        model_args={"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4},
        drop=tuple(SMALL),
    ),
}

ZOO: dict[str, Animal] = {**FLAT, **HIERARCHICAL}


def _backbone() -> Any:
    model = ZOO["dinov2"].build()
    model.reset_classifier(0)
    return model


CLASSIFIERS: dict[str, Callable[[], Any]] = {
    **{
        f"timm_{name}": ZOO[name].build
        for name in (
            "vit",
            "deit_distilled",
            "dinov2",
            "siglip",
            "relpos",
            "eva02",
            "dinov3",
            "parallel_things",
            "beit",
            "swin",
        )
    },
    "timm_backbone": _backbone,
    "hf_vit": ZOO["hf_vit"].build,
    "hf_deit": ZOO["hf_deit"].build,
    "hf_dinov2": ZOO["hf_dinov2"].build,
    "hf_dinov2_registers": ZOO["hf_dinov2_registers"].build,
    "hf_dinov3": ZOO["hf_dinov3"].build,
    "hf_siglip": hf_model(
        "SiglipForImageClassification", "SiglipConfig", drop=tuple(SMALL), vision_config=SMALL, num_labels=5
    ).build,
    "hf_clip": hf_model(
        "CLIPForImageClassification", "CLIPConfig", drop=tuple(SMALL), vision_config=SMALL, num_labels=5
    ).build,
    "hf_beit": ZOO["hf_beit"].build,
    "hf_swin": ZOO["hf_swin"].build,
    "hf_timm_wrapper": ZOO["hf_timm_wrapper"].build,
}
"""Models to export: classifiers, a backbone, and DINOv3, for which transformers has no classifier."""
