"""Runs the original on calibration images and keeps what calibration needs of its attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from retrofit.calibrate.describe import Init, LayerCalibration, calibrate
from retrofit.calibrate.excerpt import Excerpt
from retrofit.calibrate.moments import Moments
from retrofit.calibrate.rotation import rotations
from retrofit.errors import ModelError, RetrofitError
from retrofit.models import Site, evaluating, own_random_state, owner_of
from retrofit.qknorm import QKNorm
from retrofit.tap import tapped

Images = Tensor | Iterable[Tensor]
_BATCH = 16
_KEPT = 384 << 20
"""Bytes of q and k, over all sites, that calibration keeps."""


@dataclass
class Measured:
    """What calibration needs of the original."""

    moments: dict[str, Moments]
    """By site, as the excerpts."""
    excerpts: dict[str, Excerpt]
    sites: list[Site]
    image: Tensor
    """One of the images, as a batch."""
    count: int
    """How many images there were."""

    @classmethod
    def on(cls, model: nn.Module, sites: list[Site], spec: QKNorm, images: Images) -> Measured:
        family = owner_of(model)
        prefix = family.prefix_tokens(model) if family else 0
        moments = {site.name: Moments.of(site, spec) for site in sites}
        excerpts = {site.name: Excerpt(site, prefix, _KEPT // len(sites)) for site in sites}
        batches = batches_for(model, images)
        first = next(batches)
        check_takes(model, first)
        tap = tapped(sites, lambda r: moments[r.site.name].read(r), lambda r: excerpts[r.site.name].read(r))
        count = 0
        with evaluating(model), own_random_state(0), tap:
            for batch in itertools.chain([first], batches):
                _run(model, batch)
                count += len(batch)
        idle = [name for name, m in moments.items() if not m.count]
        if idle:
            raise ModelError(f"{idle[0]} did not run on the calibration images, so that it cannot be calibrated")
        return cls(moments, excerpts, sites, first[:1], count)

    def calibrate(self, model: nn.Module, init: Init) -> list[LayerCalibration]:
        """Layer by layer; what a layer no longer needs is let go."""
        turned = [
            s for s in self.sites if s.rotated and s.norms is not None and s.norms[0].spec.position == "before_rope"
        ]
        with evaluating(model), own_random_state(0):
            found = rotations(turned, lambda count: _run(model, self.image.expand(count, *self.image.shape[1:])))
        layers = []
        for site in self.sites:
            excerpt = self.excerpts.pop(site.name)
            if site.name in found:
                excerpt.derotate(found.pop(site.name))
            assert site.norms is not None
            layers.append(calibrate(*site.norms, self.moments[site.name], excerpt, init))
        return layers


def check_takes(model: nn.Module, batch: Tensor) -> None:
    """Runs the model on one image of a batch. Raises ModelError, in the library's words, where that fails."""
    try:
        with evaluating(model), own_random_state(0):
            _run(model, batch[:1])
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(
            f"{type(model).__name__} does not run on images of shape {list(batch.shape)}: {reason}"
        ) from error


def _run(model: nn.Module, batch: Tensor) -> None:
    family = owner_of(model)
    if family is None:
        model(batch)
    else:
        family.forward(model, batch)


def batches_for(model: nn.Module, images: Images) -> Iterator[Tensor]:
    """`images` as [B, 3, H, W] on the model's device and in its dtype, at most 16 a batch, one batch held at a time.

    Videos are [B, frames, 3, H, W]. Raises RetrofitError for what is no batch of images.
    """
    like = next(p for p in model.parameters() if p.is_floating_point())
    none = True
    for tensor in [images] if isinstance(images, Tensor) else images:
        if not isinstance(tensor, Tensor) or tensor.ndim not in (4, 5) or not tensor.is_floating_point():
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RetrofitError(f"images must be preprocessed floating-point tensors [B, 3, H, W], not {shape}")
        if not torch.isfinite(tensor).all():
            raise RetrofitError("images hold values that are not finite (NaN or infinity)")
        for batch in tensor.split(_BATCH):
            if len(batch):
                none = False
                yield batch.to(device=like.device, dtype=like.dtype)
    if none:
        raise RetrofitError("no images were given; a few dozen are needed")
