"""What a training step costs with and without QK-Norm: interleaved, since timings of one run alone are noise.

    python tests/benchmarks/step.py [MODEL] [--image-size PIXELS] [--batch B] [--rounds N] [--precision bf16|fp32]

Prints medians and the ratio for each preset. Weights are random: they do not change the cost.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
import torch.nn.functional as F

from retrofit import QKNorm, insert_qk_norm, load_model
from retrofit.models import family_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="nano")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--presets", nargs="*", default=["qwen3", "vit22b", "olmo2"])
    args = parser.parse_args()

    base = load_model(args.model, 10, image_size=args.image_size, pretrained=args.model == "nano")
    family = family_of(base)
    if args.precision == "bf16":
        family.unfuse(base)
    side = family.preprocess(base).image_size
    images, labels = torch.randn(args.batch, 3, side, side), torch.randint(0, 10, (args.batch,))

    models = {"baseline": base}
    for preset in args.presets:
        models[preset] = copy.deepcopy(base)
        insert_qk_norm(models[preset], QKNorm.preset(preset), init="ones")
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-6) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(args.rounds + 1):
        for name, model in models.items():
            began = time.perf_counter()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
                loss = F.cross_entropy(family.logits(model.train(), images).float(), labels)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            if round_:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
    print(f"{args.model}, {side}x{side}, batch {args.batch}, {args.precision}, {torch.get_num_threads()} threads")
    for name, taken in seconds.items():
        ratios = [a / b for a, b in zip(taken, seconds["baseline"], strict=True)]
        median = statistics.median(taken)
        print(
            f"{name:10} {1000 * median:8.1f} ms a step  {args.batch / median:7.1f} images/s  "
            f"{statistics.median(ratios):.3f} of baseline"
        )


if __name__ == "__main__":
    main()
