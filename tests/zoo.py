"""One small model for every attention class that surgery knows, made offline, with how to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Animal:
    """`build()` gives the model in evaluation mode, `inputs()` what it is called with."""

    build: Callable[[], Any]
    sites: int
    inputs: Callable[[], dict[str, Any]]
    facts: frozenset[str] = field(default_factory=frozenset)
    """rope: a rotation follows the norm; pool: an attention pool is left alone; native: timm's qk_norm=True fits."""

    def run(self, model: Any) -> Any:
        """The first tensor that the model returns."""
        import torch

        result = model(**self.inputs())
        return result if isinstance(result, torch.Tensor) else result[0]


def _images(side: int = 32, name: str = "x", *, frames: int = 0) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        import torch

        shape = (2, frames, 3, side, side) if frames else (2, 3, side, side)
        return {name: torch.randn(shape, generator=torch.Generator().manual_seed(7))}

    return make


def _timm(name: str, *facts: str, sites: int = 2, side: int = 32, defaults: bool = False, **args: Any) -> Animal:
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}

    def build() -> Any:
        import timm
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(0)
            return timm.create_model(name, num_classes=5, **{**({} if defaults else small), **args}).eval()

    return Animal(build, sites, _images(side), frozenset(facts))


_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


def _hf(
    model: str,
    config: str,
    *facts: str,
    sites: int = 2,
    drop: tuple[str, ...] = (),
    inputs: Callable[[], dict[str, Any]] | None = None,
    **args: Any,
) -> Animal:
    def build() -> Any:
        import torch
        import transformers

        settings = {k: v for k, v in {**_SMALL, **args}.items() if k not in drop}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()

    return Animal(build, sites, inputs or _images(name="pixel_values"), frozenset(facts))


def _siglip2_inputs() -> dict[str, Any]:
    import torch

    pixels = torch.randn(2, 16, 192, generator=torch.Generator().manual_seed(7))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[4, 4], [4, 3]])}


def _pixtral_inputs() -> dict[str, Any]:
    return {**_images(name="pixel_values")(), "image_sizes": [(32, 32), (32, 32)]}


_RATIO = {"drop": ("intermediate_size",), "mlp_ratio": 2}

ZOO: dict[str, Animal] = {
    "vit": _timm("vit_tiny_patch16_224", "native"),
    "deit_distilled": _timm("deit_tiny_distilled_patch16_224", "native"),
    "dinov2": _timm("vit_small_patch14_reg4_dinov2", "native"),
    "siglip": _timm("vit_base_patch16_siglip_224", "pool", "native"),
    "parallel_things": _timm("vit_small_patch16_18x2_224", "native", sites=4),
    "naflexvit": _timm("naflexvit_base_patch16_gap", "native", img_size=None),
    "relpos": _timm("vit_relpos_small_patch16_224", "native"),
    "sam": _timm("samvit_base_patch16_224", "native", side=64, img_size=64, patch_size=16, window_size=2),
    "parallel": _timm("vit_pwee_patch16_reg1_gap_256", "native"),
    "diff_parallel": _timm("vit_dpwee_patch16_reg1_gap_256", "native"),
    "diff": _timm("vit_dlittle_patch16_reg1_gap_256", "native"),
    "eva": _timm("eva_giant_patch14_224", "native"),
    "eva02": _timm("eva02_tiny_patch14_224", "rope", "native"),
    "dinov3": _timm("vit_small_patch16_dinov3", "rope", "native"),
    "pe": _timm("vit_pe_core_tiny_patch16_384", "rope", "pool", "native"),
    "rope_grouped": _timm("vit_small_patch16_rope_224", "rope", attn_type="rope", num_kv_heads=2, qkv_fused=False),
    "hf_vit": _hf("ViTForImageClassification", "ViTConfig"),
    "hf_deit": _hf("DeiTForImageClassification", "DeiTConfig"),
    "hf_dinov2": _hf("Dinov2ForImageClassification", "Dinov2Config", **_RATIO),
    "hf_dinov2_registers": _hf(
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", num_register_tokens=2, **_RATIO
    ),
    "hf_beit": _hf("BeitForImageClassification", "BeitConfig", use_relative_position_bias=True),
    "hf_vit_mae": _hf("ViTMAEModel", "ViTMAEConfig", mask_ratio=0.0),
    "hf_vit_msn": _hf("ViTMSNForImageClassification", "ViTMSNConfig"),
    "hf_ijepa": _hf("IJepaForImageClassification", "IJepaConfig"),
    "hf_pixio": _hf("PixioModel", "PixioConfig", **_RATIO),
    "hf_vivit": _hf(
        "VivitModel",
        "VivitConfig",
        inputs=_images(name="pixel_values", frames=4),
        num_frames=4,
        tubelet_size=[2, 8, 8],
        drop=("patch_size",),
    ),
    "hf_clip": _hf("CLIPVisionModel", "CLIPVisionConfig"),
    "hf_metaclip_2": _hf("MetaClip2VisionModel", "MetaClip2VisionConfig"),
    "hf_siglip": _hf("SiglipVisionModel", "SiglipVisionConfig"),
    "hf_siglip2": _hf(
        "Siglip2VisionModel", "Siglip2VisionConfig", inputs=_siglip2_inputs, num_patches=16, drop=("image_size",)
    ),
    "hf_aimv2": _hf("Aimv2VisionModel", "Aimv2VisionConfig"),
    "hf_eomt": _hf(
        "EomtForUniversalSegmentation", "EomtConfig", num_queries=4, num_blocks=1, num_upscale_blocks=1, **_RATIO
    ),
    "hf_yolos": _hf("YolosModel", "YolosConfig", num_detection_tokens=3, image_size=[32, 32]),
    "hf_dpt": _hf("DPTModel", "DPTConfig"),
    "hf_videomae": _hf(
        "VideoMAEModel", "VideoMAEConfig", inputs=_images(name="pixel_values", frames=4), num_frames=4, tubelet_size=2
    ),
    "hf_data2vec": _hf("Data2VecVisionForImageClassification", "Data2VecVisionConfig", use_relative_position_bias=True),
    "hf_data2vec_eager": _hf(
        "Data2VecVisionForImageClassification",
        "Data2VecVisionConfig",
        use_shared_relative_position_bias=True,
        attn_implementation="eager",
    ),
    "hf_dinov3": _hf("DINOv3ViTModel", "DINOv3ViTConfig", "rope", num_register_tokens=1),
    "hf_pixtral": _hf("PixtralVisionModel", "PixtralVisionConfig", "rope", inputs=_pixtral_inputs),
    "hf_timm_wrapper": _hf(
        "TimmWrapperForImageClassification",
        "TimmWrapperConfig",
        architecture="vit_tiny_patch16_224",
        model_args={"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4},
        drop=tuple(_SMALL),
    ),
}


CLASSIFIERS: dict[str, Callable[[], Any]] = {
    **{
        f"timm_{name}": ZOO[name].build
        for name in ("vit", "deit_distilled", "dinov2", "siglip", "relpos", "eva02", "dinov3", "parallel_things")
    },
    "hf_vit": ZOO["hf_vit"].build,
    "hf_deit": ZOO["hf_deit"].build,
    "hf_dinov2": ZOO["hf_dinov2"].build,
    "hf_dinov2_registers": ZOO["hf_dinov2_registers"].build,
    "hf_dinov3": ZOO["hf_dinov3"].build,
    "hf_siglip": _hf(
        "SiglipForImageClassification", "SiglipConfig", drop=tuple(_SMALL), vision_config=_SMALL, num_labels=5
    ).build,
    "hf_clip": _hf(
        "CLIPForImageClassification", "CLIPConfig", drop=tuple(_SMALL), vision_config=_SMALL, num_labels=5
    ).build,
    "hf_beit": ZOO["hf_beit"].build,
    "hf_timm_wrapper": ZOO["hf_timm_wrapper"].build,
}
"""Models to export: classifiers, and DINOv3, for which transformers has none."""
