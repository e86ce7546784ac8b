"""How near to the original each family's attention stays when QK-Norm goes in: a line a family, on made weights.

    python tests/benchmarks/families.py [NAME ...]      names of tests/zoo.py; by default all that take images or videos

Each small model of the zoo has its q and k, and nothing else, scaled until each layer's largest logit is about 10,
as in pretrained models. Calibrated on 16 images of noise. KL is that of the original's attention from the
normed one, mean over layers, in nats; the cosine is that of the model's outputs on 16 other images.
"""

from __future__ import annotations

import copy
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from sharpened import sharpened
from zoo import ZOO

from retrofit import QKNorm, insert_qk_norm

_SPEC = QKNorm.preset("qwen3", gain="per_head")


def main() -> None:
    torch.set_num_threads(1)
    shapes = {name: [getattr(x, "ndim", 0) for x in animal.inputs().values()] for name, animal in ZOO.items()}
    takes = [name for name, dimensions in shapes.items() if dimensions in ([4], [5])]
    print(f"{'family':22} sites  |logit|  KL ones  KL match  KL fit  cosine ones  cosine fit")
    for name in sys.argv[1:] or takes:
        print(f"{name:22} " + row(name), flush=True)


def row(name: str) -> str:
    animal = ZOO[name]
    (key, like) = next(iter(animal.inputs().items()))
    generator = torch.Generator().manual_seed(3)
    images, others = (torch.randn(16, *like.shape[1:], generator=generator) for _ in range(2))

    def output(model: Any) -> torch.Tensor:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)  # MAE draws the order of its patches
            result: torch.Tensor = animal.output(model(**{key: others}))
        return result.flatten(1)

    original = sharpened(animal.build(), {key: images})
    before = output(original)
    cosines = {}
    for init in ("ones", "fit"):
        model = copy.deepcopy(original)
        layers = insert_qk_norm(model, _SPEC, images, init).layers  # type: ignore[arg-type]
        cosines[init] = float(torch.cosine_similarity(output(model), before, dim=1).mean())
    largest = max(layer.logit_absmax_before for layer in layers)
    kl = [statistics.mean(getattr(layer, key) for layer in layers) for key in ("kl_ones", "kl_match", "kl")]
    return (
        f"{len(layers):5d}  {largest:7.1f}  {kl[0]:7.4f}  {kl[1]:8.4f}  {kl[2]:6.4f}  "
        f"{cosines['ones']:11.4f}  {cosines['fit']:10.4f}"
    )


if __name__ == "__main__":
    main()
