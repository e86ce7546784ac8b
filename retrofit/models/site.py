"""A site: one attention module of a model, with how to reach its q and k.

Which attention classes are known is data: an `AttentionClass` a line, in the file of its library. Two mechanisms
serve them all: a class with slots `q_norm` and `k_norm` takes the norms there; any other class, and a norm after RoPE,
is served by a subclass whose forward is the installed one with one line put in (derive.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from retrofit.errors import ModelError
from retrofit.models.derive import Edit, check_slots, derived, original, unexpected
from retrofit.norms import HeadNorm, Layout
from retrofit.qknorm import QKNorm

_QUERIES = {"qkv": 3, "qk": 2, "q": 1, "wq": 1, "projection_query": 1}
"""Layers that make q, and how many of q, k and v each makes."""
_PROJECTIONS = (
    *_QUERIES,
    *("k", "kv", "q_proj", "k_proj", "query", "key", "in_proj", "wk", "pwise", "qkvs", "projection_key"),
    *("queries_keys_values", "keys_values", "queries"),
)
"""What the libraries call the layers that make q and k."""


@dataclass(frozen=True)
class AttentionClass:
    """What is known of an attention class: shapes of q and k where the norm belongs, and how to get there."""

    path: str
    """Module and name, such as `timm.layers.attention.Attention`."""
    heads: str | int = "num_heads"
    """Attribute that holds the number of query heads, or the number itself."""
    kv_heads: str | int | None = None
    """The same for key heads, where queries share them."""
    split: int = 1
    """Into how many heads of its own each of those is split, as differential attention does."""
    serial: bool = False
    """Whether the heads are computed one after another, each norm called with the head's number."""
    head_dim: str | None = "head_dim"
    """Attribute that holds the number of channels of a head. None: what the projection says."""
    scale: str | None = "scale"
    """Attribute that holds the factor on q.k. None: 1/sqrt(head_dim)."""
    layout: Layout = "BHND"
    rope: str | None = None
    """Attribute, of the module or of what it stands in, that holds the rotation. None: the class never rotates."""
    edit: Edit | None = None
    """Where the norm goes in a class without slots, before any rotation. None: the class has slots."""
    after_rope: Edit | None = None
    """Where it goes after the rotation. None: that cannot be had."""
    mixing: str | None = None
    """Attribute that holds the layer which mixes the heads' logits before softmax (talking heads), a weight [H, H]."""
    bias_from_q: bool = False
    """Whether a relative position bias is computed from q after the norm."""
    masked: float = -1e4
    """A key whose bias lies below this is hidden: a mask is -inf, the lowest number of a dtype or, in Swin, -100."""
    pool: bool = False
    """An attention pool: left alone unless the formula says pools=True."""


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
    rotated: bool
    """Whether a rotation (RoPE) comes between the projections and q.k."""

    @property
    def weight(self) -> Tensor:
        """The first weight of a projection; new parameters take its dtype and device."""
        layers = (m for m in self.module.children() if isinstance(m, nn.Linear | nn.Conv2d))
        layer = next(layers, None)
        weight = layer.weight if layer is not None else next(self.module.parameters())
        assert isinstance(weight, Tensor)
        return weight

    @property
    def projections(self) -> list[nn.Parameter]:
        """The weights that make q and k (and v, where one weight makes them all)."""
        layers = (getattr(self.module, name, None) for name in _PROJECTIONS)
        return [w for layer in layers if isinstance(layer, nn.Module) for w in layer.parameters() if w.ndim > 1]

    @property
    def mixing(self) -> Tensor | None:
        """What the logits of the heads are multiplied by before softmax, [H, H]; None where each is for itself."""
        if self.kind.mixing is None:
            return None
        weight: Tensor = getattr(self.module, self.kind.mixing).weight
        return weight.detach().flatten(1).float()

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

    def layout(self, spec: QKNorm) -> Layout:
        """Of q and k where `spec` norms them. Every class hands [B, H, N, D] on after its rotation."""
        moved = self.rotated and spec.position == "after_rope"
        return "BHND" if moved and self.kind.layout == "BNHD" else self.kind.layout

    def check(self, spec: QKNorm) -> None:
        """Raises ModelError unless the norm can be put where `spec` wants it."""
        if self.rotated and spec.position == "after_rope" and self.kind.after_rope is None:
            raise ModelError(f'{type(self.module).__name__} cannot be normed after RoPE; take position="before_rope"')
        if self.kind.serial and spec.axis == "projection":
            raise ModelError(f'{type(self.module).__name__} computes its heads one after another; take axis="head"')
        edit = self._edit(spec)
        if edit is not None:
            derived(self.kind.path, edit)
        else:
            check_slots(type(self.module))

    def place(self, q_norm: HeadNorm, k_norm: HeadNorm) -> None:
        """Puts the norms in; the base model's parameters keep their names."""
        edit = self._edit(q_norm.spec)
        if edit is not None:
            self.module.__class__ = derived(self.kind.path, edit)
        self.module.q_norm, self.module.k_norm = q_norm, k_norm

    def restore(self) -> None:
        """Takes the norms out: the module is what it was before `place`."""
        if self.kind.edit is None:
            for slot in ("q_norm", "k_norm"):
                setattr(self.module, slot, nn.Identity().train(self.module.training))
        else:
            del self.module.q_norm, self.module.k_norm
        self.module.__class__ = original(type(self.module))

    def _edit(self, spec: QKNorm) -> Edit | None:
        return self.kind.after_rope if self.rotated and spec.position == "after_rope" else self.kind.edit


@dataclass(frozen=True)
class Skipped:
    """An attention module that gets no norm, and why."""

    name: str
    reason: str


def left_out(skipped: Sequence[Skipped]) -> str:
    """The attention modules without a norm, counted by reason, with the first one's name."""
    reasons = Counter(s.reason for s in skipped)
    first = {s.reason: s.name for s in reversed(skipped)}
    return "; ".join(f"{n} x {reason} ({first[reason]}{', …' if n > 1 else ''})" for reason, n in reasons.items())


def find_sites(
    model: nn.Module, known: Sequence[AttentionClass], others: Mapping[str, str]
) -> tuple[list[Site], list[Skipped]]:
    """Every site of a model in the model's own order, and the attention modules that are none.

    Args:
        known: the classes that can take a norm.
        others: attention classes that cannot, by path, each with the reason.

    Raises ModelError where a known class lacks what its line in the table says of it.
    """
    by_path = {kind.path: kind for kind in known}
    modules = dict(model.named_modules())
    sites: list[Site] = []
    skipped: list[Skipped] = []
    for name, module in modules.items():
        cls = original(type(module))
        path = f"{cls.__module__}.{cls.__qualname__}"
        if path in by_path:
            try:
                sites.append(_site(name, module, by_path[path], modules))
            except (AttributeError, StopIteration, TypeError) as error:
                raise unexpected(cls, str(error) or "no layer is known to make its q") from error
        elif path in others:
            skipped.append(Skipped(name, f"{cls.__name__}: {others[path]}"))
        elif cls.__name__.lower().endswith("attention") and _owns_projection(module):
            own = not isinstance(getattr(module, "q_norm", nn.Identity()), nn.Identity)
            reason = "it has QK-Norm of its own" if own else "not known here"
            skipped.append(Skipped(name, f"{cls.__name__}: {reason}"))
    return sites, skipped


def _site(name: str, module: nn.Module, kind: AttentionClass, modules: Mapping[str, nn.Module]) -> Site:
    def figure(fact: str | int) -> int:
        return fact if isinstance(fact, int) else int(getattr(module, fact))

    heads = figure(kind.heads) * kind.split
    kv_heads = figure(kind.kv_heads) if kind.kv_heads is not None else heads
    head_dim = figure(kind.head_dim) if kind.head_dim is not None else _width(module) // heads
    scale = head_dim**-0.5 if kind.scale is None else float(getattr(module, kind.scale))
    return Site(name, module, kind, heads, kv_heads, head_dim, scale, _rotated(name, kind, modules))


def _width(module: nn.Module) -> int:
    """The channels of q, all heads together, from the layer that makes it."""
    made = ((getattr(module, name, None), parts) for name, parts in _QUERIES.items())
    layer, parts = next((layer, parts) for layer, parts in made if isinstance(layer, nn.Module))
    return next(w for w in layer.parameters() if w.ndim > 1).shape[0] // parts


def _rotated(name: str, kind: AttentionClass, modules: Mapping[str, nn.Module]) -> bool:
    """Looked up on the module and outwards; where nobody holds it, a rotation is taken for granted."""
    if kind.rope is None:
        return False
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        holder = modules[".".join(parts[:depth])]
        if hasattr(holder, kind.rope):
            return getattr(holder, kind.rope) is not None
    return True


def _owns_projection(module: nn.Module) -> bool:
    """Whether a module makes q itself, unlike a mere container of attention modules."""
    return any(isinstance(child, nn.Linear | nn.Conv2d) for child in module.children())
