"""Fine-tuning at another image size, for other classes: the library resamples, the head fits, names are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_timm
from timm.layers import resample_abs_pos_embed
from timm.models import save_for_hf
from tiny_study import content, write_hf, write_images, write_timm
from torch import nn
from torch.nn import functional as F

import retrofit
from retrofit.data import eval_batches, open_splits
from retrofit.models import family_of
from retrofit.pair import run_pair
from retrofit.recipe import parse
from retrofit.runfiles import RunKey, read_json, read_jsonl
from retrofit.train import steps_of

KEY = {arm: RunKey.of(arm, 1e-3, 0, "fp32").folder for arm in ("baseline", "retrofit")}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of 16 x 16 pixels and three classes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {"timm": f"timm:{write_timm(folder / 'timm')}", "hf": f"hf:{write_hf(folder / 'hf')}"}


def study(data: Path, source: str, size: int = 16, **train: Any) -> dict[str, Any]:
    document = {**content(data, **train), "model": source}
    document["data"]["image_size"] = size
    return document


@pytest.mark.parametrize("library", ["timm", "hf"])
@pytest.mark.parametrize("size", [8, 24])
def test_a_study_at_another_image_size(tmp_path: Path, sources: dict[str, str], library: str, size: int) -> None:
    recipe = parse(study(write_images(tmp_path / "data"), sources[library], size, steps=3))
    run_pair(recipe, tmp_path / "run")
    test = open_splits(recipe.data).test
    for folder in KEY.values():
        model = retrofit.load(tmp_path / "run" / folder / "final")
        family = family_of(model)
        assert family.preprocess(model).image_size == size
        pixels = torch.cat([batch.pixels for batch in eval_batches(test, family.preprocess(model), 20)])
        assert pixels.shape == (20, 3, size, size)
        logits = np.load(tmp_path / "run" / folder / "predictions.npz")["test_logits"]
        with torch.no_grad():
            np.testing.assert_allclose(family.logits(model, pixels).numpy(), logits, atol=1e-5)
        heads = read_jsonl(tmp_path / "run" / folder / "probes.jsonl")[0]["layers"]
        assert heads[0]["entropy"] <= np.log((size // 4) ** 2 + 1)  # as many tokens as that size has


def test_position_embeddings_are_resampled_by_the_library(tmp_path: Path, sources: dict[str, str]) -> None:
    """timm: bicubic with antialiasing, when loading or, where a model says so, in every forward pass. transformers:
    bicubic, in every forward pass."""
    fixed = tiny_timm(img_size=16, patch_size=4, depth=2)
    args = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    save_for_hf(fixed, str(tmp_path / "fixed"), model_config={"model_args": args}, safe_serialization=True)
    images = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    for source, resized in ((f"timm:{tmp_path / 'fixed'}", 37), (sources["timm"], 17)):
        small, large = (retrofit.load_model(source, image_size=size) for size in (16, 24))
        assert large.pos_embed.shape[1] == resized
        small.pos_embed = nn.Parameter(resample_abs_pos_embed(small.pos_embed, [6, 6]))
        small.patch_embed.img_size, small.patch_embed.grid_size, small.dynamic_img_size = (24, 24), (6, 6), False
        small.patch_embed.strict_img_size = False
        small.patch_embed.flatten, small.patch_embed.output_fmt = True, "NCHW"
        with torch.no_grad():
            torch.testing.assert_close(family_of(large).logits(large, images), small(images), atol=1e-5, rtol=1e-4)
    model = retrofit.load_model(sources["hf"], image_size=24)
    stored = model.vit.embeddings.position_embeddings
    grid = stored[:, 1:].reshape(1, 4, 4, 32).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, (6, 6), mode="bicubic", align_corners=False).permute(0, 2, 3, 1).reshape(1, 36, 32)
    patches = model.vit.embeddings.patch_embeddings.projection(images).flatten(2).transpose(1, 2)
    tokens = torch.cat([model.vit.embeddings.cls_token.expand(2, -1, -1), patches], 1)
    tokens = tokens + torch.cat([stored[:, :1], grid], 1)
    for layer in model.vit.layers:
        tokens = layer(tokens)
    expected = model.classifier(model.vit.layernorm(tokens)[:, 0])
    with torch.no_grad():
        torch.testing.assert_close(family_of(model).logits(model, images), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("library", ["timm", "hf"])
@pytest.mark.parametrize("classes", [2, 7])
def test_any_number_of_classes_with_their_names(
    tmp_path: Path, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch, library: str, classes: int
) -> None:
    monkeypatch.setattr("tiny_study.CLASSES", classes)
    data = write_images(tmp_path / "data", {"train": 21, "validation": 7, "test": 7})
    run_pair(parse(study(data, sources[library], steps=2, mixup=0.5, batch_size=7)), tmp_path / "run")
    for folder in KEY.values():
        result = read_json(tmp_path / "run" / folder / "result.json")
        assert (result["status"], result["classes"]) == ("finished", classes)
        assert np.load(tmp_path / "run" / folder / "predictions.npz")["test_logits"].shape == (7, classes)
        model = retrofit.load(tmp_path / "run" / folder / "final")
        assert family_of(model).labels(model) == tuple(f"class {i}" for i in range(classes))


def test_defaults_are_sane_without_any_flag(tmp_path: Path) -> None:
    """A recipe that names model and images alone: AdamW, warm-up and a cosine, clipping, ten epochs."""
    data = write_images(tmp_path / "data")
    recipe = parse({"model": f"timm:{write_timm(tmp_path / 'timm')}", "data": {"source": str(data)}})
    train = recipe.train
    assert (train.optimizer, train.schedule, train.warmup, train.clip_grad) == ("adamw", "cosine", 0.1, 1.0)
    assert (train.mixup, train.cutmix, train.ema, train.layer_decay, train.freeze) == (0, 0, None, 1.0, "none")
    assert steps_of(train, 4000) == 10 * (4000 // train.batch_size)
    run_pair(recipe, tmp_path / "run")
    result = read_json(tmp_path / "run" / "baseline" / "lr0.0001-s0" / "result.json")
    assert (result["status"], result["steps"]) == ("finished", 10)
