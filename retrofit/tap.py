"""The one reader of live attention: hands q, k, scale and bias of every attention to whoever asks, and changes nothing.

Shapes: B images, H heads, N queries, M keys, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from retrofit.errors import ModelError
from retrofit.models import Site
from retrofit.norms import HeadNorm

_MATMULS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}
_SOFTMAXES = {torch.softmax, torch.Tensor.softmax, F.softmax}
_PRODUCTS = {torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__}
_QUOTIENTS = {torch.div, torch.Tensor.div, torch.Tensor.__truediv__}
_WRITES = {torch.Tensor.__setitem__, torch.Tensor.__iadd__, torch.Tensor.add_}


@dataclass(frozen=True)
class Reading:
    """One attention, as it was computed. q [B, H, N, D] and k [B, H, M, D] are unscaled; kv heads are repeated."""

    site: Site
    q: Tensor
    k: Tensor
    scale: float
    bias: Tensor | None = None
    """Added to s * q.k, broadcastable to [B, H, N, M]; a boolean mask stands here as 0 and -inf."""
    mixing: Tensor | None = None
    """[H, heads of q], what s * q.k of the heads is multiplied by before the bias comes; None for each by itself."""
    projected: tuple[Tensor, Tensor] | None = None
    """q and k before the norms that retrofit placed, [B, H, N, D] and [B, kv heads, M, D]; None without norms."""

    def logits(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """What softmax sees for some queries, [B, H, rows, M] in float32, and where a mask hides a key (or None)."""
        logits = torch.matmul(self.q[:, :, rows].float() * self.scale, self.k.float().transpose(-2, -1))
        logits = mixed(logits, self.mixing)
        if self.bias is None:
            return logits, None
        bias = self.bias.float() if self.bias.shape[-2] == 1 else self.bias[..., rows, :].float()
        hidden = bias <= self.site.kind.masked
        return logits + bias, hidden.expand_as(logits) if bool(hidden.any()) else None

    def bias_absmax(self) -> float:
        """The largest |bias| that is no mask."""
        if self.bias is None:
            return 0.0
        bias = self.bias.float()
        return float(bias.masked_fill(bias <= self.site.kind.masked, 0.0).abs().max())

    def sampled(self, images: int | None, heads: int | None, rows: int | None) -> Reading:
        """At most so many images, heads and queries, evenly spaced."""
        strides = [
            1 if most is None else -(-n // most)
            for n, most in zip(self.q.shape[:3], (images, heads, rows), strict=True)
        ]
        b, h, n = (slice(None, None, stride) for stride in strides)
        bias = self.bias
        if bias is not None:
            bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
            whole = [slice(None) if size == 1 else cut for size, cut in zip(bias.shape[:3], (b, h, n), strict=True)]
            bias = bias[tuple(whole)]
        if self.mixing is not None:  # each head needs the others
            return replace(self, q=self.q[b, :, n], k=self.k[b], bias=bias, mixing=self.mixing[h])
        return replace(self, q=self.q[b, h, n], k=self.k[b, h], bias=bias)


def mixed(logits: Tensor, mixing: Tensor | None) -> Tensor:
    """Logits [B, H, N, M] of talking heads (Shazeer et al. 2020), or as they are."""
    return logits if mixing is None else torch.einsum("hg,bgnm->bhnm", mixing.to(logits), logits)


Reader = Callable[[Reading], None]


@dataclass(frozen=True)
class _Product:
    """q.k as an attention module computed it, times the scale so far."""

    result: Tensor
    """The module's own tensor, by which the product is known again."""
    value: Tensor
    """Its values before the module writes a bias into it."""
    q: Tensor
    k: Tensor
    scale: float


class _Tap(TorchFunctionMode):
    """Sees the torch functions that attention modules call, fused or not, and hands each attention to the readers."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        super().__init__()
        self.readers = readers
        self.inside: list[Site] = []
        self._scaled: tuple[Tensor, Tensor, float] | None = None  # result, operand, factor
        self._products: list[_Product] = []  # since the last softmax
        self._projected: dict[str, list[Tensor]] = {"q": [], "k": []}
        self._parts: list[tuple[Tensor, Tensor, Tensor | None]] = []  # q, k, bias of an attention not yet whole

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.inside:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._read_fused(*args, **kwargs)
        elif func in _SOFTMAXES:
            self._read_unfused(args[0] if args else kwargs["input"])
        elif func in _WRITES:
            self._products = [
                replace(p, value=p.value.clone()) if p.result is args[0] and p.value is args[0] else p
                for p in self._products
            ]
        result = func(*args, **kwargs)
        if func in _PRODUCTS | _QUOTIENTS and isinstance(args[1], float | int):
            factor = float(args[1]) if func in _PRODUCTS else 1.0 / args[1]
            self._scaled = (result, args[0], factor)
            scaled = [p for p in self._products if p.result is args[0]]
            self._products += [_Product(result, result, p.q, p.k, p.scale * factor) for p in scaled]
        elif func in _MATMULS:
            self._products.append(_Product(result, result, *self._unscaled(args[0], args[1].transpose(-2, -1))))
        elif func is torch.einsum:
            operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
            if _compares(args[0]):
                self._products.append(_Product(result, result, *self._unscaled(*operands)))
        return result

    def leave(self) -> None:
        if self.inside:
            self.inside.pop()
        self._scaled = None
        self._products, self._parts, self._projected = [], [], {"q": [], "k": []}

    def project(self, norm: HeadNorm, x: Tensor, head: int | None = None) -> None:
        self._projected[norm.role].append(norm.by_head(x.detach(), head))

    def _unscaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        """q before it was scaled, k, and the scale; q may have been transposed since."""
        if self._scaled is not None:
            result, operand, factor = self._scaled
            if q is result:
                return operand, k, factor
            turned = result.transpose(-2, -1) if result.ndim > 1 else result
            if q.shape == turned.shape and q.stride() == turned.stride() and _same_memory(q, result):
                return operand.transpose(-2, -1), k, factor
        return q, k, 1.0

    def _read_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        bias = attn_mask
        if is_causal:
            bias = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.zeros(bias.shape, device=bias.device).masked_fill(~bias, float("-inf"))
        self._emit(query, key, scale if scale is not None else query.shape[-1] ** -0.5, bias)

    def _read_unfused(self, logits: Tensor) -> None:
        product = next((p for p in reversed(self._products) if p.result.shape == logits.shape), None)
        self._products = []
        if product is not None:
            plain = logits is product.value
            self._emit(product.q, product.k, product.scale, None if plain else self._added(logits, product.value))

    def _added(self, logits: Tensor, product: Tensor) -> Tensor:
        """What the module added to q.k, after it mixed the heads if it does."""
        wide = torch.promote_types(product.dtype, torch.float32)
        with torch.autocast(logits.device.type, enabled=False), torch._C.DisableTorchFunction():
            return logits.detach() - mixed(product.detach().to(wide), self.inside[-1].mixing)

    def _emit(self, q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> None:
        site = self.inside[-1]
        if bias is not None and bias.ndim == q.ndim:
            bias = _by_head(bias, site)
        q, k = _by_head(q.detach(), site), _by_head(k.detach(), site)
        if k.shape[1] != q.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        if q.shape[1] < site.heads:  # a call for every other head (differential attention, fused), or one for each
            self._parts.append((q, k, bias))
            if len(self._parts) * q.shape[1] < site.heads:
                return
            qs, ks, biases = zip(*self._parts, strict=True)
            q, k = torch.stack(qs, 2).flatten(1, 2), torch.stack(ks, 2).flatten(1, 2)
            if bias is not None and bias.ndim == 4:
                bias = torch.stack([b for b in biases if b is not None], 2).flatten(1, 2)
            self._parts = []
        before = [torch.cat(x, 1) if len(x) > 1 else x[0] for x in self._projected.values() if x]
        projected = (before[0], before[1]) if len(before) == 2 else None
        # Without torch functions: another probe around this one must not take the readers' own work for attention.
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False), torch._C.DisableTorchFunction():
            for reader in self.readers:
                reader(Reading(site, q, k, scale, bias, site.mixing, projected))


def _by_head(x: Tensor, site: Site) -> Tensor:
    """q, k or their product as attention computes it, as [B, H, ., .]; windows count as images."""
    if x.ndim == 3 or site.kind.layout == "(BH)GND":
        x = x.unflatten(0, (-1, 1 if site.kind.serial else site.heads))
    if x.ndim == 5:
        x = (x if site.kind.layout == "BGHND" else x.transpose(1, 2)).flatten(0, 1)
    return x


def _compares(equation: str) -> bool:
    """Whether an einsum multiplies each q with each k, as bhqd,bhkd->bhqk does."""
    operands, _, result = equation.replace(" ", "").partition("->")
    q, _, k = operands.partition(",")
    return len(q) == len(k) > 2 and q[:-2] == k[:-2] and q[-1] == k[-1] and result == q[:-1] + k[-2]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


@contextmanager
def tapped(sites: Sequence[Site], *readers: Reader) -> Iterator[None]:
    """Hands every attention of `sites` that runs inside the block to each reader; changes nothing.

    A forward pass that gradient checkpointing repeats during backward is not read a second time.

    Raises ModelError at the end where no attention was seen.
    """
    tap = _Tap(readers)
    seen = 0

    def count(_: Reading) -> None:
        nonlocal seen
        seen += 1

    tap.readers = (count, *readers)
    handles = []
    for site in sites:

        def enter(_m: nn.Module, _a: Any, site: Site = site) -> None:
            if torch._C._current_graph_task_id() == -1:  # not inside a backward pass
                tap.inside.append(site)

        def leave(_m: nn.Module, _a: Any, _o: Any) -> None:
            tap.leave()

        def project(norm: nn.Module, args: Any) -> None:
            assert isinstance(norm, HeadNorm)
            tap.project(norm, *args)

        handles += [norm.register_forward_pre_hook(project) for norm in site.norms or ()]
        handles += [
            site.module.register_forward_pre_hook(enter),
            site.module.register_forward_hook(leave, always_call=True),
        ]
    try:
        with tap:
            yield
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise ModelError("no attention was seen: run the model inside the block, in this process and thread")
