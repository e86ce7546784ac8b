"""The probe: which attention of a model is read, and for how long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import nn

from retrofit.errors import ModelError
from retrofit.models import Site, left_out, owner_of, sites_of
from retrofit.probes.attention import AttentionStats, Sample
from retrofit.tap import Reading, tapped


class Probe:
    """What a `probe` block saw: `layers`, one AttentionStats a site that ran, in the model's order."""

    def __init__(self, sites: Sequence[Site], sample: Sample, prefix: int) -> None:
        self.sample = sample
        self._stats = {site.name: AttentionStats(site, sample, prefix) for site in sites}

    def read(self, reading: Reading) -> None:
        self._stats[reading.site.name].read(reading)

    @property
    def layers(self) -> list[AttentionStats]:
        return [s for s in self._stats.values() if s.logit_max is not None]

    def rows(self, per_head: bool = False) -> list[dict[str, Any]]:
        """A mapping a layer, as JSON can hold it; a sampled probe says in each how it was sampled.

        Args:
            per_head: adds a mapping of that name, with a value a head for each figure that heads have.
        """
        sampling = {"sampling": asdict(self.sample)} if self.sample != Sample() else {}
        rows = [{**s.row(), **sampling} for s in self.layers]
        if per_head:
            for row, layer in zip(rows, self.layers, strict=True):
                row["per_head"] = {name: values.tolist() for name, values in layer.per_head().items()}
        return rows


@contextmanager
def probe(
    model: nn.Module, *, images: int | None = None, heads: int | None = None, rows: int | None = None
) -> Iterator[Probe]:
    """Reads the attention of every forward pass of `model` inside the block; several passes add up.

        with probe(model) as seen:
            model(images)
        print(seen.rows())

    Args:
        images, heads, rows: read the logits of at most so many of each, evenly spaced, a forward pass. None: of all.

    Raises ModelError where the model has no supported attention or is compiled, or where nothing ran.
    """
    sites, skipped = sites_of(model)
    if not sites:
        why = left_out(skipped) or "it has no attention with q and k"
        raise ModelError(f"{type(model).__name__} has no attention that retrofit can read: {why}")
    if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules()):
        raise ModelError("a compiled model hides its attention; probe the model that was given to torch.compile")
    family = owner_of(model)
    prefix = family.prefix_tokens(model) if family else 0
    seen = Probe(sites, Sample(images, heads, rows), prefix)
    with tapped(sites, seen.read):
        yield seen
