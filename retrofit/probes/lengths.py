"""Streamed lengths of vectors, and what they have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def zero() -> Tensor:
    """What a streamed sum of any shape starts from."""
    return torch.zeros((), dtype=torch.float64)


@dataclass
class Lengths:
    """Lengths of each head's vectors over tokens: x is [B, H, N, D]; sums and figures are [H] in float64."""

    count: int = 0
    channels: int = 0
    length: Tensor = field(default_factory=zero)
    square: Tensor = field(default_factory=zero)
    total: Tensor = field(default_factory=zero)
    longest: Tensor = field(default_factory=zero)

    def add(self, x: Tensor) -> None:
        x = x.float()
        squares = torch.linalg.vecdot(x, x)
        self.count += x.shape[0] * x.shape[2]
        self.channels = x.shape[-1]
        self.length = self.length + squares.sqrt().double().sum((0, 2))
        self.square = self.square + squares.double().sum((0, 2))
        self.total = self.total + x.sum(2).double().sum(0)
        self.longest = torch.maximum(self.longest.to(x.device), squares.amax((0, 2)).double().sqrt())

    @property
    def rms(self) -> Tensor:
        return (self.square / (self.count * self.channels)).sqrt()

    @property
    def rms_max(self) -> Tensor:
        longest: Tensor = self.longest / self.channels**0.5
        return longest

    @property
    def cv(self) -> Tensor:
        mean = self.length / self.count
        return (self.square / self.count - mean**2).clamp_min(0).sqrt() / mean.clamp_min(1e-30)

    @property
    def common_share(self) -> Tensor:
        mean_square = self.square / self.count
        common: Tensor = (self.total / self.count).square().sum(-1)
        return common / mean_square.clamp_min(1e-30)
