"""A study that trains in a second: made images, random tiny models of both libraries, recipes over them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import timm
import torch
from PIL import Image
from timm.models import save_for_hf
from transformers import ViTConfig, ViTForImageClassification

from retrofit.recipe import Recipe, parse

torch.set_num_threads(1)  # waiting for a second thread costs such small models more than it saves

CLASSES = 4
SIZES = {"train": 40, "validation": 12, "test": 20}
TIMM_ARGS = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
QK_NORM = {"preset": "qwen3", "gain": "per_head"}


def write_images(folder: Path, sizes: Mapping[str, int] = SIZES, side: int = 16, contrast: int = 40) -> Path:
    """train.parquet, validation.parquet and test.parquet of noisy images, whose brightness tells the class."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate(sizes.items()):
        rng = np.random.default_rng(number)
        rows, labels = [], [i % CLASSES for i in range(count)]
        for i, label in enumerate(labels):
            pixels = rng.integers(0, 120, (side, side, 3)) + contrast * label
            Image.fromarray(pixels.astype(np.uint8)).save(file := io.BytesIO(), "PNG")
            rows.append({"bytes": file.getvalue(), "path": f"{split}-{i}.png"})
        names = [f"class {label}" for label in labels]
        pq.write_table(pa.table({"image": rows, "label": names}), folder / f"{split}.parquet")
    return folder


def write_timm(folder: Path, num_classes: int = 3, **changes: Any) -> Path:
    """A ViT with random weights, in timm's hub layout."""
    folder.mkdir(parents=True, exist_ok=True)
    args = {**TIMM_ARGS, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=num_classes, **args)
    save_for_hf(model, str(folder), model_config={"model_args": args}, safe_serialization=True)
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"] |= {"input_size": [3, 16, 16], "crop_pct": 1.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_hf(folder: Path, labels: Mapping[int, str] | None = None) -> Path:
    """A ViT with random weights, in transformers' layout."""
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=len(labels or {0: "", 1: "", 2: ""}),
    )
    if labels:
        config.id2label = dict(labels)
        config.label2id = {name: i for i, name in labels.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ViTForImageClassification(config).save_pretrained(folder)
    return folder


def content(data: Path, **train: Any) -> dict[str, Any]:
    """A recipe over made images: a timm checkpoint of random weights, baseline and retrofit, four steps in float32."""
    return {
        "model": f"timm:{write_timm(data.parent / f'{data.name}-checkpoint')}",
        "data": {
            "source": str(data),
            "image_size": 16,
            "calibration_images": 16,
            "held_out_images": 8,
        },
        "arms": {"baseline": {}, "retrofit": {"qk_norm": QK_NORM, "init": "match"}},
        "train": {"steps": 4, "batch_size": 8, "lr": 1e-3, "seeds": 0, "precision": "fp32", **train},
    }


def recipe(data: Path, *overrides: str, **train: Any) -> Recipe:
    return parse(content(data, **train), overrides)
