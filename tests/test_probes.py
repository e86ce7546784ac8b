"""What the probe reads, against brute force in float64, and that it changes nothing."""

from __future__ import annotations

import gc
import math
import pickle
import re

import numpy as np
import pytest
import torch
from conftest import MAKERS, outputs_of, sharpen, tiny_hf, tiny_timm
from torch import nn

from retrofit import probes
from retrofit.errors import ModelError
from retrofit.models import family_of, sites_of
from retrofit.probes import attention, probe
from retrofit.qknorm import QKNorm
from retrofit.surgery import insert_qk_norm


class Bare(nn.Module):
    """One timm attention on tokens, with whatever mask its call is given."""

    def __init__(self, tokens: int = 7, cls: str = "Attention", **options) -> None:
        super().__init__()
        from timm.layers import attention

        torch.manual_seed(0)
        self.attn = getattr(attention, cls)(32, num_heads=4, qkv_bias=True, **options)
        self.tokens = tokens

    def forward(self, x, **call):
        return self.attn(x, **call)

    def vectors(self, x) -> tuple[np.ndarray, np.ndarray]:
        """q, k as [B, H, N, D] in float64, from the weights."""
        m = self.attn
        if getattr(m, "qkv", None) is not None:
            q, k, _ = m.qkv(x).chunk(3, -1)
        else:
            q, k = m.q_proj(x), m.k_proj(x)
        q, k = (v.detach().double().unflatten(-1, (-1, 8)).transpose(1, 2).numpy() for v in (q, k))
        return q, np.repeat(k, q.shape[1] // k.shape[1], axis=1)


def brute(q: np.ndarray, k: np.ndarray, bias: np.ndarray | float = 0.0, scale: float | None = None) -> dict[str, float]:
    """The figures by their definitions, one row of attention at a time, from [B, H, N, D] in float64."""
    heads, channels = q.shape[1], q.shape[3]
    scale = channels**-0.5 if scale is None else scale
    logits = scale * q @ k.swapaxes(-1, -2)
    bias = np.broadcast_to(bias, logits.shape)
    entropy, share, peaked, spread, largest, absolute = [], [], [], -1.0, -math.inf, 0.0
    per_head: list[list[float]] = [[] for _ in range(heads)]
    for b, h, i in np.ndindex(logits.shape[:3]):
        row = logits[b, h, i] + bias[b, h, i]
        row = row[row > -1e30]
        p = np.exp(row - row.max())
        p /= p.sum()
        here = -sum(x * math.log(x) for x in p if x > 0)
        entropy.append(here)
        share.append(here / math.log(len(row)) if len(row) > 1 else 1.0)
        per_head[h].append(share[-1])
        peaked.append(float(p.max() > 0.95))
        spread, largest = max(spread, row.max() - row.min()), max(largest, row.max())
        absolute = max(absolute, np.abs(row).max())

    def lengths(x: np.ndarray, h: int) -> np.ndarray:
        return np.sqrt((x[:, h] ** 2).sum(-1)).ravel()

    common = []
    for h in range(heads):
        flat = k[:, h].reshape(-1, channels)
        common.append((flat.mean(0) ** 2).sum() / (flat**2).sum(-1).mean())
    return {
        "q_rms_max": np.sqrt((q**2).mean(-1)).max(),
        "k_rms_max": np.sqrt((k**2).mean(-1)).max(),
        "q_rms_projected": math.sqrt((q**2).mean()),
        "q_rms": math.sqrt((q**2).mean()),
        "k_rms": math.sqrt((k**2).mean()),
        "q_cv": np.mean([lengths(q, h).std() / lengths(q, h).mean() for h in range(heads)]),
        "k_cv": np.mean([lengths(k, h).std() / lengths(k, h).mean() for h in range(heads)]),
        "key_common_share": np.mean(common),
        "logit_max": largest,
        "logit_absmax": absolute,
        "logit_spread": spread,
        "entropy": np.mean(entropy),
        "entropy_share": np.mean(share),
        "entropy_share_min_head": min(np.mean(rows) for rows in per_head),
        "peaked_rows": np.mean(peaked),
    }


def agree(row: dict, wanted: dict[str, float], tolerance: float = 1e-4) -> None:
    assert wanted.keys() <= row.keys()
    for name, value in wanted.items():
        assert row[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def read(model: nn.Module, *calls) -> list[dict]:
    with probe(model) as seen, torch.no_grad():
        for call in calls:
            model(*call) if isinstance(call, tuple) else model(call)
    return seen.rows()


def captured(model: nn.Module, images) -> list[tuple[np.ndarray, np.ndarray]]:
    """q and k of every site, [B, H, N, D], from the projections' weights and the attention modules' inputs."""
    inputs: list[torch.Tensor] = []
    sites = sites_of(model)[0]
    handles = [s.module.register_forward_pre_hook(lambda _m, args: inputs.append(args[0])) for s in sites]
    outputs_of(model, images)
    for handle in handles:
        handle.remove()
    found = []
    for site, x in zip(sites, inputs, strict=True):
        with torch.no_grad():
            if getattr(site.module, "qkv", None) is not None:
                q, k, _ = site.module.qkv(x).chunk(3, -1)
            else:
                q, k = site.module.q_proj(x), site.module.k_proj(x)
        found.append(tuple(v.double().unflatten(-1, (4, 8)).transpose(1, 2).numpy() for v in (q, k)))
    return found


@pytest.mark.parametrize("kind", ["timm", "ViT", "Dinov2WithRegisters"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("factor", [1.0, 40.0])
def test_figures_by_brute_force(kind: str, fused: bool, factor: float, images) -> None:
    model = sharpen(MAKERS[kind](), factor)
    if not fused:
        family_of(model).unfuse(model)
    rows = read(model, images)
    for row, (q, k), site in zip(rows, captured(model, images), sites_of(model)[0], strict=True):
        agree(row, brute(q, k))
        assert (row["site"], row["heads"], row["logit_bound"]) == (site.name, 4, None)
    assert max(row["peaked_rows"] for row in rows) > 0 or factor == 1.0


@pytest.mark.parametrize("fused", [True, False])
def test_blocks_of_rows_do_not_matter(fused: bool, images, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharpen(tiny_timm())
    model.blocks[0].attn.fused_attn = fused
    whole = read(model, images)
    monkeypatch.setattr(attention, "_BLOCK", 6 * 4 * 17 * 3)
    for one, other in zip(read(model, images), whole, strict=True):
        agree(one, {k: v for k, v in other.items() if isinstance(v, float)}, 1e-6)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mask", ["additive", "boolean", "minus_inf", "lowest", "causal"])
def test_masks_and_biases(fused: bool, mask: str) -> None:
    model = Bare()
    model.attn.fused_attn = fused
    x = torch.randn(3, 7, 32) * 3
    keep = torch.ones(7, 7, dtype=torch.bool)
    keep[:, -2:] = False
    keep[0, 1:] = False  # one visible key
    call: dict = {}
    if mask == "additive":
        call["attn_mask"] = torch.randn(3, 4, 7, 7) * 3
        wanted = call["attn_mask"].double().numpy()
    elif mask == "causal":
        call["is_causal"] = True
        wanted = np.where(np.tril(np.ones((7, 7))) > 0, 0.0, -np.inf)
    else:
        lowest = torch.finfo(torch.float32).min if mask == "lowest" else -math.inf
        wanted = np.where(keep.numpy(), 0.0, -np.inf)
        call["attn_mask"] = keep if mask == "boolean" else torch.zeros(7, 7).masked_fill(~keep, lowest)
    with probe(model) as seen:
        model(x, **call)
    agree(seen.rows()[0], brute(*model.vectors(x), wanted))


def test_a_query_that_sees_no_key_is_left_out() -> None:
    """As the padded queries of a batch of unequal lengths; PyTorch's own result for it is NaN or 0."""
    model = Bare()
    model.attn.fused_attn = False
    x = torch.randn(2, 7, 32) * 3
    mask = torch.zeros(2, 1, 7, 7)
    mask[0, :, 4:] = mask[0, :, :, 4:] = -math.inf
    with probe(model) as seen:
        model(x, attn_mask=mask)
    q, k = model.vectors(x)
    parts = [brute(q[:1, :, :4], k[:1, :, :4]), brute(q[1:], k[1:])]
    row = seen.rows()[0]
    for name in ("logit_max", "logit_absmax", "logit_spread"):
        assert row[name] == pytest.approx(max(part[name] for part in parts), rel=1e-5)
    for name in ("entropy", "entropy_share", "peaked_rows"):
        assert row[name] == pytest.approx((4 * parts[0][name] + 7 * parts[1][name]) / 11, rel=1e-5)
    assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))


@pytest.mark.parametrize("fused", [True, False])
def test_grouped_queries(fused: bool) -> None:
    model = Bare(cls="AttentionRope", num_kv_heads=2, qkv_fused=False)
    model.attn.fused_attn = fused
    x = torch.randn(3, 7, 32) * 4
    with probe(model) as seen:
        model(x)
    agree(seen.rows()[0], brute(*model.vectors(x)))


@pytest.mark.parametrize("fused", [True, False])
def test_relative_position_bias_is_part_of_the_logits(fused: bool, images) -> None:
    model = MAKERS["relpos"]()
    with torch.no_grad():
        for block in model.blocks:
            if getattr(block.attn, "rel_pos", None) is not None:
                for p in block.attn.rel_pos.parameters():
                    p.normal_(generator=torch.Generator().manual_seed(1))
    if not fused:
        family_of(model).unfuse(model)
    rows = read(model, images)
    for row, (q, k), site in zip(rows, captured(model, images), sites_of(model)[0], strict=True):
        bias = site.module.rel_pos.get_bias().detach().double().numpy()
        assert np.abs(bias).max() > 0.01
        agree(row, brute(q, k, bias))


@pytest.mark.parametrize("fused", [True, False])
def test_rotated_vectors_are_read_after_the_rotation(fused: bool, images) -> None:
    """|q| does not feel a rotation, logits do: compared with what softmax is given."""
    model = sharpen(MAKERS["rope"](), 10)
    family_of(model).unfuse(model)
    seen, real = [], torch.Tensor.softmax

    def softmax(self, *args, **kwargs):
        seen.append(float(self.abs().max()))
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", softmax)
        outputs_of(model, images)
    for site in sites_of(model)[0]:
        site.module.fused_attn = fused
    rows = read(model, images)
    assert [row["logit_absmax"] for row in rows] == pytest.approx(seen, rel=1e-4)
    for row, (q, k) in zip(rows, captured(model, images), strict=True):
        wanted = brute(q, k)
        assert row["q_rms"] == pytest.approx(wanted["q_rms"], rel=1e-4)
        assert row["entropy"] != pytest.approx(wanted["entropy"], rel=1e-4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["timm", "ViT"])
def test_uniform_and_one_hot_attention(kind: str, fused: bool, images) -> None:
    for factor, share, nats, peaked in ((0.0, 1.0, math.log(17), 0.0), (3e4, 0.0, 0.0, 1.0)):
        model = MAKERS[kind]()
        sharpen(model, factor)
        with torch.no_grad():
            for site in sites_of(model)[0]:
                layer = site.module.qkv if kind == "timm" else site.module.k_proj
                if layer.bias is not None:
                    layer.bias.zero_()
        if not fused:
            family_of(model).unfuse(model)
        row = read(model, images)[0]
        assert row["entropy"] == pytest.approx(nats, abs=2e-2)
        assert row["entropy_share"] == pytest.approx(share, abs=1e-2)
        assert row["peaked_rows"] == pytest.approx(peaked, abs=2e-2)
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))


def test_one_token_has_entropy_share_one() -> None:
    model = Bare()
    with probe(model) as seen:
        model(torch.randn(2, 1, 32))
    row = seen.rows()[0]
    assert (row["entropy"], row["entropy_share"], row["peaked_rows"]) == (0.0, 1.0, 1.0)


def test_passes_add_up(images) -> None:
    model = sharpen(tiny_timm())
    whole = read(model, images)
    for one, other in zip(read(model, images[:1], images[1:4], images[4:]), whole, strict=True):
        agree(one, {k: v for k, v in other.items() if isinstance(v, float)}, 1e-5)
    with probe(model) as seen:
        model(images)
        model(images)
    assert [layer.rows.tolist() for layer in seen.layers] == [[2 * 6 * 17.0] * 4] * 3


@pytest.mark.parametrize("kind", ["timm", "ViT"])
@pytest.mark.parametrize("fused", [True, False])
def test_under_bfloat16_autocast(kind: str, fused: bool, images) -> None:
    model = sharpen(MAKERS[kind](), 3)
    if not fused:
        family_of(model).unfuse(model)
    exact = read(model, images)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        plain = model(images)
        with probe(model) as seen:
            probed = model(images)
    assert torch.equal(plain if kind == "timm" else plain.logits, probed if kind == "timm" else probed.logits)
    for one, other in zip(seen.rows(), exact, strict=True):
        for name in ("q_rms", "k_rms", "logit_absmax", "entropy"):
            assert one[name] == pytest.approx(other[name], rel=0.05), name


@pytest.mark.parametrize("kind", ["timm", "rope", "ViT"])
@pytest.mark.parametrize("fused", [True, False])
def test_it_changes_nothing(kind: str, fused: bool, images) -> None:
    model = MAKERS[kind](**({"attn_drop_rate": 0.3} if kind != "ViT" else {"attention_probs_dropout_prob": 0.3}))
    model.train()
    if not fused:
        family_of(model).unfuse(model)

    def step() -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(5)
        model.zero_grad()
        result = model(images)
        result = result if kind != "ViT" else result.logits
        result.square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return result.detach(), grads, torch.get_rng_state()

    outside = step()
    before = {n: (dict(m._forward_hooks), dict(m._forward_pre_hooks), set(vars(m))) for n, m in model.named_modules()}
    with probe(model) as seen:
        inside = step()
        assert len(seen.layers) == 3
    assert torch.equal(outside[0], inside[0])
    assert all(torch.equal(a, b) for a, b in zip(outside[1], inside[1], strict=True))
    assert torch.equal(outside[2], inside[2])
    after = {n: (dict(m._forward_hooks), dict(m._forward_pre_hooks), set(vars(m))) for n, m in model.named_modules()}
    assert before == after
    pickle.dumps(model)


@pytest.mark.parametrize("fused", [True, False])
def test_no_map_of_attention_is_kept(fused: bool, images) -> None:
    model = tiny_timm()
    if not fused:
        family_of(model).unfuse(model)

    def held() -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    read(model, images)
    before = held()
    with probe(model) as seen, torch.no_grad():
        model(images)
    assert held() - before < 3 * 2 * 32768 * 8 + 20_000  # three layers' histograms, and a value a head and channel
    del seen
    assert held() == before


def test_an_error_inside_leaves_no_hooks(images) -> None:
    model = tiny_timm()

    def broken() -> None:
        with probe(model):
            model(images[:, :1])

    with pytest.raises(RuntimeError, match="channels"):
        broken()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(read(model, images)) == 3


def test_each_head_has_its_own_figures(images) -> None:
    model = sharpen(tiny_timm())
    (q, k), *_ = captured(model, images)
    with probe(model) as seen, torch.no_grad():
        model(images)
    heads = seen.layers[0].per_head()
    assert {len(values) for values in heads.values()} == {4}
    for h in range(4):
        wanted = brute(q[:, h : h + 1], k[:, h : h + 1])
        agree({name: float(values[h]) for name, values in heads.items()}, {n: wanted[n] for n in wanted if n in heads})


def test_nothing_seen_is_an_error() -> None:
    with pytest.raises(ModelError, match="no attention was seen"), probe(tiny_timm()):
        pass
    with pytest.raises(ModelError, match="no attention that retrofit can read"), probe(nn.Linear(2, 2)):
        pass


def test_nested_probes_both_see(images) -> None:
    model = tiny_timm()
    with probe(model) as outer, probe(model) as inner:
        model(images)
    assert outer.rows() == inner.rows()


def test_attention_outside_of_the_sites_is_not_read(images) -> None:
    model = tiny_timm()
    with probe(model) as seen, torch.no_grad():
        model(images)
        q = torch.full((1, 4, 3, 8), 1e4)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        (q @ q.mT).softmax(-1)
    assert all(row["logit_absmax"] < 100 for row in seen.rows())


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "swinv2", "henry2020", "llama4"])
@pytest.mark.parametrize("kind", ["timm", "ViT"])
def test_normed_attention_is_read_after_the_norm_and_keeps_its_bound(name: str, kind: str, images) -> None:
    model = sharpen(MAKERS[kind](), 10)
    raw = read(model, images)
    insert_qk_norm(model, QKNorm.preset(name), images, "match")
    rows = read(model, images)
    for row in rows:
        assert 0 < row["logit_absmax"] <= row["logit_bound"] * (1 + 1e-5)
        if name == "llama4":  # RMS over a head without a gain: every vector has the same length
            assert row["q_cv"] == pytest.approx(0, abs=1e-3)
            assert row["q_rms"] == pytest.approx(1, abs=1e-3)
            assert row["logit_bound"] == pytest.approx(8**0.5)
    assert max(r["logit_absmax"] for r in raw) != pytest.approx(max(r["logit_absmax"] for r in rows), rel=1e-3)


def test_bound_is_none_with_a_bias(images) -> None:
    model = tiny_hf()
    insert_qk_norm(model, QKNorm.preset("timm"), init="ones")
    assert [row["logit_bound"] for row in read(model, images)] == [None] * 3


def test_every_figure_is_defined(images) -> None:
    model = tiny_timm()
    insert_qk_norm(model, QKNorm(), init="ones")
    row = read(model, images)[0]
    defined = set(re.findall(r"[a-z_0-9]+", probes.__doc__ or ""))
    assert {name.removesuffix("_projected") for name in row} - {"site", "heads"} <= defined
