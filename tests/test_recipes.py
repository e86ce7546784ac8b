"""Every shipped recipe: it parses, says in its head what it needs, and its model can be built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from retrofit.checkpoint import load_model
from retrofit.models import sites_of
from retrofit.recipe import Recipe, dump, load_recipe, parse, shipped

FOLDER = Path(__file__).parents[1] / "recipes"
NAMES = sorted(p.stem for p in FOLDER.glob("*.yaml"))
HF_CONFIGS: dict[str, Any] = {"google/vit-base-patch16-224": transformers.ViTConfig()}
"""Configurations that the hub has under these ids, as far as the structure goes."""


def text(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def test_all_recipes_are_seen_and_shipped() -> None:
    assert sorted(shipped()) == NAMES
    assert {"nano", "vit_base", "dinov2_small", "hf_vit_base"} <= set(NAMES)
    others = {p.name for p in FOLDER.iterdir()} - {f"{name}.yaml" for name in NAMES}
    assert {"README.md"} <= others <= {"README.md", "nano_report.png"}


@pytest.mark.parametrize("name", NAMES)
def test_it_resolves_and_comes_back(name: str) -> None:
    recipe = load_recipe(name)
    assert parse(yaml.safe_load(dump(recipe))) == recipe
    plan = recipe.plan()
    assert len(plan) == len(recipe.arms) * len(recipe.train.lr) * len(recipe.train.seeds)
    assert "baseline" in recipe.arms
    assert any(arm.qk_norm for arm in recipe.arms.values())


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_only_what_differs_from_the_defaults(name: str) -> None:
    content, defaults = yaml.safe_load(text(name)), yaml.safe_load(dump(Recipe()))
    for section in ("data", "train"):
        given = yaml.safe_load(dump(parse(content)))[section]
        same = [key for key in content.get(section, {}) if given[key] == defaults[section][key]]
        assert not [key for key in same if key not in ("source", "epochs", "batch_size", "seeds", "calibration_images")]


@pytest.mark.parametrize("name", NAMES)
def test_its_head_names_command_time_and_needs(name: str) -> None:
    head = text(name).partition("\nmodel:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert re.search(rf"retrofit pair {name}\b", head)
    assert re.search(r"make retrofit( MODEL=" + name + r"\b)?", head)
    assert re.search(r"minute|hour|not measured", head)
    assert re.search(r"GPU|network|cores", head)
    assert f"`{name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_its_model_can_be_built_and_has_sites(name: str, tmp_path: Path) -> None:
    """Without weights and network: structure, image size and model_args fit together."""
    recipe = load_recipe(name)
    source = recipe.model.source
    if source.startswith("hf/"):
        HF_CONFIGS[source.removeprefix("hf/")].save_pretrained(tmp_path)
        source = f"hf:{tmp_path}"
    size, args = recipe.data.image_size, recipe.model.model_args
    model = load_model(source, 7, image_size=size, model_args=args, pretrained=False)
    sites, skipped = sites_of(model)
    assert len(sites) >= 6
    assert not skipped
