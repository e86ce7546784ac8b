"""Recipes as files: the only module that knows YAML.

A recipe file holds only what differs from the dataclasses' defaults. Unknown keys and wrong values are reported all at
once, each with its dotted path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from retrofit.errors import RecipeError, RetrofitError, nearest
from retrofit.qknorm import QKNorm
from retrofit.recipe.fields import Recipe


def shipped() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    package = Path(str(files("retrofit")))
    for folder in (package / "recipes", package.parent / "recipes"):
        if folder.is_dir():
            return {p.stem: p for p in sorted(folder.glob("*.yaml"))}
    return {}


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, or a shipped one by its name, with `key.sub=value` overrides.

    Raises RecipeError that lists every unknown key and wrong value.
    """
    return parse(_read(source), overrides)


def parse(content: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a mapping describes, with overrides. Raises RecipeError."""
    hint = "is not a setting; write key=value, such as train.epochs=3 or gain=per_head"
    faults = [f"{text!r} {hint}" for text in overrides if not _SETTING.fullmatch(text)]
    document = reduce(_overridden, filter(_SETTING.fullmatch, overrides), dict(content))
    sections = [f.name for f in fields(Recipe)]
    document = {k: v for k, v in document.items() if v is not None or k not in sections}  # `train:` and no more
    try:
        recipe = TypeAdapter(Recipe).validate_python(document)
    except ValidationError as error:
        faults += [_fault(e) for e in error.errors()]
    if faults:
        raise RecipeError("\n".join(faults))
    return recipe


def parse_qk_norm(base: str | QKNorm, settings: Sequence[str]) -> QKNorm:
    """A preset, by name, or a formula, with `key=value` changes, as the command line gives them. Raises RecipeError."""
    place = "arms.norm.qk_norm"
    given = {"preset": base} if isinstance(base, str) else asdict(base)
    try:
        recipe = parse({"arms": {"norm": {"qk_norm": given}}}, [f"{place}.{text}" for text in settings])
    except RecipeError as error:
        raise RecipeError(str(error).replace(f"{place}.", "").replace(f"{place}: ", "")) from None
    spec = recipe.arms["norm"].qk_norm
    assert spec is not None
    return spec


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every field resolved; `load_recipe` gives the same recipe back."""
    return yaml.safe_dump(plain(recipe), sort_keys=False, default_flow_style=None, width=110)


def _read(source: str | Path) -> Mapping[str, Any]:
    path = Path(source)
    names = shipped()
    if not path.is_file():
        if str(source) in names:
            path = names[str(source)]
        elif path.suffix or os.sep in str(source):
            raise RecipeError(f"no recipe at {source}; shipped recipes: {', '.join(names)}")
        else:
            raise RecipeError(
                f"no recipe {source}{nearest(str(source), names)} (shipped: {', '.join(names)}; or name a YAML file)"
            )
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _OneOfEachKey)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        raise RecipeError(f"{source} holds no keys; a recipe has model, data, arms and train")
    return content


class _OneOfEachKey(yaml.SafeLoader):
    """YAML, without its habit of letting the second of two equal keys win silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"{', '.join(twice)} stands there twice, in line {node.start_mark.line + 1} or after")
        return node


_SETTING = re.compile(r"[^.=]+(\.[^.=]+)*=.*", re.DOTALL)
_SHORT = {(0, "model"): "source", (2, "qk_norm"): "preset"}
"""Where a word stands for a mapping, by depth and key: the key that the word is the value of."""


def _overridden(document: dict[str, Any], override: str) -> dict[str, Any]:
    path, _, text = override.partition("=")
    keys = path.split(".")
    result = dict(document)
    inner = result
    for depth, key in enumerate(keys[:-1]):
        value = inner.get(key)
        if isinstance(value, str) and (depth, key) in _SHORT:
            value = {_SHORT[depth, key]: value}
        inner[key] = dict(value) if isinstance(value, Mapping) else {}
        inner = inner[key]
    try:
        inner[keys[-1]] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        inner[keys[-1]] = text
    return result


def _fault(error: Mapping[str, Any]) -> str:
    """One line for one of pydantic's errors, with the nearest valid key where a key is unknown."""
    loc = [str(part) for part in error["loc"] if not str(part).startswith("function-")]
    path = ".".join(loc) or "recipe"
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _keys_at(loc[:-1])
        return f"{path}: unknown key{nearest(loc[-1], known)} (keys: {', '.join(known)})"
    wrapped = error.get("ctx", {}).get("error")
    if isinstance(wrapped, RecipeError):
        return str(wrapped)
    if isinstance(wrapped, RetrofitError):
        return f"{path}: {wrapped}"
    given = repr(error.get("input"))
    return f"{path}: {error['msg']}, not {given if len(given) < 60 else given[:57] + '…'}"


def _keys_at(loc: Sequence[str]) -> list[str]:
    """The valid keys of the dataclass that a path of a recipe leads to."""
    hint: Any = Recipe
    for part in loc:
        holder = _holder(hint)
        hint = get_type_hints(holder)[part] if is_dataclass(holder) else get_args(holder)[1]
    kind = _holder(hint)
    return [f.name for f in fields(kind)] + (["preset"] if kind is QKNorm else [])


def _holder(hint: Any) -> Any:
    """The dataclass or the dict[str, …] inside an Optional."""
    if is_dataclass(hint) or get_origin(hint) is dict:
        return hint
    return next(found for a in get_args(hint) if (found := _holder(a)) is not None) if get_args(hint) else None


def plain(value: Any) -> Any:
    """A recipe, or any part of it, as mappings, lists and scalars."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value
