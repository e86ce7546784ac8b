"""Recipes: what a study trains, as frozen dataclasses. The only module that knows YAML; it knows no torch.

A recipe file holds only what differs from the defaults below. Unknown keys and wrong values are reported all at once,
each with its dotted path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from retrofit.errors import RecipeError, RetrofitError, nearest
from retrofit.qknorm import QKNorm
from retrofit.runfiles import RunKey

BASELINE = "baseline"
Precision = Literal["fp32", "bf16", "fp16"]
Init = Literal["ones", "match"]

_FORBID = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


def _as_list(value: Any) -> Any:
    """`lr: 1e-3` and `lr: [1e-3]` mean the same."""
    return value if isinstance(value, list | tuple) else [value]


def _as_qk_norm(value: Any) -> Any:
    """`qwen3`, `{preset: qwen3, gain: per_head}` or the fields of QKNorm, as the fields of QKNorm."""
    if isinstance(value, str):
        value = {"preset": value}
    if isinstance(value, Mapping) and "preset" in value:
        changes = {k: v for k, v in value.items() if k != "preset"}
        return {**asdict(QKNorm.preset(str(value["preset"]))), **changes}
    return value


Lrs = Annotated[tuple[Annotated[float, Field(gt=0, lt=float("inf"))], ...], BeforeValidator(_as_list)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], BeforeValidator(_as_list)]
Precisions = Annotated[tuple[Precision, ...], BeforeValidator(_as_list)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Share = Annotated[float, Field(ge=0, le=1)]
Area = Annotated[float, Field(ge=0.01, le=1)]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Where the model comes from, where `model: timm/NAME` says too little."""

    __pydantic_config__ = _FORBID

    source: str = "nano"
    """`nano`, `timm/NAME`, `hf/ID`, `timm:DIR`, `hf:DIR`, or DIR, a folder written by retrofit."""
    model_args: dict[str, Any] = field(default_factory=dict)
    """Passed on to timm.create_model, or to the configuration of a transformers model."""
    pretrained: bool = True
    """False: random weights, keyed by the seed."""


def _as_model(value: Any) -> Any:
    """`timm/NAME`, `{timm: NAME, …}` and `{hf: ID, …}`, as the fields of Model."""
    if isinstance(value, str):
        return {"source": value}
    if isinstance(value, Mapping):
        for library in ("timm", "hf"):
            if library in value and "source" not in value:
                return {
                    "source": f"{library}/{value[library]}",
                    **{k: v for k, v in value.items() if k != library},
                }
    return value


@dataclass(frozen=True, kw_only=True)
class Data:
    __pydantic_config__ = _FORBID

    source: str = "nano"
    """`nano`, `hf/ID`, a folder of images (one folder a class), or a parquet file."""
    train: str | None = None
    """Name of the training split inside the source, or a source of its own. None: the source's own training split."""
    validation: str | None = None
    """As `train`. None: the source's own, else a tenth of the training images, evenly over the classes."""
    test: str | None = None
    """As `train`. None: the source's own, else a tenth of the training images, evenly over the classes."""
    image_size: Count | None = None
    """Side of the model's input in pixels. None: the size the checkpoint was trained at."""
    train_images: Count | None = None
    """At most so many training images, evenly over the classes. None: all."""
    validation_images: Count | None = None
    test_images: Count | None = None
    calibration_images: Count = 128
    """Training images, without augmentation or labels, that calibrate the norm."""
    held_out_images: Count = 64
    """Validation images on which insertion shock is measured and attention is probed."""
    crop_scale: tuple[Area, Area] = (0.35, 1.0)
    """Range of the random resized crop's area in training."""
    hflip: Share = 0.5
    color_jitter: Annotated[float, Field(ge=0, le=10)] = 0.0
    auto_augment: str | None = None
    """timm's policy string, such as rand-m9-mstd0.5."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant of the model. The empty one is the model as it is."""

    __pydantic_config__ = _FORBID

    qk_norm: Annotated[QKNorm, BeforeValidator(_as_qk_norm)] | None = None
    init: Init = "match"
    """`match`: key shift and gains that hold the model's attention; `ones`: the paper's own start."""


@dataclass(frozen=True, kw_only=True)
class Train:
    __pydantic_config__ = _FORBID

    epochs: Annotated[float, Field(gt=0, le=1e5)] = 10.0
    steps: Count | None = None
    """Number of optimizer steps, in place of epochs."""
    batch_size: Count = 64
    lr: Lrs = (1e-4,)
    """Peak learning rates; each is a run of every arm and seed."""
    seeds: Seeds = (0,)
    precision: Precisions = ("bf16",)
    """Autocast dtype. Weights stay in float32."""
    warmup: Share = 0.1
    """Share of the steps over which the learning rate rises from 0; a cosine to 0 follows."""
    optimizer: str = "adamw"
    """Any name that timm.optim.create_optimizer_v2 knows."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """Not applied to biases, norms, gains, scales and shifts."""
    clip_grad: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the whole gradient. None: no clipping."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes that decode images. The batches do not depend on it."""
    attention: Literal["auto", "fused", "unfused"] = "auto"
    """Kernel for every arm alike. auto: unfused for bf16 on a CPU, where it is twice as fast; elsewhere the model's."""
    probe_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two probes of attention. 0: about ten a run."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole study: one model, one data set, some arms, trained over a grid."""

    __pydantic_config__ = _FORBID

    model: Annotated[Model, BeforeValidator(_as_model)] = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    arms: dict[str, Annotated[Arm, BeforeValidator(lambda value: {} if value is None else value)]] = field(
        default_factory=lambda: {BASELINE: Arm()}
    )
    train: Train = field(default_factory=Train)

    def __post_init__(self) -> None:
        faults = []
        if len(self.arms) > 1 and BASELINE not in self.arms:
            faults.append(f"arms: one of them must be called {BASELINE}; the others are compared with it")
        if BASELINE in self.arms and self.arms[BASELINE].qk_norm is not None:
            faults.append(f"arms.{BASELINE}.qk_norm: the baseline has no QK-Norm; give this arm another name")
        for name in self.arms:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
                faults.append(f"arms.{name}: a name of letters, digits, _, - and . is needed, since it names a folder")
        for key in ("lr", "seeds", "precision"):
            values = getattr(self.train, key)
            shown = [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
            if len(set(shown)) < len(shown):
                faults.append(f"train.{key}: the same value stands there twice (to 6 digits)")
            if not values:
                faults.append(f"train.{key}: at least one value is needed")
        if not self.arms:
            faults.append("arms: at least one is needed")
        for name, arm in self.arms.items():
            if arm.qk_norm is not None and arm.init != "ones" and not self.model.pretrained:
                faults.append(f"arms.{name}.init: {arm.init} keeps what a checkpoint knows; without one, take ones")
        if self.data.crop_scale[0] > self.data.crop_scale[1]:
            faults.append("data.crop_scale: the smaller area comes first")
        if faults:
            raise RecipeError("\n".join(faults))

    def plan(self) -> list[RunKey]:
        """Every training run of the study, arms innermost, so that pairs stand together."""
        several = len(self.train.precision) > 1
        return [
            RunKey.of(arm, lr, seed, precision, name_precision=several)
            for precision in self.train.precision
            for seed in self.train.seeds
            for lr in self.train.lr
            for arm in self.arms
        ]


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
