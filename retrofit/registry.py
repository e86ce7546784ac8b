"""What surgery supports, found out from the libraries that are installed, not from a list kept by hand."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from retrofit.models import FAMILIES, left_out
from retrofit.surgery import survey


@dataclass(frozen=True)
class Entry:
    """One registered model, built on the meta device with its default configuration."""

    library: str
    name: str
    supported: bool
    sites: int
    """Attention layers that take the norm."""
    reason: str
    """Why it is not supported, or what is left out of it; empty where there is nothing to say."""


def registered(libraries: Collection[str] = ("timm", "transformers")) -> Iterator[Entry]:
    """Every model that the installed libraries know by name. Building all of them takes some minutes."""
    for family in FAMILIES:
        if family.library not in libraries:
            continue
        for name, build in family.registered():
            try:
                with torch.device("meta"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model = build()
            except Exception as error:  # a default configuration that does not build, or a package that is not there
                reason = " ".join(str(error).split())[:120] or type(error).__name__
                yield Entry(family.library, name, False, 0, f"it does not build with its defaults: {reason}")
                continue
            found = survey(model)
            supported = found.refusal is None
            reason = found.refusal or (f"left out: {left_out(found.skipped)}" if found.skipped else "")
            yield Entry(family.library, name, supported, len(found.sites) if supported else 0, reason)
