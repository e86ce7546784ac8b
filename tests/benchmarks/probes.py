"""What looking at attention costs: one exact probe against the forward pass, and a training run with probes.

    python tests/benchmarks/probes.py [MODEL] [--image-size PIXELS] [--batch B] [--steps N] [--rounds N]

First, on 16 images, the time of a probed forward pass over that of a plain one, by precision and attention kernel:
medians of interleaved pairs. Then two arms alike train in lockstep for N steps, one with probes at the default cadence
and one without: the median over steps of the ratio of their times, the ratio of the whole, and how far the process's
peak memory rises when the first probe comes after steps without one. Weights are random: they do not change the cost.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
from torch import nn

from retrofit import load_model, probe
from retrofit.data import Batch
from retrofit.models import evaluating, family_of
from retrofit.recipe import Train
from retrofit.runfiles import RunKey
from retrofit.train import ArmRun, probed_at

PROBED = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="timm/vit_small_patch16_224")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    args = parser.parse_args()

    model = load_model(args.model, 10, image_size=args.image_size, pretrained=args.model == "nano")
    side = family_of(model).preprocess(model).image_size
    print(f"{args.model}, {side}x{side}, {torch.get_num_threads()} threads")
    for fused in (True, False):
        for precision in ("fp32", "bf16"):
            ratio, seconds = forward_cost(model, torch.randn(PROBED, 3, side, side), fused, precision, args.rounds)
            kernel = "fused" if fused else "unfused"
            print(f"probe of {PROBED} images, {precision}, {kernel}: {ratio:.2f} forward passes ({seconds:.2f} s each)")
    training_cost(model, side, args.batch, args.steps, args.precision)


def forward_cost(
    model: nn.Module, images: torch.Tensor, fused: bool, precision: str, rounds: int
) -> tuple[float, float]:
    """Probed over plain forward pass, and the seconds of a plain one."""
    model = copy.deepcopy(model)
    family = family_of(model)
    if not fused:
        family.unfuse(model)
    plain, probed = [], []
    with evaluating(model), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        for _ in range(rounds + 1):
            began = time.perf_counter()
            family.forward(model, images)
            between = time.perf_counter()
            with probe(model) as seen:
                family.forward(model, images)
            seen.rows()
            plain.append(between - began)
            probed.append(time.perf_counter() - between)
    ratios = [b / a for a, b in zip(plain[1:], probed[1:], strict=True)]  # the first warms up
    return statistics.median(ratios), statistics.median(plain[1:])


def training_cost(model: nn.Module, side: int, batch_size: int, steps: int, precision: str) -> None:
    images = [torch.randn(PROBED, 3, side, side)]
    batch = Batch(torch.randn(batch_size, 3, side, side), torch.arange(batch_size) % 10, ["0"] * batch_size, 0)
    train = Train(lr=(1e-6,))
    seconds: dict[str, list[float]] = {"plain": [], "probed": []}
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        arms = {
            name: ArmRun.start(
                RunKey.of(name, 1e-6, 0, precision), copy.deepcopy(model), train, steps + 2, Path(folder)
            )
            for name in seconds
        }
        for step in range(steps + 2):
            for name, arm in arms.items():
                began = time.perf_counter()
                due = step > 1 and name == "probed" and probed_at(step - 2, train, steps)
                arm.step(step, batch, train, arm.attention_now(images) if due else None)
                if step > 1:  # the first two warm up, and bring memory to its peak
                    seconds[name].append(time.perf_counter() - began)
                peaks.append(getrusage(RUSAGE_SELF).ru_maxrss)
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    total = sum(seconds["probed"]) / sum(seconds["plain"])
    probes = sum(probed_at(step, train, steps) for step in range(steps))
    print(
        f"training, batch {batch_size}, {precision}, {steps} steps, {probes} probes of {PROBED} images: step time "
        f"{statistics.median(ratios):.3f} (median of pairs), {total:.3f} in all; "
        f"a step takes {statistics.median(seconds['plain']):.2f} s; peak memory "
        f"{peaks[-1] / peaks[3] - 1:+.1%} with the probes ({peaks[3] / 2**20:.2f} GiB before)"
    )


if __name__ == "__main__":
    main()
