"""Made models with attention of some size: a fresh model's logits are near 0, a pretrained one's are not."""

from __future__ import annotations

import copy
from typing import Any

import torch

from retrofit import QKNorm, probe
from retrofit.models import Site, sites_of
from retrofit.norms import HeadNorm

_WANTED = 10.0


class _Traced(HeadNorm):
    """Lets q or k through, cut off from what made it, and keeps what leads back there."""

    made: list[torch.Tensor]

    def forward(self, x: torch.Tensor, head: int | None = None) -> torch.Tensor:
        self.made.append(x.square().sum())
        return x.detach()


def sharpened(model: Any, inputs: dict[str, Any]) -> Any:
    """The model with its q and k, and nothing else, scaled until each layer's largest logit is about 10."""
    rows = _of_q_and_k(model, inputs)
    for _ in range(12):
        with probe(model) as seen, torch.no_grad(), torch.random.fork_rng():
            model(**inputs)
        now = {layer["site"]: layer["logit_absmax"] for layer in seen.rows()}
        if all(_WANTED / 2 <= largest <= _WANTED * 2 for largest in now.values()):
            break
        with torch.no_grad():
            for site, weight, own in rows:
                weight[own] *= min(2.0, max(0.5, (_WANTED / max(now[site], 1e-6)) ** 0.5))
    return model


def _of_q_and_k(model: Any, inputs: dict[str, Any]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """What makes q and k at every site, each with which of its rows do: those that have a gradient from there."""
    twin = copy.deepcopy(model)
    made: list[torch.Tensor] = []
    sites, own = sites_of(twin)[0], sites_of(model)[0]
    for site in sites:
        spec = QKNorm(gain="none")
        norms = [
            _Traced(spec, role, heads, site.head_dim, layout=site.layout(spec))
            for role, heads in (("q", site.heads), ("k", site.kv_heads))
        ]
        for norm in norms:
            norm.made = made
        site.place(*norms)
        site.module.register_forward_pre_hook(_cut_off, with_kwargs=True)
    with torch.random.fork_rng():
        twin(**inputs)
    sum(made).backward()
    return [
        (site.name, weight, traced.grad.reshape(len(traced), -1).any(1))
        for site, theirs in zip(own, sites, strict=True)
        for weight, traced in zip(_weights(site), _weights(theirs), strict=True)
        if traced.grad is not None
    ]


def _weights(site: Site) -> list[torch.nn.Parameter]:
    """What makes q and k; where a norm of the library's follows, as in MViTv2, its gains too."""
    norms = (getattr(site.module, name, None) for name in ("norm_q", "norm_k"))
    return [*site.projections, *(norm.weight for norm in norms if norm is not None)]


def _cut_off(_: Any, args: Any, kwargs: Any) -> Any:
    def cut(x: Any) -> Any:
        return x.detach() if torch.is_tensor(x) else x

    return tuple(map(cut, args)), {key: cut(value) for key, value in kwargs.items()}
