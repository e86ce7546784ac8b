"""What the rest of the project asks of a model, whatever library it comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrofit.models.preprocess import Preprocess
from retrofit.models.site import AttentionClass


@dataclass(frozen=True)
class Request:
    """What is asked of a loader."""

    source: str
    """As the user wrote it, for messages."""
    name: str
    """A name or id, or the path of a folder where `local`."""
    local: bool = False
    classifier: bool = False
    """Whether a classification head is needed, even where the checkpoint has none."""
    image_size: int | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)
    pretrained: bool = True
    seed: int = 0


class Family(ABC):
    """One library's models. Images are [B, 3, H, W], preprocessed as `preprocess` says."""

    library: ClassVar[str]
    attention: ClassVar[Sequence[AttentionClass]]
    """The attention classes that can take a norm."""
    others: ClassVar[Mapping[str, str]]
    """Those that cannot, by path, and why."""

    @abstractmethod
    def registered(self) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        """Every model that the installed library knows by name, with how to build it without weights."""

    @abstractmethod
    def owns(self, model: nn.Module) -> bool:
        """Whether the model is of this library."""

    @abstractmethod
    def load(self, request: Request) -> Any:
        """The library's own module, in float32, evaluating, with the checkpoint's own head. Raises ModelError."""

    @abstractmethod
    def new_head(self, model: nn.Module, num_classes: int, seed: int) -> None:
        """Replaces the classification head; its weights follow from `seed` alone. Raises ModelError."""

    @abstractmethod
    def config(self, model: nn.Module) -> dict[str, Any]:
        """What `build` needs, as JSON can hold it. Raises ModelError where the model cannot be described."""

    @abstractmethod
    def build(self, config: Mapping[str, Any]) -> Any:
        """The structure that `config` describes, with weights to be loaded."""

    @abstractmethod
    def forward(self, model: nn.Module, images: Tensor) -> Any:
        """Runs the model as its library means it to be run, and returns what it returns."""

    def call(self, model: nn.Module, images: Tensor) -> dict[str, Any]:
        """What `forward` passes beside these images."""
        return {}

    @abstractmethod
    def logits(self, model: nn.Module, images: Tensor) -> Tensor | None:
        """Class logits [B, K], or None for a model without a classification head."""

    @abstractmethod
    def tokens(self, model: nn.Module, images: Tensor) -> Tensor | None:
        """The final normalised tokens [B, N, C], prefix tokens first; None where the model has no such thing."""

    def features(self, model: nn.Module, images: Tensor) -> Tensor | None:
        """What the library gives where the head is left out: the tokens, or maps of a model over stages."""
        return self.tokens(model, images)

    @abstractmethod
    def prefix_tokens(self, model: nn.Module) -> int:
        """How many class and register tokens stand before the patches."""

    @abstractmethod
    def token_count(self, model: nn.Module) -> int | None:
        """How many tokens attention sees at the model's own image size; None where that is not one number."""

    @abstractmethod
    def head(self, model: nn.Module) -> nn.Module | None:
        """The classification head, or None."""

    @abstractmethod
    def no_weight_decay(self, model: nn.Module) -> set[str]:
        """Names of parameters of more than one dimension that are spared, such as tokens and position embeddings."""

    @abstractmethod
    def layers(self, model: nn.Module) -> dict[str, int]:
        """The layer of every parameter by name, in the model's own order: a block has a number of its own, ascending.

        What the library does not tell apart, such as the head, has the highest. Raises ModelError.
        """

    @abstractmethod
    def checkpoint_gradients(self, model: nn.Module) -> None:
        """Computes each block's activations anew in the backward pass. Raises ModelError where that cannot be had."""

    @abstractmethod
    def preprocess(self, model: nn.Module) -> Preprocess: ...

    @abstractmethod
    def set_preprocess(self, model: nn.Module, preprocess: Preprocess) -> None: ...

    @abstractmethod
    def labels(self, model: nn.Module) -> tuple[str, ...]:
        """Class names, or an empty tuple where they are not known."""

    @abstractmethod
    def set_labels(self, model: nn.Module, labels: Sequence[str]) -> None: ...

    @abstractmethod
    def unfuse(self, model: nn.Module) -> bool:
        """Computes attention by its formula, not by PyTorch's fused kernel; False where the library cannot switch."""


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Seeds torch for the block and puts its state back, so that building a model disturbs nobody's numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients for the block; every module's mode is put back."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def fresh_head(head: nn.Module, seed: int) -> None:
    """Fills every Linear of a head from `seed` alone: truncated normal of deviation 0.02, bias 0, as timm's ViTs."""
    generator = torch.Generator().manual_seed(seed)
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            drawn = nn.init.trunc_normal_(torch.empty(layer.weight.shape), std=0.02, generator=generator)
            with torch.no_grad():
                layer.weight.copy_(drawn)
                if layer.bias is not None:
                    layer.bias.zero_()
