"""Put QK-Norm into a pretrained Vision Transformer, fine-tune it beside the original, and say whether it helped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrofit.checkpoint import load, load_model, save
    from retrofit.errors import RetrofitError
    from retrofit.probes import probe
    from retrofit.qknorm import QKNorm
    from retrofit.surgery import insert_qk_norm, remove_qk_norm

__version__ = "0.1.0"

_HOMES = {
    "QKNorm": "retrofit.qknorm",
    "RetrofitError": "retrofit.errors",
    "insert_qk_norm": "retrofit.surgery",
    "load": "retrofit.checkpoint",
    "load_model": "retrofit.checkpoint",
    "probe": "retrofit.probes",
    "remove_qk_norm": "retrofit.surgery",
    "save": "retrofit.checkpoint",
}
__all__ = [
    "QKNorm",
    "RetrofitError",
    "insert_qk_norm",
    "load",
    "load_model",
    "probe",
    "remove_qk_norm",
    "save",
]


def __getattr__(name: str) -> Any:
    """Public names are fetched on first use (PEP 562), so that importing retrofit does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'retrofit' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
