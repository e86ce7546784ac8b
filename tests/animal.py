"""What an animal of the zoo is, and how one is made of timm's or transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Animal:
    """`build()` gives the model in evaluation mode, `inputs()` what it is called with."""

    build: Callable[[], Any]
    sites: int
    inputs: Callable[[], dict[str, Any]]
    facts: frozenset[str] = field(default_factory=frozenset)
    """rope: a rotation follows the norm; pool: an attention pool is left alone; native: timm's qk_norm=True fits;
    unpicklable: transformers' backbones hold functions that cannot be pickled, norms or not."""

    output: Callable[[Any], Any] = lambda result: result if hasattr(result, "backward") else result[0]
    """The tensor of what the model returns that all sites have a part in; the first."""

    def run(self, model: Any) -> Any:
        return self.output(model(**self.inputs()))


def images(side: int = 32, name: str = "x", *, frames: int = 0) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        import torch

        shape = (2, frames, 3, side, side) if frames else (2, 3, side, side)
        return {name: torch.randn(shape, generator=torch.Generator().manual_seed(7))}

    return make


def awake(model: Any) -> Any:
    """With what starts at 0 elsewhere: the factors of residual branches at 1, heads and biases of position drawn."""
    import torch

    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for name, p in model.named_parameters():
            if p.ndim == 1 and p.abs().max() < 1e-3 and not name.endswith("bias"):
                p.fill_(1.0)
            elif p.ndim > 1 and not p.any():
                p.normal_(std=0.2)
    return model


def timm_model(name: str, *facts: str, sites: int = 2, side: int = 32, defaults: bool = False, **args: Any) -> Animal:
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}

    def build() -> Any:
        import timm
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = timm.create_model(name, num_classes=5, **{**({} if defaults else small), **args}).eval()
        return awake(model) if defaults else model

    return Animal(build, sites, images(side), frozenset(facts))


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


def hf_model(
    model: str,
    config: str,
    *facts: str,
    sites: int = 2,
    drop: tuple[str, ...] = (),
    inputs: Callable[[], dict[str, Any]] | None = None,
    **args: Any,
) -> Animal:
    def build() -> Any:
        import torch
        import transformers

        settings = {k: v for k, v in {**SMALL, **args}.items() if k not in drop}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
        return awake(made)

    return Animal(build, sites, inputs or images(name="pixel_values"), frozenset(facts))
