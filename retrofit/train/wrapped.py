"""How a model stands in accelerate's and torch.compile's wrappers while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from retrofit.errors import RetrofitError
from retrofit.models import evaluating, family_of, sites_of
from retrofit.train.processes import join


class Classifier(nn.Module):
    """Images [B, 3, H, W] to class logits [B, K].

    This is what is wrapped, so that the model inside stays the library's own module, to be probed and saved.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        blocks = (site.name.rpartition(".")[0] for site in sites_of(model)[0])
        self._no_split_modules = sorted({type(model.get_submodule(name)).__name__ for name in blocks if name})
        """What FSDP shards one by one, as transformers' models name it."""

    def forward(self, images: Tensor) -> Tensor:
        logits = family_of(self.model).logits(self.model, images)
        assert logits is not None, "a model without a head is not trained"
        return logits


def accelerator_of(precision: str, model: nn.Module) -> Accelerator:
    """An Accelerator of its own for a run. accelerate keeps one precision a process until its state is reset."""
    mixed = {"fp32": "no"}.get(precision, precision)
    if AcceleratorState._shared_state.get("_mixed_precision", mixed) != mixed:
        AcceleratorState._reset_state()
    idle = join().num_processes > 1 and _has_idle_weights(model)
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=idle)]
    return Accelerator(
        mixed_precision=mixed,
        kwargs_handlers=handlers,
        # What a launcher's configuration says of these would act beside the recipe.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="no",
    )


def _has_idle_weights(model: nn.Module) -> bool:
    """Whether weights have no part in the logits, such as DINOv2's mask token: DDP waits for their gradients."""
    weights = [p for p in model.parameters() if p.requires_grad]
    side = family_of(model).preprocess(model).image_size
    with evaluating(model), torch.enable_grad():
        logits = Classifier(model)(weights[0].new_zeros(1, 3, side, side))
        return None in torch.autograd.grad(logits.sum(), weights, allow_unused=True)


def compiled(module: nn.Module, backend: str | None) -> nn.Module:
    """`module` by torch.compile, drawing the random numbers that it draws uncompiled. None: `module` itself.

    Raises RetrofitError for a backend that torch does not have.
    """
    if backend is None:
        return module
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise RetrofitError(f"train.compile: torch has no backend {backend}; it has: {', '.join(known)}")
    options: dict[str, Any] | None = {"fallback_random": True} if backend == "inductor" else None
    result: Any = torch.compile(module, backend=backend, options=options)
    assert isinstance(result, nn.Module)
    return result


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Parameters are whole inside the block, where FSDP has sharded them."""
    shards = [m for m in module.modules() if isinstance(m, FSDPModule)]
    for shard in shards:
        shard.unshard()
    try:
        yield
    finally:
        for shard in shards:
            shard.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of one that FSDP has sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
