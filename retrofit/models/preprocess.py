"""How a checkpoint wants its images: the same few figures for timm and transformers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preprocess:
    """Resize the shorter side to image_size / crop_pct, crop the centre, scale to [0, 1], normalise by mean and std."""

    image_size: int
    """Side of the square input, in pixels."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    """`bilinear`, `bicubic`, `nearest` or `lanczos`."""
    crop_pct: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(self.mean))
        object.__setattr__(self, "std", tuple(self.std))
