"""Randomness that hangs on a key, and on nothing else that draws random numbers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def keyed_seed(*key: int | str) -> int:
    """A seed of 63 bits, the same for a key on every machine and in every process."""
    plain = tuple(part if isinstance(part, str) else int(part) for part in key)
    return int.from_bytes(hashlib.blake2b(repr(plain).encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def keyed_rng(*key: int | str) -> Iterator[None]:
    """Seeds random, numpy and torch from the key, inside the block only.

    torch: the CPU, and the current CUDA device once CUDA is in use.
    """
    seed = keyed_seed(*key)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    with rng_kept():
        seed_rng(seed)
        if cuda is not None:
            torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)


@contextmanager
def rng_kept() -> Iterator[None]:
    """Puts the states of random, numpy and torch on the CPU back as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_rng(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed CUDA too
