"""What a user did or has that stops the work. The command line prints these in one line, without a traceback.

Each message says what would have worked. Faults of ours stay ordinary exceptions and keep their traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RetrofitError(ValueError):
    """A user's mistake, or something that this machine does not have."""


class RecipeError(RetrofitError):
    """A recipe or an override that cannot be understood; the message lists every fault at once."""


class ModelError(RetrofitError):
    """A model that cannot be found, loaded or operated on."""


class DataError(RetrofitError):
    """Images that cannot be found or read."""


class CheckpointError(RetrofitError):
    """A folder that is not what it should be: damaged, tampered with, or another tool's."""


class PairMismatch(RetrofitError):
    """Two arms of a pair did not see the same thing, so that their difference would mean nothing."""


class Interrupted(KeyboardInterrupt):
    """A signal asked for the end. What was being trained is saved, and the same command goes on from there."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def nearest(name: str, known: Iterable[str], n: int = 3) -> str:
    """`; did you mean …?` for a misspelled name, or an empty string where nothing comes near.

    A name also comes near by its beginning: vit_tny means vit_tiny_patch16_224 as much as it means davit_tiny.
    """

    def likeness(other: str) -> float:
        ratios = (difflib.SequenceMatcher(None, name, o).ratio() for o in {other, other[: len(name)]})
        return max(ratios)

    ranked = sorted(((likeness(k), k) for k in set(known)), key=lambda pair: (-pair[0], len(pair[1]), pair[1]))
    found = [k for score, k in ranked[:n] if score >= 0.7]
    return f"; did you mean {' or '.join(found)}?" if found else ""
