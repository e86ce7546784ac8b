"""Recipes: what a study trains.

fields.py      the dataclasses, their defaults and what each field means
read.py        from YAML and overrides to the dataclasses, and back
"""

from retrofit.recipe.fields import Arm, Data, Init, Model, Precision, Recipe, Train
from retrofit.recipe.read import dump, load_recipe, parse, parse_qk_norm, plain, shipped
from retrofit.runfiles import AA, BASELINE

__all__ = [
    "AA",
    "BASELINE",
    "Arm",
    "Data",
    "Init",
    "Model",
    "Precision",
    "Recipe",
    "Train",
    "dump",
    "load_recipe",
    "parse",
    "parse_qk_norm",
    "plain",
    "shipped",
]
