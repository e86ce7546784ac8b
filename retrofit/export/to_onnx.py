"""The target `onnx`: one graph with the norm in it, for any number of images, with class names in its metadata."""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.models import evaluating, family_of

MODEL = "model.onnx"
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_LARGE = 1 << 30
"""Bytes of weights from which on they lie in a file beside the graph, whose own format ends at 2 GB."""


def check_onnx(dtype: torch.dtype) -> None:
    """Raises RetrofitError where an ONNX file cannot be written or proven."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RetrofitError(f'--to onnx needs {", ".join(missing)}: pip install "qknorm-retrofit[onnx]"')
    if dtype == torch.bfloat16:
        raise RetrofitError("onnxruntime has no bfloat16 arithmetic on a CPU: take --dtype float32 or float16")


def write_onnx(model: nn.Module, folder: Path, images: Tensor) -> tuple[str, list[str]]:
    """model.onnx, from [B, 3, H, W] named `pixel_values` to `logits` (or its `features`)."""
    import onnx

    family = family_of(model)
    like = next(p for p in model.parameters() if p.is_floating_point())
    output = "logits" if family.head(model) is not None else "features"
    with evaluating(model), _quiet():
        program = torch.onnx.export(
            _Plain(model),
            (images[:2].to(like.device, like.dtype),),
            input_names=["pixel_values"],
            output_names=[output],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    graph = program.model_proto
    for node in graph.graph.node:
        for entry in [e for e in node.metadata_props if "stack_trace" in e.key]:  # paths of this machine
            node.metadata_props.remove(entry)
    _tell(graph, "labels", json.dumps(list(family.labels(model))))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    onnx.save(graph, folder / MODEL, save_as_external_data=size > _LARGE, location=f"{MODEL}.data")
    return "onnxruntime", []


class _Plain(nn.Module):
    """From images to one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        family = family_of(self.model)
        return family.logits(self.model, images) if family.head(self.model) else family.features(self.model, images)


def _tell(graph: Any, key: str, value: str) -> None:
    entry = graph.metadata_props.add()
    entry.key, entry.value = key, value


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own insides; what it makes is proven afterwards."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
