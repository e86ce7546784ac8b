"""That the arms of a pair saw the same: while they train, and again from the files that they leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from retrofit import runfiles
from retrofit.data import Batch
from retrofit.errors import PairMismatch
from retrofit.runfiles import RunKey, count, read_json, read_jsonl, table

RATE = ("lr", "warmup", "schedule", "min_lr", "layer_decay")
"""Keys of `train` that change the learning rate of a step."""


class Seen:
    """The batches of a seed, as runs beside these have recorded them."""

    def __init__(self, run_dir: Path, others: Iterable[RunKey]) -> None:
        """others: runs of the same seed, finished or not."""
        files = {key: run_dir / key.folder / runfiles.METRICS for key in others}
        sizes = {key: path.stat().st_size for key, path in files.items() if path.is_file()}
        self.other = max(sizes, key=lambda key: sizes[key], default=None)
        rows = [] if self.other is None else read_jsonl(files[self.other])
        self._rows = {row.get("step"): row for row in rows}

    def check(self, step: int, batch: Batch) -> None:
        """Raises PairMismatch where the batch is not the one that the others were given at this step."""
        earlier = self._rows.get(step, {})
        differing = [name for name, now in batch.fingerprint.items() if earlier.get(name, now) != now]
        if differing and self.other is not None:
            raise PairMismatch(
                f"the {' and '.join(differing)} of step {step} are not those that {self.other.folder} was given; what "
                "made the batches has changed since, such as another version of a library: take another -o"
            )


def check_matched(run_dir: Path, plan: Sequence[RunKey], rates_differ: bool = False) -> None:
    """Raises PairMismatch unless the finished arms of each pair saw the same batches at the same learning rates.

    Args:
        rates_differ: learning rates are not compared, where the recipe says that arms may have their own.
    """
    compared = ("step", "epoch", "ids", "pixels", *(() if rates_differ else ("lr",)))
    for _, keys in groupby(plan, key=lambda k: (k.precision, k.seed, k.lr)):
        results = {key: run_dir / key.folder / runfiles.RESULT for key in keys}
        seen = {key: _given(run_dir, key, compared) for key, result in results.items() if result.is_file()}
        for key, other in combinations(seen, 2):
            # A run that diverged is shorter; the steps that both took must be the same.
            at = next((i for i, (a, b) in enumerate(zip(seen[key], seen[other], strict=False)) if a != b), None)
            if at is not None:
                raise PairMismatch(
                    f"{key.folder} and {other.folder} differ in images, epoch or learning rate at step {at}; "
                    "remove both and run again"
                )


def _given(run_dir: Path, key: RunKey, compared: Sequence[str]) -> list[tuple[Any, ...]]:
    """What a finished run was given at each step. Raises PairMismatch where its metrics are not whole."""
    rows = read_jsonl(run_dir / key.folder / runfiles.METRICS)
    result = table(read_json(run_dir / key.folder / runfiles.RESULT))
    steps, ended = count(result.get("steps")) or 0, count(result.get("diverged_at"))
    steps = steps if ended is None else min(ended + 1, steps)
    if len(rows) != steps:
        raise PairMismatch(f"{key.folder} has {len(rows)} rows of metrics for {steps} steps; remove it and run again")
    return [tuple(row.get(name) for name in compared) for row in rows]
