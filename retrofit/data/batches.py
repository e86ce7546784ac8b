"""Batches whose order and augmentation are keyed by (seed, epoch, index): the same for any number of workers.

Shapes: B images, H height, W width.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from retrofit import recipe
from retrofit.data.images import Images, Ints
from retrofit.data.keyed import keyed_seed, rng_kept, seed_rng
from retrofit.errors import DataError
from retrofit.models.preprocess import Preprocess

Transform = Callable[[Image.Image], torch.Tensor]
"""RGB image to uint8 [3, H, W]."""


Part = tuple[int, int]
"""(i, n): the share of process i, from 0, of n."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch, or one process's share of it."""

    pixels: torch.Tensor
    """[B, 3, H, W], float32, normalised."""
    labels: torch.Tensor
    """[B], int64, or [B, K] in float32 where images are mixed."""
    ids: list[str]
    """Of the whole batch, over all processes."""
    epoch: int
    """From 0; 0 in evaluation."""

    everyone: list[bytes] | None = None
    """`prints` of the whole batch, where this is a share of it."""

    @cached_property
    def prints(self) -> list[bytes]:
        """A hash of each image and its label."""
        pairs = zip(self.pixels.cpu().numpy(), self.labels.cpu().numpy(), strict=True)
        return [hashlib.sha256(image.tobytes() + label.tobytes()).digest() for image, label in pairs]

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of the ids, and of the pixels with their labels, over the whole batch."""
        pixels = hashlib.sha256(b"".join(self.prints if self.everyone is None else self.everyone))
        ids = hashlib.sha256("\n".join(self.ids).encode())
        return {"ids": ids.hexdigest()[:16], "pixels": pixels.hexdigest()[:16]}


def steps_per_epoch(n: int, batch_size: int) -> int:
    """An incomplete last batch is dropped, but fewer images than a batch are one batch."""
    return max(1, n // batch_size)


def share(rows: Ints, part: Part) -> Ints:
    """One process's share of a batch's rows: each in as many as can be evenly, row i beside row -1-i.

    Mixup mixes these two, so that every process can mix its own share as the whole batch would be mixed.
    """
    i, n = part
    half = len(rows) // 2
    start, stop = half * i // n, half * (i + 1) // n
    middle = rows[half : len(rows) - half] if i == n - 1 else rows[:0]
    return np.concatenate([rows[start:stop], middle, rows[len(rows) - stop : len(rows) - start]])


def eval_batches(
    images: Images, preprocess: Preprocess, batch_size: int, workers: int = 0, part: Part = (0, 1)
) -> Iterator[Batch]:
    """Every image once, in order; the last batch may be smaller. Raises DataError for an unreadable one."""
    rows = np.arange(len(images))
    plan = ((0, rows[i : i + batch_size]) for i in range(0, len(rows), batch_size))
    return _batches(_Loader(images, preprocess, _transform(preprocess), part=part), plan, workers)


def train_batches(
    images: Images,
    preprocess: Preprocess,
    data: recipe.Data,
    *,
    seed: int,
    batch_size: int,
    steps: int,
    first_step: int = 0,
    workers: int = 0,
    part: Part = (0, 1),
) -> Iterator[Batch]:
    """Batches first_step to steps - 1 of an endless stream of epochs, shuffled and augmented.

    Raises DataError for an image that cannot be read and for a policy that timm does not know.
    """
    plan = _train_plan(len(images), seed, batch_size, range(first_step, steps))
    loader = _Loader(images, preprocess, train_transform(preprocess, data), seed, data.random_erasing, part)
    return _batches(loader, plan, workers)


def _train_plan(n: int, seed: int, batch_size: int, steps: range) -> Iterator[tuple[int, Ints]]:
    size, shuffled = min(batch_size, n), -1
    for step in steps:
        epoch, i = divmod(step, steps_per_epoch(n, batch_size))
        if epoch != shuffled:
            order = np.random.default_rng(keyed_seed("order", seed, epoch)).permutation(n)
            shuffled = epoch
        yield epoch, order[i * size : (i + 1) * size]


def train_transform(preprocess: Preprocess, data: recipe.Data) -> Transform:
    try:
        return _transform(
            preprocess,
            is_training=True,
            scale=data.crop_scale,
            hflip=data.hflip,
            color_jitter=data.color_jitter or None,
            auto_augment=data.auto_augment,
        )
    except (AssertionError, ValueError, KeyError):
        if not data.auto_augment:
            raise
        raise DataError(
            f"data.auto_augment: timm has no policy {data.auto_augment}; one that it has is rand-m9-mstd0.5"
        ) from None


def _transform(preprocess: Preprocess, **training: Any) -> Transform:
    from timm.data import create_transform  # here, since it imports torchvision

    return create_transform(  # type: ignore[no-any-return]
        preprocess.image_size,
        interpolation=preprocess.interpolation,
        crop_pct=preprocess.crop_pct,
        mean=preprocess.mean,  # the colour that auto_augment fills with
        normalize=False,  # a batch at a time is faster
        **training,
    )


@dataclass(frozen=True)
class _Loader(Dataset["Batch | DataError"]):
    """Item (epoch, rows) is that batch."""

    images: Images
    preprocess: Preprocess
    transform: Transform
    seed: int | None = None
    """None: the transform draws nothing."""
    erasing: float = 0.0
    part: Part = (0, 1)

    def __getitem__(self, item: tuple[int, Ints]) -> Batch | DataError:
        """A DataError is returned: raised in a worker, it would arrive with a traceback for a message."""
        epoch, rows = item
        mine = share(rows, self.part)
        side = self.preprocess.image_size
        pixels = np.zeros((len(mine), 3, side, side), np.uint8)
        try:
            with rng_kept():
                for place, i in zip(pixels, mine, strict=True):
                    place[:] = self._pixels(epoch, int(i))
        except DataError as error:
            return error
        # numpy, since torch would wait for all its threads at each of these small steps
        mean, std = (np.array(v, np.float32).reshape(-1, 1, 1) for v in (self.preprocess.mean, self.preprocess.std))
        normalised = torch.from_numpy((pixels.astype(np.float32) / 255 - mean) / std)
        if self.erasing:
            self._erase(normalised, epoch, mine)
        labels = torch.from_numpy(self.images.labels[mine])
        batch = Batch(normalised, labels, [self.images.ids[i] for i in rows], epoch)
        if self.seed is not None:
            _ = batch.fingerprint  # here, where a worker has the time
        return batch

    def _pixels(self, epoch: int, i: int) -> npt.NDArray[np.uint8]:
        if self.seed is not None:
            seed_rng(keyed_seed("augment", self.seed, epoch, i))
        return self.transform(self.images.image(i)).numpy()

    def _erase(self, pixels: torch.Tensor, epoch: int, rows: Ints) -> None:
        """In place, with normal noise, as timm's training script does."""
        from timm.data.random_erasing import RandomErasing

        erase = RandomErasing(self.erasing, mode="pixel", device="cpu")
        with rng_kept():
            for image, i in zip(pixels, rows, strict=True):
                seed_rng(keyed_seed("erase", self.seed or 0, epoch, int(i)))
                erase(image)


def _batches(loader: _Loader, plan: Iterable[tuple[int, Ints]], workers: int) -> Iterator[Batch]:
    loaded: Iterable[Batch | DataError] = map(loader.__getitem__, plan)
    if workers:
        loaded = DataLoader(
            loader,
            batch_size=None,
            sampler=plan,
            num_workers=workers,
            collate_fn=_as_is,
            worker_init_fn=_unsignalled,
            generator=torch.Generator(),  # else it draws from the global one
        )
    for batch in loaded:
        if isinstance(batch, DataError):
            raise batch
        yield batch


def _unsignalled(_worker: int) -> None:
    """Leaves it to the main process to answer signals that come to all, such as Ctrl-C: it ends its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _as_is(batch: Any) -> Any:
    return batch
