"""The target `hf`: a folder for transformers' auto classes, with trust_remote_code where the model has QK-Norm."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, TimmWrapperModel

from retrofit.checkpoint import plain_tensors
from retrofit.export.modeling import PREFIX, Wrapped, describe_sites, modeling_source
from retrofit.models import family_named, family_of, own_random_state
from retrofit.models.preprocess import Preprocess
from retrofit.runfiles import write_json, write_text
from retrofit.surgery import spec_of

_SHARD = "5GB"
_PROCESSOR = "CLIPImageProcessor"
"""Resizes the shorter side, crops the centre, scales, normalises: no more, and that in every version."""
_RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}  # PIL's numbers


def write_hf(model: nn.Module, folder: Path, images: Tensor) -> tuple[str, list[str]]:
    """config.json, safetensors, preprocessor_config.json and, for a model with QK-Norm, its modeling file.

    A timm model goes into transformers' wrapper.
    """
    wrapped_model = in_transformers(model)
    write_json(folder / "preprocessor_config.json", image_processor(family_of(model).preprocess(model)))
    if spec_of(model) is None:
        with _no_bars():
            _save(wrapped_model, folder)
        return "transformers", []
    wrapped = Wrapped.of(wrapped_model)
    path = folder / f"{wrapped.module}.py"
    write_text(path, modeling_source(wrapped_model))
    with _imported(path) as module, own_random_state(0), _no_bars():
        config = own_config(wrapped_model, wrapped, module)
        ours = getattr(module, f"{PREFIX}{wrapped.model.__name__}")(config)
        ours.load_state_dict(wrapped_model.state_dict(), strict=True, assign=True)
        # The class that will load the weights also names them: conversions of names hang on the class.
        _save(ours, folder)
    return "transformers", []


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, state_dict=plain_tensors(model.state_dict()), max_shard_size=_SHARD)


def own_config(model: Any, wrapped: Wrapped, module: ModuleType) -> Any:
    """The model's configuration as one of the modeling file's class."""
    spec = spec_of(model)
    assert spec is not None
    told = model.config.to_dict()
    for key in ("model_type", "architectures", "_name_or_path", "transformers_version", "auto_map"):
        told.pop(key, None)
    config = getattr(module, f"{PREFIX}{wrapped.config.__name__}").from_dict(told)
    formula = {field.name: getattr(spec, field.name) for field in fields(module.QKNorm)}
    config.qk_norm = {"formula": formula, "sites": describe_sites(model, wrapped.inside)}
    config.auto_map = wrapped.auto_map
    config.image_processor_type = _PROCESSOR  # where a config tells of timm, transformers looks here for it
    return config


def in_transformers(model: nn.Module) -> Any:
    """The model itself where it is transformers' own, else the same module in transformers' wrapper for timm."""
    family = family_of(model)
    if family.library != "timm":
        return model
    told, labels = family.config(model), list(family.labels(model))
    headed = family.head(model) is not None
    config = TimmWrapperConfig.from_dict(
        {k: told[k] for k in ("architecture", "model_args", "pretrained_cfg", "num_classes")},
        **({"id2label": dict(enumerate(labels))} if labels else {}),
    )
    if labels:
        config.label2id = {name: i for i, name in enumerate(labels)}
    with own_random_state(0):
        wrapper: Any = (TimmWrapperForImageClassification if headed else TimmWrapperModel)(config)
    wrapper.timm_model = model
    family_named("timm_wrapper").set_preprocess(wrapper, family.preprocess(model))
    return wrapper.eval()


def image_processor(preprocess: Preprocess) -> dict[str, Any]:
    """preprocessor_config.json of an image processor that does what `preprocess` says."""
    side = preprocess.image_size
    return {
        "image_processor_type": _PROCESSOR,
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": int(side / preprocess.crop_pct)},
        "resample": _RESAMPLE[preprocess.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }


@contextmanager
def _imported(path: Path) -> Iterator[ModuleType]:
    """The module in a file that was written here and now; it is forgotten when the block ends."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.dont_write_bytecode = bytecode
        del sys.modules[path.stem]


@contextmanager
def _no_bars() -> Iterator[None]:
    from transformers.utils import logging as told

    bar, level = told.is_progress_bar_enabled(), told.get_verbosity()
    told.disable_progress_bar()
    told.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        told.set_verbosity(level)
        if bar:
            told.enable_progress_bar()
