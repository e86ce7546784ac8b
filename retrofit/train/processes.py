"""Several processes that train one study, on one machine or many.

The first alone writes to the run folder. The others read checkpoints there, so that it must lie where all see it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from retrofit.data import Batch, share
from retrofit.errors import RetrofitError
from retrofit.recipe import Train

T = TypeVar("T")


def join() -> PartialState:
    """Joins the processes that a launcher has started; the first call decides for the whole life of this one.

    torchrun does not say that its processes are to compute on CPUs, and accelerate then takes each for the only one.
    """
    return PartialState(cpu=not torch.accelerator.is_available())


def on_main(do: Callable[[], T]) -> T:
    """What `do` gives in the main process, in every process; a RetrofitError that it raises, likewise."""
    state = join()
    if state.num_processes == 1:
        return do()
    told: list[tuple[T | None, RetrofitError | None]] = [(None, None)]
    if state.is_main_process:
        try:
            told = [(do(), None)]
        except RetrofitError as error:
            told = [(None, error)]
    result, fault = broadcast_object_list(told)[0]
    if fault is not None:
        raise fault
    return result  # type: ignore[no-any-return]


def check_same_for_all(folder: Path, step: int) -> None:
    """Raises RetrofitError unless every process finds the same checkpoint in a folder."""
    if len({*gather_object([step])} if join().num_processes > 1 else [step]) > 1:
        raise RetrofitError(
            f"not every process sees the same {folder}; put -o on a file system that all machines share"
        )


def known_to_all(batch: Batch) -> Batch:
    """The batch with the prints of all its images, whichever process holds them."""
    processes = join().num_processes
    if processes == 1:
        return batch
    everyone = [b""] * len(batch.ids)
    for process, prints in enumerate(gather_object([batch.prints])):
        for row, found in zip(share(np.arange(len(everyone)), (process, processes)), prints, strict=True):
            everyone[row] = found
    return replace(batch, everyone=everyone)


def sharded() -> bool:
    """Whether accelerate was launched with FSDP. A run is then saved at its end only, and begins anew until then."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")


def check_devices(train: Train) -> None:
    """Raises RetrofitError for what the devices at hand cannot do."""
    cpu = join().device.type == "cpu"
    if "fp16" in train.precision and cpu:
        raise RetrofitError(
            "train.precision: fp16 needs a GPU (accelerate computes float32 on a CPU); take bf16 or fp32"
        )
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise RetrofitError("DeepSpeed is not supported; launch with --multi_gpu or with --use_fsdp --fsdp_version 2")
    if sharded() and os.environ.get("FSDP_VERSION", "1") != "2":
        raise RetrofitError("FSDP is supported in its second version; launch with --fsdp_version 2")
    if sharded() and cpu:
        raise RetrofitError("FSDP needs GPUs (accelerate runs plain processes on a CPU); launch without --use_fsdp")
    if sharded() and train.ema is not None:
        raise RetrofitError("train.ema: an average of weights that FSDP shards cannot be kept; leave it out")


def check_shares(train: Train, images: int) -> None:
    """Raises RetrofitError where a batch is too small for every process to have a share of it."""
    n, size = join().num_processes, min(train.batch_size, images)
    if not all(len(share(np.arange(size), (i, n))) for i in range(n)):
        raise RetrofitError(
            f"train.batch_size: of a batch of {size} images some of {n} processes would get none; take {2 * n} or "
            "more, or fewer processes"
        )
