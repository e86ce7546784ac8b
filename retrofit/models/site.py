"""A site: one attention module of a model, with how to reach its q and k.

Which attention classes are known is data: an `AttentionClass` a line, in the file of its library. Two mechanisms
serve them all: classes of timm with the slots `q_norm` and `k_norm` take the norms there; any other class is swapped
for a subclass whose forward is the installed one with one line put in (derive.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from retrofit.models.derive import derived, original
from retrofit.norms import HeadNorm, Layout


@dataclass(frozen=True)
class AttentionClass:
    """What is known of an attention class: shapes of q and k where the norm belongs, and how to get there."""

    path: str
    """Module and name, such as `timm.layers.attention.Attention`."""
    heads: str = "num_heads"
    """Attribute that holds the number of query heads."""
    kv_heads: str | None = None
    """Attribute that holds the number of key heads, where queries are grouped."""
    scale: str = "scale"
    """Attribute that holds the factor on q.k."""
    layout: Layout = "BHND"
    rope: str | None = None
    """Attribute or keyword by which the class gets its rotation, which then follows the norm. None: no rotation."""
    after: str | None = None
    """Beginning of the line of forward that makes k, for classes without slots; the norm goes right after it."""
    q: str = "query_states"
    k: str = "key_states"


@dataclass(frozen=True)
class Site:
    """One attention module of a model."""

    name: str
    """Dotted path inside the model."""
    module: nn.Module
    kind: AttentionClass
    heads: int
    kv_heads: int
    head_dim: int
    scale: float

    @property
    def rotated(self) -> bool:
        """Whether a rotation (RoPE) follows the norm."""
        return self.kind.rope is not None

    @property
    def weight(self) -> Tensor:
        """The weight of the projection that makes q; new parameters take its dtype and device."""
        return _projection(self.module)[0]

    @property
    def norms(self) -> tuple[HeadNorm, HeadNorm] | None:
        """The norms that retrofit placed here, for q and k."""
        q, k = getattr(self.module, "q_norm", None), getattr(self.module, "k_norm", None)
        return (q, k) if isinstance(q, HeadNorm) and isinstance(k, HeadNorm) else None

    @property
    def native(self) -> bool:
        """Whether the model came with a norm on q and k of its own."""
        slot = getattr(self.module, "q_norm", None)
        return slot is not None and not isinstance(slot, nn.Identity | HeadNorm)

    def place(self, q_norm: HeadNorm, k_norm: HeadNorm) -> None:
        """Puts the norms in; the base model's parameters keep their names."""
        if self.kind.after is not None:
            self.module.__class__ = derived(self.kind)
        self.module.q_norm, self.module.k_norm = q_norm, k_norm

    def restore(self) -> None:
        """Takes the norms out: the module is what it was before `place`."""
        if self.kind.after is None:
            training = self.module.training
            self.module.q_norm, self.module.k_norm = nn.Identity().train(training), nn.Identity().train(training)
        else:
            del self.module.q_norm, self.module.k_norm
            self.module.__class__ = original(type(self.module))


@dataclass(frozen=True)
class Skipped:
    """An attention module that gets no norm, and why."""

    name: str
    reason: str


def find_sites(model: nn.Module, known: Sequence[AttentionClass]) -> tuple[list[Site], list[Skipped]]:
    """Every site of a model in the model's own order, and the attention modules that are none."""
    by_path = {kind.path: kind for kind in known}
    sites: list[Site] = []
    skipped: list[Skipped] = []
    for name, module in model.named_modules():
        cls = original(type(module))
        kind = by_path.get(f"{cls.__module__}.{cls.__qualname__}")
        if kind is not None:
            sites.append(_site(name, module, kind))
        elif "attention" in cls.__name__.lower() and _owns_projection(module):
            skipped.append(Skipped(name, f"{cls.__name__} is not supported yet"))
    return sites, skipped


def _site(name: str, module: nn.Module, kind: AttentionClass) -> Site:
    heads = int(getattr(module, kind.heads))
    kv_heads = int(getattr(module, kind.kv_heads)) if kind.kv_heads else heads
    weight, parts = _projection(module)
    head_dim = weight.shape[0] // parts // heads
    return Site(name, module, kind, heads, kv_heads, head_dim, float(getattr(module, kind.scale)))


def _projection(module: nn.Module) -> tuple[Tensor, int]:
    """The weight that makes q, and how many of q, k and v it makes together."""
    for attribute, parts in (("q_proj", 1), ("query", 1), ("qkv", 3)):
        layer = getattr(module, attribute, None)
        if isinstance(layer, nn.Module):
            weight = layer.weight
            assert isinstance(weight, Tensor)
            return weight, parts
    raise AssertionError(f"{type(module).__name__} has no q_proj, query or qkv")


def _owns_projection(module: nn.Module) -> bool:
    """Whether a module makes q itself, unlike a mere container of attention modules."""
    return any(isinstance(child, nn.Linear | nn.Conv2d) for child in module.children())
