"""Checkpoints to go on from: last/ in the folder of an unfinished run.

A checkpoint is one file, last/STEP-HASH.pt, where HASH is that of its content. It is written beside the one before it,
synced, and only then takes its name; the one before it goes last. So whatever happens, at any moment, a whole one is
there, and one that is not whole is known by its hash. Nothing in it runs code (`weights_only`).
"""

from __future__ import annotations

import hashlib
import pickle
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from tqdm import tqdm

from retrofit import runfiles
from retrofit.checkpoint import file_hash

FORMAT = 1
_SHORTEST = 15.0
"""Seconds between two checkpoints, at least."""
_NAME = re.compile(r"(\d+)-([0-9a-f]{32})\.pt")


def write(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Makes `state`, of tensors and plain values, the run's checkpoint. Raises OSError and leaves the one before it."""
    last = folder / runfiles.LAST
    earlier = list(last.glob("*"))
    scratch = last / f".{step}.pt"
    last.mkdir(parents=True, exist_ok=True)
    with runfiles.naming(scratch), runfiles.replacing(scratch) as file:
        hashing = _Hashing(file)
        try:
            torch.save({"format": FORMAT, "step": step, **state}, cast(IO[bytes], hashing))
        except RuntimeError:
            if hashing.error is not None:  # torch has its own words for a disk that is full
                raise hashing.error from None
            raise
    place = last / f"{step}-{hashing.digest.hexdigest()[:32]}.pt"
    scratch.rename(place)
    runfiles.sync(last)
    for path in earlier:
        if path != place:
            path.unlink(missing_ok=True)


def read(folder: Path) -> dict[str, Any] | None:
    """The run's newest whole checkpoint; None where there is none. One that is damaged is named on stderr."""
    last = folder / runfiles.LAST
    found = sorted(((int(m[1]), m[2], p) for p in last.glob("*") if (m := _NAME.fullmatch(p.name))), reverse=True)
    for step, digest, path in found:
        state = _loaded(path, digest)
        if state is not None and state.get("step") == step and _logs_reach(folder, state["logs"]):
            return state
        tqdm.write(f"retrofit: {path} is damaged and is left out", file=sys.stderr)
    if found:
        tqdm.write(f"retrofit: {folder} has no whole checkpoint: it starts again from its first step", file=sys.stderr)
    return None


def remove(folder: Path) -> None:
    shutil.rmtree(folder / runfiles.LAST, ignore_errors=True)


def _loaded(path: Path, digest: str) -> dict[str, Any] | None:
    try:
        if not file_hash(path).startswith(digest):
            return None
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
        return None
    return state if isinstance(state, dict) and state.get("format") == FORMAT else None


def _logs_reach(folder: Path, logs: Mapping[str, int]) -> bool:
    """Whether the logs still hold all the rows that were there when the checkpoint was written."""
    return all((folder / name).is_file() and (folder / name).stat().st_size >= size for name, size in logs.items())


class _Hashing:
    """A file that hashes what passes through it, and remembers why it could not be written."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self.error: OSError | None = None
        self._file = file

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


@dataclass
class Cadence:
    """When to save: every so many steps, or so often that it costs about 2 percent of the time."""

    every: int
    _ended: float = field(default_factory=time.monotonic)
    _cost: float = 0.0

    def due(self, step: int) -> bool:
        """After `step` steps."""
        if self.every:
            return step % self.every == 0
        return time.monotonic() - self._ended >= max(_SHORTEST, 50 * self._cost)

    @contextmanager
    def saving(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._ended = time.monotonic()
        self._cost = self._ended - began
