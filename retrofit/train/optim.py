"""What is trained, at which rate, with which weight decay: freezing, parameter groups, optimizer, schedule."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

from timm.optim import create_optimizer_v2, get_optimizer_class
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from retrofit.errors import ModelError, RetrofitError
from retrofit.models import family_of, sites_of
from retrofit.recipe import Train

_SCHEDULES = {"cosine": "cosine", "linear": "poly", "constant": "step"}
"""timm's names: a polynomial of power 1 is a line, and steps of factor 1 are none."""


def freeze(model: nn.Module, mode: str) -> None:
    """Leaves gradients to the head and to what `mode` names beside it (recipe.Train.freeze).

    attention_only: the attention modules, QK-Norm included, as in Touvron et al. 2022. norms_only: every norm layer,
    so that the baseline has as much of it to train as an arm can have without QK-Norm.

    Raises RetrofitError where the model has nothing of the kind.
    """
    if mode == "none":
        return
    chosen = {"head_only": lambda _: iter(()), "attention_only": _attention, "norms_only": _norms}[mode](model)
    kept = {id(p) for module in chosen for p in module.parameters()}
    if not kept and mode != "head_only":
        kind = {"attention_only": "attention that is known here", "norms_only": "norm layer with parameters"}[mode]
        raise RetrofitError(
            f"train.freeze: {mode} leaves nothing to train but the head: {type(model).__name__} has no {kind}; "
            "take none or head_only"
        )
    head = family_of(model).head(model)
    kept |= {id(p) for p in head.parameters()} if head is not None else set()
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in kept)


def parameter_groups(model: nn.Module, train: Train) -> list[dict[str, Any]]:
    """The trained parameters by rate and weight decay, the highest rate first, as torch's optimizers take them.

    Each has `name`, `params`, `weight_decay` and `lr_scale`, the factor on the learning rate that timm's schedules
    apply. Norms, gains, shifts, scales, biases and what the library spares have no weight decay.
    """
    layers = layers_of(model) if train.layer_decay != 1 else dict.fromkeys(dict(model.named_parameters()), 0)
    top = max(layers.values())
    spared = family_of(model).no_weight_decay(model)
    norms = {id(p) for norm in _norms(model) for p in norm.parameters(recurse=False)}
    head = family_of(model).head(model)
    of_head = {id(p) for p in head.parameters()} if head is not None else set()
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decayed = parameter.ndim > 1 and id(parameter) not in norms and not any(fnmatch(name, p) for p in spared)
        # Muon orthogonalises weights between hidden layers; a head, tokens and embeddings are AdamW's (Jordan 2024).
        fallback = "muon" in train.optimizer.lower() and (not decayed or id(parameter) in of_head)
        key = (top - layers[name], not decayed, fallback)
        if key not in groups:
            words = ["all layers" if train.layer_decay == 1 else f"layer {layers[name]}"]
            words += ["no weight decay"] * (not decayed) + ["AdamW"] * fallback
            groups[key] = {
                "name": ", ".join(words),
                "params": [],
                "weight_decay": train.weight_decay if decayed else 0.0,
                "lr_scale": train.layer_decay ** (top - layers[name]),
                **({"use_fallback": True} if fallback else {}),
            }
        groups[key]["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def layers_of(model: nn.Module) -> dict[str, int]:
    """The layer of every parameter, as layer-wise decay counts: 0 what comes before the blocks, then a number a block.

    The last norm goes with the last block, and the head, with what else follows the blocks, has the highest.

    Raises RetrofitError where a parameter amid the blocks has no place, or the model's blocks are not known.
    """
    sites, _ = sites_of(model)
    try:
        layers = family_of(model).layers(model)
    except ModelError as error:
        raise RetrofitError(f"train.layer_decay: {error}; take 1") from None
    if not sites:
        raise RetrofitError(f"train.layer_decay: the blocks of {type(model).__name__} are not known; take 1")
    names = list(layers)
    inside = [name for name in names if any(name.startswith(f"{s.name}.") for s in sites if not s.kind.pool)]
    first, last = layers[inside[0]], layers[inside[-1]]
    start, stop = next(i for i, name in enumerate(names) if layers[name] == first), names.index(inside[-1])
    lost = [name for name in names[start:stop] if not first <= layers[name] <= last]
    if lost:
        raise RetrofitError(f"train.layer_decay: it is not known to which block {lost[0]} belongs; take 1")
    counted = {name: 0 if i < start else layers[name] - first + 1 for i, name in enumerate(names)}
    if family_of(model).head(model) is not None and max(counted[name] for name in inside) == max(counted.values()):
        kind = type(model).__name__
        raise RetrofitError(f"train.layer_decay: the last block of {kind} is not told from its head; take 1")
    return counted


def optimizer_of(model: nn.Module, train: Train, lr: float, device: str = "cpu") -> Optimizer:
    """The recipe's optimizer over `parameter_groups`, for weights on a kind of device.

    Raises RetrofitError where it cannot be had.
    """
    chosen = {"fused", "foreach"} & {*train.optimizer_args}
    try:
        kernel = {"fused": True} if device == "cpu" and not chosen and _has_fused(train.optimizer) else {}
        optimizer: Optimizer = create_optimizer_v2(
            parameter_groups(model, train),
            opt=train.optimizer,
            lr=lr,
            weight_decay=train.weight_decay,
            **kernel,
            **train.optimizer_args,
        )
    except (ValueError, AssertionError, ImportError) as error:
        raise RetrofitError(f"train.optimizer: {train.optimizer} cannot be used: {error}") from None
    except TypeError as error:
        raise RetrofitError(f"train.optimizer_args: {train.optimizer} does not take them: {error}") from None
    if hasattr(optimizer, "set_hessian"):
        raise RetrofitError(f"train.optimizer: {train.optimizer} needs second derivatives, which are not computed here")
    return optimizer


def schedule_of(optimizer: Optimizer, train: Train, lr: float, steps: int) -> Scheduler:
    """Of the learning rate, by optimizer step: from a first step above 0 to the peak, and from there as recipe.Train
    says, to just above `min_lr` at the last step."""
    warmup = min(int(train.warmup * steps), steps - 1)
    schedule, _ = create_scheduler_v2(
        optimizer,
        _SCHEDULES[train.schedule],
        num_epochs=steps - warmup,
        decay_epochs=1,
        decay_rate=1.0,
        min_lr=train.min_lr,
        warmup_lr=lr / (warmup + 1),
        warmup_epochs=warmup,
        warmup_prefix=True,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    assert isinstance(schedule, Scheduler)
    return schedule


def _has_fused(name: str) -> bool:
    """Whether torch has the optimizer in one kernel: on CPUs it takes half to a fifth of the time."""
    kind = get_optimizer_class(name.lower().rpartition("_")[2], bind_defaults=False)  # lookahead_adamw is AdamW inside
    return "fused" in inspect.signature(kind).parameters


def _attention(model: nn.Module) -> Iterator[nn.Module]:
    """Each site's attention as a whole: some classes keep the output projection in a module around it."""
    modules = dict(model.named_modules())
    for site in sites_of(model)[0]:
        name = site.name
        while (outer := name.rpartition(".")[0]) and type(modules[outer]).__name__.endswith("Attention"):
            name = outer
        yield modules[name]


def _norms(model: nn.Module) -> Iterator[nn.Module]:
    """Every module that is called a norm and has parameters of its own."""
    for module in model.modules():
        if "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False)):
            yield module
