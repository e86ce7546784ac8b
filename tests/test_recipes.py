"""Every shipped recipe: it parses, says in its head what it needs, and its arms and their optimizers can be built."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from retrofit.checkpoint import load_model
from retrofit.models import family_of
from retrofit.qknorm import PRESETS, QKNorm
from retrofit.recipe import Recipe, dump, load_recipe, parse, shipped
from retrofit.surgery import insert_blank, remove_qk_norm, survey
from retrofit.train.optim import optimizer_of

FOLDER = Path(__file__).parents[1] / "recipes"
NAMES = sorted(p.stem for p in FOLDER.glob("*.yaml"))
HF_CONFIGS: dict[str, Any] = {
    "google/vit-base-patch16-224-in21k": transformers.ViTConfig(),
    "facebook/dinov2-base": transformers.Dinov2Config(image_size=518),
}
"""Configurations that the hub has under these ids, as far as the structure goes."""
PLANS = {
    **dict.fromkeys(("vit_tiny", "vit_small", "vit_base", "vit_large", "deit3_base", "hf_vit_base"), (2, 4, 3)),
    **dict.fromkeys(("dinov2_base", "dinov3_small", "siglip_base", "hf_dinov2_base"), (2, 3, 3)),
    "nano": (2, 4, 3),
    "pretrain_nano": (1, 1, 1),
    "dinov2_small": (2, 2, 3),
    "presets": (11, 2, 3),
    "lr_study": (2, 6, 6),
    "shock": (5, 2, 3),
}
"""Arms, learning rates and seeds of each."""


def text(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def test_all_recipes_are_seen_and_shipped() -> None:
    assert sorted(shipped()) == NAMES == sorted(PLANS)
    others = {p.name for p in FOLDER.iterdir()} - {f"{name}.yaml" for name in NAMES}
    assert {"README.md"} <= others <= {"README.md", "nano_report.png"}


@pytest.mark.parametrize("name", NAMES)
def test_it_resolves_to_its_plan(name: str) -> None:
    recipe = load_recipe(name)
    assert parse(yaml.safe_load(dump(recipe))) == recipe
    arms, rates, seeds = PLANS[name]
    twins = len(recipe.aa_rates) * seeds
    assert (len(recipe.arms), len(recipe.train.lr), len(recipe.train.seeds)) == (arms, rates, seeds)
    assert len({key.folder for key in recipe.plan()}) == len(recipe.plan()) == arms * rates * seeds + twins
    normed = [arm for arm in recipe.arms.values() if arm.qk_norm]
    assert len(normed) == arms - 1
    assert recipe.train.lr == tuple(sorted(recipe.train.lr))


def test_the_studies_hold_what_their_names_say() -> None:
    assert {QKNorm.preset(name) for name in PRESETS} <= {arm.qk_norm for arm in load_recipe("presets").arms.values()}
    rates = load_recipe("lr_study").train.lr
    assert math.log10(rates[-1] / rates[0]) >= 2.5
    assert {(arm.init, arm.ramp > 0) for name, arm in load_recipe("shock").arms.items() if name != "baseline"} == {
        ("ones", False),
        ("match", False),
        ("fit", False),
        ("fit", True),
    }


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
    assert ("make retrofit " if name == "nano" else f"MODEL={name}\n") in head
    assert re.search(r"minute|hour|not measured", head)
    assert re.search(r"GPU|network|cores", head)
    assert f"`{name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_its_arms_can_be_built(name: str, tmp_path: Path) -> None:
    """Without weights and network: structure, sizes, sites, formulas and optimizer fit together."""
    recipe = load_recipe(name)
    source = recipe.model.source
    if source.startswith("hf/"):
        HF_CONFIGS[source.removeprefix("hf/")].save_pretrained(tmp_path)
        source = f"hf:{tmp_path}"
    drop = {} if recipe.train.drop_path is None else {"drop_path_rate": recipe.train.drop_path}
    size, args = recipe.data.image_size, {**recipe.model.model_args, **drop}
    with torch.device("meta"):  # the structure alone
        model = load_model(source, 7, image_size=size, model_args=args, pretrained=False)
    assert family_of(model).preprocess(model).image_size in (28, 32, 98, 224, 256)
    found = survey(model)
    depth = len(found.sites)
    assert (found.refusal, depth) in [(None, 4), (None, 6), (None, 12), (None, 24)]
    assert not [skipped for skipped in found.skipped if "attention pool" not in skipped.reason]
    for arm in recipe.arms.values():
        if arm.qk_norm is not None:
            insert_blank(model, arm.qk_norm)
        groups = optimizer_of(model, recipe.train, recipe.train.lr[0]).param_groups
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
        assert len({group["lr_scale"] for group in groups}) == (1 if recipe.train.layer_decay == 1 else depth + 2)
        if arm.qk_norm is not None:
            assert remove_qk_norm(model) == depth
