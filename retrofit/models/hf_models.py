"""transformers' models. Lines are of transformers 5.24."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from timm.models import group_parameters
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, PreTrainedModel
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from retrofit.errors import ModelError
from retrofit.models.family import Family, Request, fresh_head, own_random_state
from retrofit.models.hf_attention import ATTENTION, OTHERS
from retrofit.models.hub import fetching
from retrofit.models.preprocess import Preprocess
from retrofit.models.site import AttentionClass
from retrofit.models.timm_models import TimmFamily
from retrofit.models.weights import read_weights

_BLOCKS = {
    "blocks": [
        (r"^(?:.*\.)?(?:layers?|blocks)\.(\d+)\.", None),
        (r"^(?:[^.]+\.)?(?:post_|final_)?(?:layer_?|rms_)?norm\.", (99999,)),  # the last norm goes with the last block
    ]
}
"""How a name tells a parameter's block, as timm.models.group_parameters reads it: transformers 5 writes `vit.layers.N`
or `dinov2.encoder.layer.N`, transformers 4 `vit.encoder.layer.N`."""
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


class TransformersFamily(Family):
    library = "transformers"
    attention: ClassVar[Sequence[AttentionClass]] = ATTENTION
    others: ClassVar[Mapping[str, str]] = OTHERS

    def registered(self) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        for model_type, cls in sorted(_vision_models().items()):
            yield model_type, partial(_from_defaults, cls, model_type)

    def owns(self, model: Any) -> bool:
        return isinstance(model, PreTrainedModel)

    def load(self, request: Request) -> Any:
        if request.local and not (Path(request.name) / "config.json").is_file():
            raise ModelError(
                f"{request.source}: {request.name} has no config.json, as transformers' folders have; "
                "use timm:DIR for a timm folder"
            )
        with fetching(request.source):
            try:
                config = AutoConfig.from_pretrained(request.name, trust_remote_code=False)
            except (ValueError, KeyError) as error:
                raise ModelError(f"{request.source} is no model that transformers knows: {_one_line(error)}") from error
        if config.model_type == "timm_wrapper":
            remedy = f"timm:{request.name}" if request.local else f"timm/{request.name.rpartition('/')[2]}"
            raise ModelError(f"{request.source} is a timm model; name it {remedy}")
        for key, value in request.model_args.items():
            setattr(config, key, value)
        classifies = any("ForImageClassification" in a for a in config.architectures or ())
        auto = AutoModelForImageClassification if classifies or request.classifier else AutoModel
        try:
            with fetching(request.source), own_random_state(request.seed):
                model: Any = self._make(auto, config, request)
        except ModelError:
            raise
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"{request.source} cannot be loaded by transformers: {_one_line(error)}") from error
        self.set_preprocess(model, _preprocess_of(request, config))
        return model.eval()

    def new_head(self, model: Any, num_classes: int, seed: int) -> None:
        old = self.head(model)
        if not isinstance(old, nn.Linear):
            raise ModelError(f"{type(model).__name__} cannot take a new classification head")
        weight = old.weight
        with own_random_state(seed):
            new = nn.Linear(old.in_features, num_classes)
        fresh_head(new, seed)
        model.classifier = new.to(device=weight.device, dtype=weight.dtype)
        model.num_labels = model.config.num_labels = num_classes

    @staticmethod
    def _make(auto: Any, config: Any, request: Request) -> Any:
        if not request.pretrained:
            return auto.from_config(config)
        told = {"config": config, "dtype": "float32", "output_loading_info": True}
        with _quiet():  # its report of missing and unexpected weights is judged below
            if request.local:
                with torch.device("meta"):
                    cls = type(auto.from_config(config))
                model, info = cls.from_pretrained(None, state_dict=read_weights(Path(request.name)), **told)
            else:
                model, info = auto.from_pretrained(request.name, trust_remote_code=False, **told)
        free = ("pooler.", *(["classifier."] if request.classifier else []))  # the tokens do not pass through a pooler
        lost = sorted(k for k in info["missing_keys"] if not k.startswith(free))
        if lost:
            raise ModelError(f"{request.source} lacks weights that {type(model).__name__} needs: {', '.join(lost[:5])}")
        normed = sorted(k for k in info["unexpected_keys"] if "q_norm" in k or "k_norm" in k)
        if normed:
            raise ModelError(
                f"{request.source} holds a QK-Norm ({normed[0]}, …) that {type(model).__name__} would drop silently; "
                "load the folder that retrofit wrote"
            )
        return model

    def config(self, model: Any) -> dict[str, Any]:
        config = model.config.to_dict()
        config.pop("_name_or_path", None)
        return {"class": type(model).__name__, "config": config}

    def build(self, config: Mapping[str, Any]) -> Any:
        name = config["class"]
        cls: Any = getattr(transformers, name, None)
        if name.startswith("_") or not hasattr(cls, "from_pretrained") or not hasattr(cls, "base_model_prefix"):
            raise ModelError(f"transformers {transformers.__version__} has no model {name}")
        with own_random_state(0):
            return cls(AutoConfig.for_model(**config["config"]))

    def forward(self, model: Any, images: Tensor) -> Any:
        name = "pixel_values_videos" if model.main_input_name == "pixel_values_videos" else "pixel_values"
        return model(**{name: images}, **self.call(model, images))

    def call(self, model: Any, images: Tensor) -> dict[str, Any]:
        # ViT and its kin resample position embeddings only when asked to; DINOv2 does by itself.
        asked = "interpolate_pos_encoding" in inspect.signature(type(model).forward).parameters
        resample = asked and images.shape[-1] != _vision(model.config).image_size
        return {"interpolate_pos_encoding": True} if resample else {}

    def logits(self, model: Any, images: Tensor) -> Tensor | None:
        return self.forward(model, images).logits if self.head(model) is not None else None

    def tokens(self, model: Any, images: Tensor) -> Tensor | None:
        headed = self.head(model) is not None
        body = model.base_model if headed else model
        if headed and body is model:  # a classifier over one tower of several, such as SigLIP's, is its own base
            body = next((m for m in model.children() if isinstance(m, PreTrainedModel)), model)
        tokens: Tensor | None = getattr(self.forward(body, images), "last_hidden_state", None)
        return tokens if tokens is not None and tokens.ndim == 3 else None

    def prefix_tokens(self, model: Any) -> int:
        kinds = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
        found = (p for name, p in model.named_parameters() if name.rpartition(".")[2] in kinds)
        return sum(p.shape[1] if p.ndim == 3 else 1 for p in found)

    def token_count(self, model: Any) -> int | None:
        patch = _side(getattr(_vision(model.config), "patch_size", None))
        side = self.preprocess(model).image_size
        return None if patch is None else (side // patch) ** 2 + self.prefix_tokens(model)

    def head(self, model: Any) -> nn.Module | None:
        head = getattr(model, "classifier", None)
        return head if isinstance(head, nn.Module) and not isinstance(head, nn.Identity) else None

    def no_weight_decay(self, model: Any) -> set[str]:
        names = {name for name, _ in model.named_parameters()}
        return {n for n in names if n.endswith(("_token", "_tokens", "class_embedding")) or "position_embedding" in n}

    def layers(self, model: Any) -> dict[str, int]:
        found = group_parameters(model, _BLOCKS, reverse=True)
        return {name: found[name] for name, _ in model.named_parameters()}

    def checkpoint_gradients(self, model: Any) -> None:
        if not model.supports_gradient_checkpointing:
            raise ModelError(f"transformers has no gradient checkpointing for {type(model).__name__}")
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})

    def preprocess(self, model: Any) -> Preprocess:
        known = getattr(model, "retrofit_preprocess", None)
        if isinstance(known, Preprocess):
            return known
        size = getattr(_vision(model.config), "image_size", None)
        request = Request(source=model.name_or_path, name=model.name_or_path, image_size=None)
        return _preprocess_of(request, model.config) if request.name else _preprocess_from({}, size)

    def set_preprocess(self, model: Any, preprocess: Preprocess) -> None:
        model.retrofit_preprocess = preprocess

    def labels(self, model: Any) -> tuple[str, ...]:
        names = [str(v) for _, v in sorted(model.config.id2label.items(), key=lambda kv: int(kv[0]))]
        made_up = all(n == f"LABEL_{i}" for i, n in enumerate(names))
        return () if made_up or self.head(model) is None else tuple(names)

    def set_labels(self, model: Any, labels: Sequence[str]) -> None:
        if labels:
            model.config.id2label = dict(enumerate(labels))
            model.config.label2id = {name: i for i, name in enumerate(labels)}

    def unfuse(self, model: Any) -> bool:
        # A class that chose its attention when built, such as data2vec-vision's, stays as it is without an error.
        model.set_attn_implementation("eager")
        return bool(model.config._attn_implementation == "eager")


def _from_defaults(cls: str, model_type: str) -> Any:
    return getattr(transformers, cls)(AutoConfig.for_model(model_type))


def _vision_models() -> dict[str, str]:
    """One class for each model type that transformers' own registries list for images or call a vision model."""
    tasks = (
        "IMAGE_CLASSIFICATION",
        "IMAGE",
        "BACKBONE",
        "VIDEO_CLASSIFICATION",
        "DEPTH_ESTIMATION",
        "SEMANTIC_SEGMENTATION",
        "UNIVERSAL_SEGMENTATION",
        "OBJECT_DETECTION",
        "MASK_GENERATION",
    )
    found: dict[str, str] = {}
    for task in tasks:
        for model_type, cls in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).items():
            found.setdefault(model_type, cls if isinstance(cls, str) else cls[0])
    for model_type, cls in modeling_auto.MODEL_MAPPING_NAMES.items():
        if model_type.endswith(("_vision", "_vision_model")):
            found.setdefault(model_type, cls if isinstance(cls, str) else cls[0])
    return found


class TimmWrapperFamily(TransformersFamily):
    """timm's models inside transformers' wrapper: what is timm's is asked of timm."""

    library = "timm_wrapper"
    _timm = TimmFamily()

    def registered(self) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        yield from ()

    def owns(self, model: nn.Module) -> bool:
        return super().owns(model) and hasattr(model, "timm_model")

    def new_head(self, model: Any, num_classes: int, seed: int) -> None:
        self._timm.new_head(model.timm_model, num_classes, seed)
        model.num_labels = model.config.num_labels = num_classes

    def tokens(self, model: Any, images: Tensor) -> Tensor | None:
        return self._timm.tokens(model.timm_model, images)

    def features(self, model: Any, images: Tensor) -> Tensor | None:
        return self._timm.features(model.timm_model, images)

    def prefix_tokens(self, model: Any) -> int:
        return self._timm.prefix_tokens(model.timm_model)

    def token_count(self, model: Any) -> int | None:
        return self._timm.token_count(model.timm_model)

    def head(self, model: Any) -> nn.Module | None:
        return self._timm.head(model.timm_model)

    def no_weight_decay(self, model: Any) -> set[str]:
        return {f"timm_model.{name}" for name in self._timm.no_weight_decay(model.timm_model)}

    def layers(self, model: Any) -> dict[str, int]:
        return {f"timm_model.{name}": layer for name, layer in self._timm.layers(model.timm_model).items()}

    def checkpoint_gradients(self, model: Any) -> None:
        self._timm.checkpoint_gradients(model.timm_model)

    def preprocess(self, model: Any) -> Preprocess:
        known = getattr(model, "retrofit_preprocess", None)
        return known if isinstance(known, Preprocess) else self._timm.preprocess(model.timm_model)

    def unfuse(self, model: Any) -> bool:
        return self._timm.unfuse(model.timm_model)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings and progress bar for the block."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _preprocess_of(request: Request, config: Any) -> Preprocess:
    """From the folder's or repository's preprocessor_config.json; ImageNet's figures where there is none."""
    try:
        content, _ = BaseImageProcessor.get_image_processor_dict(request.name)
    except OSError:
        content = {}
    return _preprocess_from(content, getattr(_vision(config), "image_size", None), request.image_size)


def _preprocess_from(content: Mapping[str, Any], model_size: Any, asked: int | None = None) -> Preprocess:
    resize = _side(content.get("size")) or _side(model_size) or 224
    crop = _side(content.get("crop_size")) if content.get("do_center_crop") else None
    return Preprocess(
        image_size=asked or crop or resize,
        mean=tuple(content.get("image_mean") or (0.485, 0.456, 0.406)),
        std=tuple(content.get("image_std") or (0.229, 0.224, 0.225)),
        interpolation=_RESAMPLE.get(content.get("resample", 3), "bicubic"),
        crop_pct=crop / resize if crop else 1.0,
    )


def _vision(config: Any) -> Any:
    """The image tower's part of a configuration, which may describe a text tower too."""
    return getattr(config, "vision_config", config)


def _side(size: Any) -> int | None:
    """Sizes come as 224, [224, 224], {"shortest_edge": 256} or {"height": 224, "width": 224}."""
    if isinstance(size, Mapping):
        size = size.get("shortest_edge") or size.get("height")
    if isinstance(size, list | tuple):
        size = size[-1]
    return int(size) if size else None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:199] + "…"
