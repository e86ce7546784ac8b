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
_MASKED = -50.0
"""A key whose bias lies below this is hidden: a mask is -inf, the lowest number of a dtype or, in Swin, -100, where a
bias is a few units."""


@dataclass(frozen=True)
class Reading:
    """One attention, as it was computed. q [B, H, N, D] and k [B, H, M, D] are unscaled; kv heads are repeated."""

    site: Site
    q: Tensor
    k: Tensor
    scale: float
    bias: Tensor | None = None
    """Added to s * q.k, broadcastable to [B, H, N, M]; a boolean mask stands here as 0 and -inf."""
    projected: tuple[Tensor, Tensor] | None = None
    """q and k before the norms that retrofit placed, [B, H, N, D] and [B, kv heads, M, D]; None without norms."""

    def logits(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """What softmax sees for some queries, [B, H, rows, M] in float32, and where a mask hides a key (or None)."""
        logits = torch.matmul(self.q[:, :, rows].float() * self.scale, self.k.float().transpose(-2, -1))
        if self.bias is None:
            return logits, None
        bias = self.bias.float() if self.bias.shape[-2] == 1 else self.bias[..., rows, :].float()
        hidden = bias <= _MASKED
        return logits + bias, hidden.expand_as(logits) if bool(hidden.any()) else None

    def bias_absmax(self) -> float:
        """The largest |bias| that is no mask."""
        if self.bias is None:
            return 0.0
        bias = self.bias.float()
        return float(bias.masked_fill(bias <= _MASKED, 0.0).abs().max())

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
        return replace(self, q=self.q[b, h, n], k=self.k[b, h], bias=bias)


Reader = Callable[[Reading], None]


class _Tap(TorchFunctionMode):
    """Sees the torch functions that attention modules call, fused or not, and hands each attention to the readers."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        super().__init__()
        self.readers = readers
        self.inside: list[Site] = []
        self._scaled: tuple[Tensor, Tensor, float] | None = None  # result, operand, factor
        self._product: tuple[Tensor, Tensor, Tensor, float] | None = None  # q @ k^T, q, k, scale so far
        self._projected: dict[str, Tensor] = {}
        self._parts: list[tuple[Tensor, Tensor]] = []  # q, k of an attention that is not yet whole

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.inside:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._read_fused(*args, **kwargs)
        elif func in _SOFTMAXES and self._product is not None:
            self._read_unfused(args[0] if args else kwargs["input"])
        result = func(*args, **kwargs)
        if func in _PRODUCTS | _QUOTIENTS and isinstance(args[1], float | int):
            factor = float(args[1]) if func in _PRODUCTS else 1.0 / args[1]
            self._scaled = (result, args[0], factor)
            if self._product is not None and args[0] is self._product[0]:
                _, q, k, scale = self._product
                self._product = (result, q, k, scale * factor)
        elif func in _MATMULS:
            q, factor = args[0], 1.0
            if self._scaled is not None and self._scaled[0] is q:
                _, q, factor = self._scaled
            self._product = (result, q, args[1].transpose(-2, -1), factor)
        return result

    def leave(self) -> None:
        if self.inside:
            self.inside.pop()
        self._scaled = self._product = None
        self._parts, self._projected = [], {}

    def project(self, norm: HeadNorm, x: Tensor) -> None:
        self._projected[norm.role] = norm.by_head(x.detach())

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
        assert self._product is not None
        product, q, k, scale = self._product
        self._product = None
        if logits.shape == product.shape:
            self._emit(q, k, scale, None if logits is product else (logits - product).detach())

    def _emit(self, q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> None:
        site = self.inside[-1]
        q, k = q.detach(), k.detach()
        if q.ndim == 3:  # images and heads in one axis
            q, k = q.unflatten(0, (-1, site.heads)), k.unflatten(0, (-1, site.heads))
            bias = bias.unflatten(0, (-1, site.heads)) if bias is not None and bias.ndim == 3 else bias
        if k.shape[1] != q.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        if q.shape[1] < site.heads:  # differential attention, fused: a call for every other head
            self._parts.append((q, k))
            if len(self._parts) * q.shape[1] < site.heads:
                return
            q, k = (torch.stack(parts, 2).flatten(1, 2) for parts in zip(*self._parts, strict=True))
            self._parts = []
        projected = (self._projected["q"], self._projected["k"]) if len(self._projected) == 2 else None
        # Without torch functions: another probe around this one must not take the readers' own work for attention.
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False), torch._C.DisableTorchFunction():
            for reader in self.readers:
                reader(Reading(site, q, k, scale, bias, projected))


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
            tap.project(norm, args[0])

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
