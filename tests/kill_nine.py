"""kill -9 at random moments of a study, each time the same command again: does every result come out bit for bit?

    python tests/kill_nine.py [-n 20] [RECIPE key=value ...]          default: a shortened nano

Prints a line a kill and the count, and exits 0 only if all are equal.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NANO = [
    *("nano", "train.steps=16", "train.seeds=[0]", "train.lr=[1e-2]", "train.checkpoint_every=3"),
    *("data.validation_images=64", "data.test_images=128", "aa=[1e-2]"),
]
COMPARED = ("metrics.jsonl", "probes.jsonl", "predictions.npz", "final/retrofit.safetensors")


def start(words: list[str], run: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "retrofit", "pair", *words, "-o", str(run)]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def contents(run: Path) -> dict[str, bytes]:
    """What is deterministic of every training run, by path."""
    files = [f for folder in run.glob("*/lr*") for name in COMPARED if (f := folder / name).is_file()]
    return {f.relative_to(run).as_posix(): f.read_bytes() for f in files}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=20, help="how many kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args, words = parser.parse_known_args(argv)
    words, moments = words or NANO, random.Random(args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        began = time.monotonic()
        if start(words, whole).wait():
            print("the study does not run through", file=sys.stderr)
            return 1
        length, expected = time.monotonic() - began, contents(whole)
        equal = 0
        for i in range(args.n):
            run = Path(scratch) / str(i)
            process, after = start(words, run), moments.uniform(0, length)
            try:
                process.wait(after)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            rows = sum(len(path.read_bytes().splitlines()) for path in run.glob("*/lr*/metrics.jsonl"))
            saved = len(list(run.glob("*/lr*/last/*.pt")))
            done = len(list(run.glob("*/lr*/result.json")))
            start(words, run).wait()
            same = contents(run) == expected
            equal += same
            state = f"{rows} steps taken, {saved} checkpoints, {done} results"
            print(
                f"killed after {after:5.1f} of {length:.1f} s: {state}: {'equal' if same else 'DIFFERENT'}", flush=True
            )
        print(f"{equal} of {args.n} bit-equal ({len(expected)} files each)")
    return 0 if equal == args.n else 1


if __name__ == "__main__":
    sys.exit(main())
