"""How near to the original a model stays when QK-Norm goes in, for each start: the table of the README.

    python tests/benchmarks/calibration.py MODEL TRAIN.parquet TEST.parquet [--image-size 98] [--images 96] [--test 200]
        [--formulas qwen3+per_head qwen3 olmo2 vit22b+per_head] [--inits ones match fit]
    python tests/benchmarks/calibration.py --nano      the embedded model: accuracy lost by the norm alone

Calibrates on the first training images, without labels, and measures on the first test images. Cosines are means over
images, and for patches over tokens, between the original's and the retrofitted model's final normalised tokens. Times
are those of insert_qk_norm alone, in wall and in CPU seconds. Each start has a process of its own; the last two columns
are its peak memory and what that was before, with libraries, model, its copy and the file of images. A MODEL that
begins with `random:` is made by timm without weights, its attention sharpened until it is as peaked as pretrained
models' is; it stands for classes of which there is no checkpoint at hand.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import resource
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrofit import QKNorm, insert_qk_norm, load_model
from retrofit.data import eval_batches, open_images, open_splits
from retrofit.models import evaluating, family_of, sites_of
from retrofit.recipe import Data
from retrofit.shock import outputs, shock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("train", nargs="?")
    parser.add_argument("test_source", metavar="test", nargs="?")
    parser.add_argument("--nano", action="store_true")
    parser.add_argument("--image-size", type=int, default=98)
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--test", type=int, default=200)
    parser.add_argument("--formulas", nargs="*", default=["qwen3+per_head", "qwen3", "olmo2", "vit22b+per_head"])
    parser.add_argument("--inits", nargs="*", default=["ones", "match", "fit"])
    args = parser.parse_args()
    if args.nano:
        return nano(args.inits)
    if args.test_source is None:
        parser.error("MODEL, TRAIN and TEST are needed, or --nano")
    print(f"{args.model} at {args.image_size}, {args.images} images to calibrate, {args.test} to measure, ", end="")
    print(f"{torch.get_num_threads()} threads")
    print("formula            start  class  patch   KL layer  |logit|  bound   wall s  CPU s  peak GB, before")
    for formula in args.formulas:
        for init in args.inits:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(measured, (args, formula, init))
            print(f"{formula:18} {init:6} " + row, flush=True)


def spec_of(formula: str) -> QKNorm:
    preset, _, gain = formula.partition("+")
    return QKNorm.preset(preset, **({"gain": gain} if gain else {}))


def measured(args: argparse.Namespace, formula: str, init: str) -> str:
    original = loaded(args.model, args.image_size)
    family = family_of(original)
    preprocess = family.preprocess(original)

    def pixels(source: str, count: int) -> list[Tensor]:
        # In the file's own order, so that the figures do not depend on how a sample is drawn.
        images = open_images(source, None)
        return [b.pixels for b in eval_batches(images.subset(list(range(count))), preprocess, 32)]

    calibration, test = pixels(args.train, args.images), pixels(args.test_source, args.test)
    model = copy.deepcopy(original)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    began, busy = time.perf_counter(), time.process_time()
    result = insert_qk_norm(model, spec_of(formula), calibration, init)  # type: ignore[arg-type]
    wall, cpu = time.perf_counter() - began, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = shock(outputs(original, test), outputs(model, test), args.test)
    kl = statistics.mean(layer.kl for layer in result.layers)
    largest = max(layer.logit_absmax_before for layer in result.layers)
    bounds = [layer.logit_bound for layer in result.layers if layer.logit_bound is not None]
    bound = f"{max(bounds):5.1f}" if bounds else " none"
    cosines = (f"{c:.4f}" if c is not None else "  none" for c in (found.cosine_class, found.cosine_patch))
    return f"{' '.join(cosines)}  {kl:8.4f} {largest:8.1f}  {bound}  {wall:7.1f} {cpu:6.1f}  {peak:7.2f} {before:7.2f}"


def loaded(source: str, image_size: int) -> nn.Module:
    if not source.startswith("random:"):
        return load_model(source, image_size=image_size)
    model = load_model(f"timm/{source.removeprefix('random:')}", image_size=image_size, pretrained=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gamma" in name:  # layer scale, which begins so small that no block would matter
                parameter.fill_(1.0)
        for site in sites_of(model)[0]:
            for weight in site.projections:
                weight.mul_(4.0)
            for name, bias in site.module.named_parameters():
                if name.endswith("bias") and "proj." not in name:
                    bias.add_(torch.randn(bias.shape, generator=generator))
    return model


def nano(inits: list[str]) -> None:
    """The embedded model with its head fine-tuned: top-1 on its test split before and after the norm goes in."""
    splits = open_splits(Data())
    model = load_model("nano", len(splits.classes))
    family = family_of(model)
    preprocess = family.preprocess(model)

    def features(net: nn.Module, images: Any) -> tuple[Tensor, Tensor]:
        with evaluating(net):
            parts = [(family.tokens(net, b.pixels), b.labels) for b in eval_batches(images, preprocess, 100)]
        prefix = family.prefix_tokens(net)
        tokens = torch.cat([t for t, _ in parts])
        return (tokens[:, 0] if prefix else tokens.mean(1)), torch.cat([labels for _, labels in parts])

    x, y = features(model, splits.train)
    head = nn.Linear(x.shape[1], len(splits.classes))
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(head(x), y) + 1e-4 * head.weight.square().sum()
        value.backward()
        return value

    torch.manual_seed(0)
    optimizer.step(loss)

    def top1(net: nn.Module) -> float:
        features_, labels = features(net, splits.test)
        with torch.no_grad():
            return 100 * float((head(features_).argmax(-1) == labels).float().mean())

    before = top1(model)
    print(f"nano, its head alone fine-tuned: top-1 {before:.2f} % on {len(splits.test)} test images")
    calibration = [b.pixels for b in eval_batches(splits.train.take(128, "calibration"), preprocess, 64)]
    for formula in ("qwen3+per_head", "qwen3"):
        for init in inits:
            retrofitted = copy.deepcopy(model)
            insert_qk_norm(retrofitted, spec_of(formula), calibration, init)  # type: ignore[arg-type]
            after = top1(retrofitted)
            print(f"{formula:18} {init:6} top-1 {after:.2f} %, lost {before - after:+.2f} points")


if __name__ == "__main__":
    main()
