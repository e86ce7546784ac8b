"""The one place that knows timm and transformers. To add a library, write a Family in one file and list it here."""

from __future__ import annotations

from torch import nn

from retrofit.errors import ModelError
from retrofit.models.family import Family, evaluating, own_random_state
from retrofit.models.hf_models import TimmWrapperFamily, TransformersFamily
from retrofit.models.site import AttentionClass, Site, Skipped, find_sites, left_out
from retrofit.models.timm_models import TimmFamily

__all__ = [
    "ATTENTION_CLASSES",
    "FAMILIES",
    "AttentionClass",
    "Family",
    "Site",
    "Skipped",
    "evaluating",
    "family_named",
    "family_of",
    "left_out",
    "own_random_state",
    "owner_of",
    "sites_of",
    "unwrapped",
]

FAMILIES: tuple[Family, ...] = (TimmWrapperFamily(), TransformersFamily(), TimmFamily())
"""In order: the first that owns a model serves it."""

ATTENTION_CLASSES: tuple[AttentionClass, ...] = (*TransformersFamily.attention, *TimmFamily.attention)
"""Every known attention class, whatever model it stands in."""

_OTHERS = {path: reason for f in FAMILIES for path, reason in f.others.items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's, DataParallel's or DistributedDataParallel's wrapper."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def owner_of(model: nn.Module) -> Family | None:
    """The family that serves a model; None for one of neither library, which may contain their attention."""
    return next((family for family in FAMILIES if family.owns(model)), None)


def family_of(model: nn.Module) -> Family:
    """The family that serves a model. Raises ModelError for a model of neither library."""
    family = owner_of(model)
    if family is None:
        raise ModelError(f"{type(model).__name__} is neither a timm nor a transformers model")
    return family


def family_named(library: str) -> Family:
    """The family of a library's name, as retrofit.json holds it. Raises ModelError."""
    for family in FAMILIES:
        if family.library == library:
            return family
    raise ModelError(f"{library!r} is no library known here ({', '.join(f.library for f in FAMILIES)})")


def sites_of(model: nn.Module) -> tuple[list[Site], list[Skipped]]:
    """The sites of a model in its own order, and the attention modules that are none."""
    return find_sites(model, ATTENTION_CLASSES, _OTHERS)
