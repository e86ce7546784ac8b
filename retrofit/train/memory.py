"""What one arm's training step needs of memory, also where other arms of its group lie beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from retrofit.data import keyed_rng
from retrofit.models import family_of
from retrofit.recipe import Train

_USABLE = 0.8
"""Of the memory that is free: kernels need workspace, and allocators leave gaps."""


def runs_at_once(model: nn.Module, train: Train, side: int) -> int:
    """How many runs of a model fit into the memory that is free, at least 1. They step one after another, so that
    gradients and activations are there once.

    Args:
        side: of the images, in pixels.
    """
    held, step = estimate(model, train, side)
    return max(1, int((_USABLE * free_bytes(PartialState().device) - step) // held))


def estimate(model: nn.Module, train: Train, side: int) -> tuple[int, int]:
    """Bytes that a run of an unplaced model will hold between steps, and that its step will need on top.

    An optimizer is taken to keep two values a weight, as AdamW does. What autograd keeps is counted in a forward pass
    of one image and of two in float32, and grows with their number.
    """
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    trained = sum(p.nbytes for p in model.parameters())
    passes = []
    with keyed_rng("estimate"):
        for images in (1, 2):
            kept = _Kept(model)
            with kept:
                family_of(model).logits(model, torch.zeros(images, 3, side, side))
            passes.append(kept.peak)
    batch = -(-train.batch_size // train.accumulate)
    copies = 2 if train.ema is not None else 1
    return copies * weights + 2 * trained, trained + passes[0] + (passes[1] - passes[0]) * (batch - 1)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a GPU, or for this process on the machine, within the limit of its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((Path("/sys/fs/cgroup") / f"memory.{n}").read_text().strip() for n in ("max", "current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no container, or one without a limit
        return free


class StepMemory:
    """The most bytes that an arm needs at once: what it holds between steps, and what a step takes on top.

    On a GPU the allocator tells what a step takes, in every step. Elsewhere, in the first measured step, what autograd
    keeps for the backward pass is counted as it comes and goes, and one gradient of each trained weight is added:
    workspace of kernels is not seen, nor activations inside gradient checkpoints.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak: int | None = None
        """None before a step was measured, and where it cannot be: compiled models elsewhere than on a GPU."""

    @property
    def source(self) -> str:
        """What `peak` counts: `allocator` or `tensors`."""
        return "allocator" if self.device.type == "cuda" else "tensors"

    @contextmanager
    def measured(self, model: nn.Module, optimizer: Any, compiled: bool = False) -> Iterator[None]:
        """Around forward, backward and update of one step."""
        if self.device.type == "cuda":
            held, before = held_bytes(model, optimizer), torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            peak = held + torch.cuda.max_memory_allocated(self.device) - before
            self.peak = max(self.peak or 0, peak)
        elif self.peak is None and not compiled:
            kept = _Kept(model)
            with kept:
                yield
            gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
            self.peak = held_bytes(model, optimizer) + gradients + kept.peak
        else:
            yield


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes of all that autograd holds at once, each storage once, the weights apart."""

    def __init__(self, model: nn.Module) -> None:
        self.now, self.peak = 0, 0
        self._weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._holders: dict[int, int] = {}
        super().__init__(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor, self)

    def take(self, storage: int, size: int) -> None:
        if storage not in self._weights:
            self._holders[storage] = self._holders.get(storage, 0) + 1
            self.now += size if self._holders[storage] == 1 else 0
            self.peak = max(self.peak, self.now)

    def drop(self, storage: int, size: int) -> None:
        if storage not in self._weights:
            self._holders[storage] -= 1
            self.now -= size if self._holders[storage] == 0 else 0


class _Saved:
    """A tensor that autograd holds, for as long as it does."""

    def __init__(self, tensor: Tensor, kept: _Kept) -> None:
        self.tensor, self.kept = tensor, kept
        self.storage = (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        kept.take(*self.storage)

    def __del__(self) -> None:
        self.kept.drop(*self.storage)


def held_bytes(model: nn.Module, optimizer: Any) -> int:
    """Bytes of weights, buffers and optimizer state, of this process's shards where FSDP has sharded them."""
    state = (v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor))
    own = (t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *model.buffers(), *state))
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in own}.values())
