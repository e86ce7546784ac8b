"""timm's models. Lines are of timm 1.0.31."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
from timm.data import resolve_model_data_config
from timm.models import group_parameters
from torch import Tensor, nn

from retrofit.errors import ModelError, nearest
from retrofit.models.family import Family, Request, fresh_head, own_random_state
from retrofit.models.hub import fetching
from retrofit.models.preprocess import Preprocess
from retrofit.models.timm_attention import ATTENTION, OTHERS
from retrofit.models.weights import read_weights

_ORIGIN = ("file", "source", "url", "state_dict")
"""Where the weights came from on this machine; of no use to another one."""


class TimmFamily(Family):
    library = "timm"
    attention = ATTENTION
    others = OTHERS

    def registered(self) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        for name in timm.list_models():
            yield name, partial(timm.create_model, name)

    def owns(self, model: Any) -> bool:
        return hasattr(model, "pretrained_cfg") and hasattr(model, "forward_features")

    def load(self, request: Request) -> Any:
        config = _folder_config(request) if request.local else {}
        name = f"local-dir:{request.name}" if request.local else _known(request.name)
        architecture = config["architecture"] if request.local else name
        cfg = config.get("pretrained_cfg") or timm.models.get_pretrained_cfg(architecture).to_dict()
        args = dict(request.model_args)
        if request.image_size is not None and cfg.get("fixed_input_size"):
            args.setdefault("img_size", request.image_size)
        if request.local and request.pretrained and not cfg.get("custom_load"):
            state = read_weights(Path(request.name))
            args["pretrained_cfg_overlay"] = {"source": "", "file": "", "state_dict": state}
        try:
            with fetching(request.source), own_random_state(request.seed):
                model: Any = timm.create_model(name, pretrained=request.pretrained, **args)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ModelError(f"{request.source} cannot be built by timm: {_reason(error)}") from error
        args.pop("pretrained_cfg_overlay", None)
        model.pretrained_cfg = {k: v for k, v in model.pretrained_cfg.items() if k != "state_dict"}
        if not hasattr(model, "_model_args"):  # timm before 1.0.21 does not keep what it was called with
            model._model_args = {**config.get("model_args", {}), **args}
        side = request.image_size or args.get("img_size")  # timm's own configuration does not learn of img_size
        if side:
            side = side if isinstance(side, int) else side[-1]
            self.set_preprocess(model, replace(self.preprocess(model), image_size=side))
        return model.eval()

    def new_head(self, model: Any, num_classes: int, seed: int) -> None:
        if not hasattr(model, "reset_classifier"):
            raise ModelError(f"{type(model).__name__} cannot take a new classification head")
        with own_random_state(seed):
            model.reset_classifier(num_classes)
        head = self.head(model)
        assert head is not None
        like = next(p for p in model.parameters() if p.is_floating_point())
        fresh_head(head.to(device=like.device, dtype=like.dtype), seed)
        self.set_labels(model, ())

    def config(self, model: Any) -> dict[str, Any]:
        args = {k: v for k, v in getattr(model, "_model_args", {}).items() if k != "num_classes"}
        config = {
            "architecture": model.pretrained_cfg.get("architecture"),
            "num_classes": model.num_classes,
            "model_args": args,
            "pretrained_cfg": {k: v for k, v in model.pretrained_cfg.items() if v is not None and k not in _ORIGIN},
        }
        try:
            return dict(json.loads(json.dumps(config)))
        except TypeError as error:
            raise ModelError(f"the model was built with arguments that a file cannot hold: {error}") from None

    def build(self, config: Mapping[str, Any]) -> Any:
        with own_random_state(0):
            model: Any = timm.create_model(
                config["architecture"], num_classes=config["num_classes"], **config["model_args"]
            )
        model._model_args = dict(config["model_args"])
        model.pretrained_cfg = dict(config["pretrained_cfg"])
        return model

    def forward(self, model: Any, images: Tensor) -> Any:
        return model(images)

    def logits(self, model: Any, images: Tensor) -> Tensor | None:
        return model(images) if self.head(model) is not None else None

    def tokens(self, model: Any, images: Tensor) -> Tensor | None:
        features = self.features(model, images)
        return features if features is not None and features.ndim == 3 else None

    def features(self, model: Any, images: Tensor) -> Tensor | None:
        features = model.forward_features(images)
        return features if isinstance(features, Tensor) else None

    def prefix_tokens(self, model: Any) -> int:
        return int(getattr(model, "num_prefix_tokens", 0))

    def token_count(self, model: Any) -> int | None:
        patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
        return None if patches is None else int(patches) + self.prefix_tokens(model)

    def head(self, model: Any) -> nn.Module | None:
        if not getattr(model, "num_classes", 0):
            return None
        classifier = model.get_classifier()
        return nn.ModuleList(classifier) if isinstance(classifier, tuple) else classifier

    def no_weight_decay(self, model: Any) -> set[str]:
        return set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()

    def layers(self, model: Any) -> dict[str, int]:
        if not hasattr(model, "group_matcher"):
            raise ModelError(f"timm does not tell the layers of {type(model).__name__} apart")
        found = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
        return {name: found[name] for name, _ in model.named_parameters()}

    def checkpoint_gradients(self, model: Any) -> None:
        try:
            model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError):
            raise ModelError(f"timm has no gradient checkpointing for {type(model).__name__}") from None

    def preprocess(self, model: Any) -> Preprocess:
        config = resolve_model_data_config(model)
        embed: Any = getattr(model, "patch_embed", None)  # knows of an img_size that timm's configuration does not
        fixed = embed.img_size if getattr(embed, "strict_img_size", False) else None
        return Preprocess(
            image_size=int((fixed or config["input_size"])[-1]),
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            interpolation=config["interpolation"],
            crop_pct=float(config["crop_pct"]),
        )

    def set_preprocess(self, model: Any, preprocess: Preprocess) -> None:
        figures = {k: v for k, v in asdict(preprocess).items() if k != "image_size"}
        size = (3, preprocess.image_size, preprocess.image_size)
        model.pretrained_cfg = {**model.pretrained_cfg, **figures, "input_size": size}

    def labels(self, model: Any) -> tuple[str, ...]:
        return tuple(model.pretrained_cfg.get("label_names") or ())

    def set_labels(self, model: Any, labels: Sequence[str]) -> None:
        model.pretrained_cfg = {**model.pretrained_cfg, "label_names": list(labels) or None}

    def unfuse(self, model: Any) -> bool:
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
        return True


def _known(name: str) -> str:
    """The name, if timm has such a model. Raises ModelError with the nearest names."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise ModelError(f"timm has no model {name}{nearest(name, [*timm.list_models(), *timm.list_pretrained()])}")
    tags = [p.partition(".")[2] for p in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        raise ModelError(f"timm has no weights {name}; {architecture} has: {', '.join(tags) or 'none'}")
    return name


def _folder_config(request: Request) -> dict[str, Any]:
    """config.json of a folder in timm's hub layout."""
    path = Path(request.name)
    if not path.is_dir():
        raise ModelError(f"{request.source}: there is no folder {path}")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict) or "architecture" not in config:
            raise ValueError("no architecture")
    except (OSError, ValueError):
        raise ModelError(
            f"{request.source}: {path} has no config.json that names timm's architecture, as timm's hub folders have; "
            "use hf:DIR for a transformers folder"
        ) from None
    return config


def _reason(error: BaseException) -> str:
    """The first line, and the next where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:400]
