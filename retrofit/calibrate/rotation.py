"""How a model rotates q and k between the norm and attention, found by letting unit vectors through.

RoPE turns pairs of channels by an angle that depends on the token: y_c = a_c x_c + b_c x_p(c), with p(c) the channel
that c is paired with (its neighbour or one half a head away, which differs by model). The norm acts before it, the tap
reads after it, so that the fit needs a and b. Shapes: H heads, N tokens, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from retrofit.errors import ModelError
from retrofit.models import Site
from retrofit.norms import HeadNorm
from retrofit.tap import Reading, tapped


@dataclass(frozen=True)
class Rotation:
    """own, other: [..., H or 1, N, D], the factors a and b above; partner: [D], the channels p."""

    own: Tensor
    other: Tensor
    partner: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, H, N, D], rotated."""
        return x * self.own + x[..., self.partner] * self.other

    def undone(self, x: Tensor) -> Tensor:
        """The inverse: a rotation's is its transpose."""
        return x * self.own + (x * self.other)[..., self.partner]

    def at(self, rows: Tensor) -> Rotation:
        """Of some tokens only, [B, N'], which differ by image."""
        return Rotation(self.own[:, rows].transpose(0, 1), self.other[:, rows].transpose(0, 1), self.partner)


def rotations(sites: Sequence[Site], run: Callable[[int], object]) -> dict[str, Rotation]:
    """The rotation of every site, by name, in float32 or wider, at the size of the images that are run.

    Args:
        sites: with norms in place.
        run: runs the model on so many images.

    Raises ModelError where what comes between the norm and attention is no rotation of channel pairs.
    """
    found = {site.name: _Pairs(site) for site in sites}
    widest = max((site.head_dim for site in sites), default=0)
    for first in range(0, widest, _AT_ONCE):
        count = min(_AT_ONCE, widest - first)

        def read(reading: Reading, first: int = first, count: int = count) -> None:
            found[reading.site.name].read(reading.q, first, count)

        with _unit_queries(sites, first, count), tapped(sites, read):
            run(count)
    return {name: pairs.rotation() for name, pairs in found.items()}


_AT_ONCE = 32
"""Unit vectors, an image each."""


class _Pairs:
    """Gathers one site's rotation, some unit vectors at a time."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.own: list[Tensor] = []
        self.other: list[Tensor] = []
        self.partner: list[Tensor] = []

    def read(self, y: Tensor, first: int, count: int) -> None:
        """y: [count * windows, H, N, D], what the unit vectors from `first` on have become."""
        y = y.to(torch.promote_types(y.dtype, torch.float32))[:: len(y) // count][: self.site.head_dim - first]
        at = torch.arange(len(y), device=y.device)
        own = y[at, :, :, first + at]
        rest = y.clone()
        rest[at, :, :, first + at] = 0
        size, partner = rest.abs().amax((1, 2)).max(-1)
        partner = torch.where(size > 0, partner, first + at)
        other = rest[at, :, :, partner]
        rest[at, :, :, partner] = 0
        if len(y) and float(rest.abs().max()) > 1e-3:
            raise ModelError(
                f'{self.site.name} rotates q and k in a way that is not known here; take init="ones" without images'
            )
        self.own.append(own)
        self.other.append(other)
        self.partner.append(partner)

    def rotation(self) -> Rotation:
        own, other, partner = torch.cat(self.own), torch.cat(self.other), torch.cat(self.partner)
        # What unit vector c gave to its partner is what the partner takes from c.
        own, other = own.permute(1, 2, 0), other[partner].permute(1, 2, 0)
        if all(bool((x == x[:1]).all()) for x in (own, other)):
            own, other = own[:1], other[:1]
        return Rotation(own, other, partner)


@contextmanager
def _unit_queries(sites: Sequence[Site], first: int, count: int) -> Iterator[None]:
    """While it lasts, image i of a batch gets the unit vector of channel first + i for each of its queries."""

    def replaced(norm: nn.Module, _args: object, out: Tensor) -> Tensor:
        assert isinstance(norm, HeadNorm)
        unit = torch.zeros_like(norm.by_head(out))
        channels = first + torch.arange(len(unit), device=out.device) // (len(unit) // count)
        inside = channels < norm.head_dim
        unit[inside.nonzero().squeeze(-1), :, :, channels[inside]] = 1
        return norm.as_laid_out(unit)

    handles = [site.norms[0].register_forward_hook(replaced) for site in sites if site.norms is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
