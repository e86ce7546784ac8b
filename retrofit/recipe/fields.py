"""What a study trains, as frozen dataclasses, each field with what it means under it. Knows no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from retrofit.errors import RecipeError
from retrofit.qknorm import QKNorm
from retrofit.runfiles import AA, BASELINE, OTHERS, RunKey

Precision = Literal["fp32", "bf16", "fp16"]
Freeze = Literal["none", "head_only", "attention_only", "norms_only"]
Tracker = Literal["tensorboard", "trackio", "wandb"]
Init = Literal["ones", "match", "fit"]

_FORBID = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


def _as_list(value: Any) -> Any:
    """`lr: 1e-3` and `lr: [1e-3]` mean the same."""
    return value if isinstance(value, list | tuple) else [value]


def _as_twin(value: Any) -> Any:
    """`true`, `false`, or learning rates."""
    if isinstance(value, bool):
        return value
    try:
        rates = [float(v) for v in _as_list(value)]
    except (TypeError, ValueError):
        rates = [math.nan]
    if not all(0 < rate < math.inf for rate in rates):
        raise RecipeError(f"aa: true, false or some of train.lr is needed, not {value!r}")
    return rates


def _as_lockstep(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise RecipeError(f"train.lockstep: auto, or a number of runs from 1 on, is needed, not {value!r}")
    return value


def _as_backend(value: Any) -> Any:
    """`compile: true` is torch.compile's own default."""
    return {True: "inductor", False: None}[value] if isinstance(value, bool) else value


def _as_qk_norm(value: Any) -> Any:
    """`qwen3`, `{preset: qwen3, gain: per_head}` or the fields of QKNorm, as the fields of QKNorm."""
    if isinstance(value, str):
        value = {"preset": value}
    if isinstance(value, Mapping) and "preset" in value:
        changes = {k: v for k, v in value.items() if k != "preset"}
        return {**asdict(QKNorm.preset(str(value["preset"]))), **changes}
    return value


Lr = Annotated[float, Field(gt=0, le=1e30)]
Lrs = Annotated[tuple[Lr, ...], BeforeValidator(_as_list)]
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
    """Validation images on which insertion shock is measured."""
    probe_images: Count = 16
    """Validation images on which attention is read while training, the same for all arms."""
    crop_scale: tuple[Area, Area] = (0.35, 1.0)
    """Range of the random resized crop's area in training."""
    hflip: Share = 0.5
    color_jitter: Annotated[float, Field(ge=0, le=10)] = 0.0
    auto_augment: str | None = None
    """timm's policy string, such as rand-m9-mstd0.5."""
    random_erasing: Share = 0.0
    """Probability that a rectangle of an image becomes noise (Zhong et al. 2017)."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant of the model. The empty one is the model as it is."""

    __pydantic_config__ = _FORBID

    qk_norm: Annotated[QKNorm, BeforeValidator(_as_qk_norm)] | None = None
    init: Init = "fit"
    """`fit`: shift and gains fitted to the attention that the model had; `match`: the same in closed form; `ones`: the
    paper's own start."""
    ramp: Share = 0.0
    """Share of the steps over which the norm comes in, from the model as it was (norms.py). 0: at once."""
    train: dict[str, Any] = field(default_factory=dict)
    """Keys of `train` that this arm has otherwise. Each must stand in the recipe's `unmatched`."""


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
    """Share of the steps over which the learning rate rises from 0; the schedule follows."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Of the learning rate after warm-up, by optimizer step: to `min_lr` on a cosine or a line, or not at all."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    optimizer: str = "adamw"
    """Any name that timm.optim.create_optimizer_v2 knows."""
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """Passed on to the optimizer, such as {betas: [0.9, 0.95]} or {momentum: 0.9}."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """Not applied to biases, norms, gains, scales and shifts."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the learning rate from a block to the one before it; the head has the whole rate. 1: all alike."""
    freeze: Freeze = "none"
    """What is trained beside the head: all, nothing, the attention modules, or the norm layers (QK-Norm among them)."""
    clip_grad: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the whole gradient. None: no clipping."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Alpha of mixup (Zhang et al. 2018). 0: none."""
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    """Alpha of CutMix (Yun et al. 2019). 0: none. Beside mixup, each takes half of the batches."""
    mixup_prob: Share = 1.0
    """Share of the batches that are mixed at all."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Rate of stochastic depth (Huang et al. 2016), as the library lays it out: timm raises it linearly from 0 to this
    over the blocks, transformers has it in every block. None: the model's own."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, which is then evaluated and saved. None: none."""
    accumulate: Count = 1
    """Parts in which a batch is computed, to save memory. The step is that of the whole batch."""
    grad_checkpointing: bool = False
    """Computes activations a second time in the backward pass instead of keeping them."""
    compile: Annotated[str | None, BeforeValidator(_as_backend)] = None
    """Backend of torch.compile for every arm, such as inductor (which `true` means). None: not compiled."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes that decode images. The batches do not depend on it."""
    attention: Literal["auto", "fused", "unfused"] = "auto"
    """Kernel for every arm alike. auto: unfused for bf16 on a CPU, where it is twice as fast; elsewhere the model's."""
    probe_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two probes of attention. 0: about ten a run."""
    probe_batch: bool = False
    """At a probed step, also read the attention of the training batch itself, in the step's own forward pass."""
    trackers: Annotated[tuple[Tracker, ...], BeforeValidator(_as_list)] = ()
    """Experiment trackers that each run is logged to as well, through accelerate."""
    on_nonfinite: Literal["end", "skip"] = "end"
    """Where a loss or a gradient is not finite: the run ends, diverged; or the step is left out and counted."""
    lockstep: Annotated[Literal["auto"] | int, BeforeValidator(_as_lockstep)] = "auto"
    """How many runs of a seed train side by side, on batches decoded once. auto: all that memory holds. The results do
    not depend on it."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two checkpoints to resume from. 0: so often that saving takes about 2 percent of the time."""

    OWN: ClassVar = (
        *("lr", "warmup", "schedule", "min_lr", "optimizer", "optimizer_args", "weight_decay", "layer_decay"),
        *("freeze", "clip_grad", "label_smoothing", "ema"),
    )
    """What an arm may have otherwise. The rest is how batches are made and runs are read: it is one for all."""


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
    aa: Annotated[bool | tuple[Lr, ...], BeforeValidator(_as_twin)] = False
    """Trains the baseline's twin too, at every learning rate (true) or at those named."""
    unmatched: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    """Keys of `train` in which arms may differ. Their difference is then no longer the norm's alone; the report says
    so."""
    margin: Annotated[float, Field(gt=0, le=100)] = 0.5
    """Points of test accuracy: arms shown to differ by less are called practically equal. Set before results are seen;
    `retrofit report --margin` looks at another."""

    def __post_init__(self) -> None:
        faults = []
        if len(self.arms) > 1 and BASELINE not in self.arms:
            faults.append(f"arms: one of them must be called {BASELINE}; the others are compared with it")
        if BASELINE in self.arms and self.arms[BASELINE].qk_norm is not None:
            faults.append(f"arms.{BASELINE}.qk_norm: the baseline has no QK-Norm; give this arm another name")
        for i, name in enumerate(self.arms):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
                faults.append(f"arms.{name}: a name of letters, digits, _, - and . is needed, since it names a folder")
            elif name in OTHERS or name.lower() in [*map(str.lower, self.arms)][:i]:
                faults.append(f"arms.{name}: something else in a run folder has this name; give the arm another")
        for key in ("lr", "seeds", "precision"):
            values = getattr(self.train, key)
            shown = [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
            if len(set(shown)) < len(shown):
                faults.append(f"train.{key}: the same value stands there twice (to 6 digits)")
            if not values:
                faults.append(f"train.{key}: at least one value is needed")
        if any(lr < self.train.min_lr for lr in self.train.lr):
            faults.append("train.min_lr: it lies above a learning rate of train.lr")
        if self.train.drop_path is not None and "drop_path_rate" in self.model.model_args:
            faults.append("train.drop_path: model.model_args has drop_path_rate already; take one of them")
        if self.train.probe_batch and self.train.compile is not None:
            faults.append("train.probe_batch: attention is not read inside a compiled step; leave one of them out")
        if not self.arms:
            faults.append("arms: at least one is needed")
        for name, arm in self.arms.items():
            if arm.ramp and arm.qk_norm is None:
                faults.append(f"arms.{name}.ramp: there is no norm to come in; give the arm a qk_norm")
            if arm.qk_norm is not None and arm.init != "ones" and not self.model.pretrained:
                faults.append(f"arms.{name}.init: {arm.init} keeps what a checkpoint knows; without one, take ones")
        if self.data.crop_scale[0] > self.data.crop_scale[1]:
            faults.append("data.crop_scale: the smaller area comes first")
        faults += self._unmatched_faults() + self._twin_faults()
        if faults:
            raise RecipeError("\n".join(faults))

    def _unmatched_faults(self) -> list[str]:
        strange = {*self.unmatched}.difference(Train.OWN, *(arm.train for arm in self.arms.values()))
        faults = [f"unmatched: {key}: an arm may have its own {', '.join(Train.OWN)}" for key in sorted(strange)]
        for name, arm in self.arms.items():
            for key in arm.train:
                path = f"arms.{name}.train.{key}"
                if key not in Train.OWN:
                    faults.append(f"{path}: an arm may have its own {', '.join(Train.OWN)}; the rest is one for all")
                elif key not in self.unmatched:
                    faults.append(f"{path}: arms differ in their norm alone, unless the recipe says unmatched: [{key}]")
            try:
                self.train_of(name)
            except ValidationError as error:
                faults += [f"arms.{name}.train.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        return faults

    def _twin_faults(self) -> list[str]:
        faults = []
        if AA in self.arms:
            faults.append(f"arms.{AA}: this is the name of the baseline's twin (aa: true); give the arm another")
        if self.aa and BASELINE not in self.arms:
            faults.append(f"aa: a twin needs an arm called {BASELINE}")
        if strange := [lr for lr in self.aa_rates if lr not in self.train.lr] if BASELINE in self.arms else []:
            faults.append(
                f"aa: {', '.join(f'{lr:g}' for lr in strange)} is not in train.lr; take some of those, or aa: false"
            )
        return faults

    @property
    def aa_rates(self) -> tuple[float, ...]:
        """The learning rates at which the baseline has a twin."""
        if isinstance(self.aa, bool):
            return self.train_of(BASELINE).lr if self.aa else ()
        return self.aa

    def arm_of(self, name: str) -> Arm:
        """An arm of the plan; the twin is the baseline again."""
        return self.arms[BASELINE if name == AA else name]

    def train_of(self, arm: str) -> Train:
        """`train` as an arm of the plan has it."""
        own = self.arm_of(arm).train
        if not own:
            return self.train
        same = {f.name: getattr(self.train, f.name) for f in fields(Train)}
        return TypeAdapter(Train).validate_python({**same, **own})

    def plan(self) -> list[RunKey]:
        """Every training run of the study, arms innermost, so that pairs stand together; the twin comes last."""
        several = len(self.train.precision) > 1
        rates = {arm: self.train_of(arm).lr for arm in self.arms} | ({AA: self.aa_rates} if self.aa else {})
        return [
            RunKey.of(arm, lr, seed, precision, name_precision=several)
            for precision in self.train.precision
            for seed in self.train.seeds
            for lr in dict.fromkeys(lr for lrs in rates.values() for lr in lrs)
            for arm in rates
            if lr in rates[arm]
        ]
