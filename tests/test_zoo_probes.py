"""Probes against brute force in float64, on one small model of every attention class."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from zoo import ZOO

from retrofit import QKNorm, insert_qk_norm, probe
from retrofit.models import family_of, sites_of

each = pytest.mark.parametrize("name", [name for name in ZOO if name != "hf_data2vec_eager"])


def sharpened(name: str):
    """With logits of some size; a fresh model's are near 0."""
    model = ZOO[name].build()
    with torch.no_grad():
        for site in sites_of(model)[0]:
            for weight in site.projections:
                weight *= 8
    return model


def run(name: str, model) -> torch.Tensor:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        return ZOO[name].run(model)


def brute_force(name: str, model, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Every attention of a float64 copy, written out: all logits at once, entropy by its definition."""
    calls: list[dict[str, float]] = []

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        logits = torch.einsum("...nd,...md->...nm", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
        bias = torch.zeros_like(logits)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            bias = bias.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            bias = bias + attn_mask
        logits, visible = logits + bias, bias > -50
        weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
        entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1)
        shown = logits[visible]
        calls.append(
            {
                "rows": entropy.numel(),
                "absmax": shown.abs().max().item(),
                "max": shown.max().item(),
                "entropy": entropy.sum().item(),
                "share": (entropy / visible.sum(-1).log()).sum().item() if visible.shape[-1] > 1 else entropy.numel(),
                "q": q.pow(2).mean().item(),
            }
        )
        return weights @ v

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attention)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        double = copy.deepcopy(model).double()
        inputs = ZOO[name].inputs()
        patch.setattr(torch, "get_default_dtype", lambda: torch.float64)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            double(**{k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()})
    return calls


@each
def test_figures_are_those_of_brute_force(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharpened(name)
    with probe(model) as seen:
        run(name, model)
    rows = seen.rows()
    calls = brute_force(name, model, monkeypatch)
    if name == "hf_aimv2":
        calls.pop()  # its pooling head is no site
    assert len(calls) % len(rows) == 0
    each_layer = len(calls) // len(rows)  # differential attention calls twice a layer
    for i, row in enumerate(rows):
        mine = calls[i * each_layer : (i + 1) * each_layer]
        count = sum(c["rows"] for c in mine)
        wanted = {
            "logit_absmax": max(c["absmax"] for c in mine),
            "logit_max": max(c["max"] for c in mine),
            "entropy": sum(c["entropy"] for c in mine) / count,
            "entropy_share": sum(c["share"] for c in mine) / count,
            "q_rms": math.sqrt(sum(c["q"] for c in mine) / len(mine)),
        }
        for key, value in wanted.items():
            assert row[key] == pytest.approx(value, rel=1e-4, abs=1e-5), (key, row["site"])


@each
def test_unfused_attention_reads_the_same(name: str) -> None:
    model = sharpened(name)
    twin = copy.deepcopy(model)
    assert family_of(twin).unfuse(twin) == (name != "hf_data2vec")  # transformers cannot switch that one
    with probe(model) as fused, probe(twin) as unfused:
        run(name, model)
        run(name, twin)
    for a, b in zip(fused.rows(), unfused.rows(), strict=True):
        assert {k: v for k, v in a.items() if isinstance(v, float)} == pytest.approx(
            {k: v for k, v in b.items() if isinstance(v, float)}, rel=2e-3, abs=1e-4
        )


def test_divided_logits_have_their_scale() -> None:
    model = sharpened("hf_data2vec_eager")
    insert_qk_norm(model, QKNorm(), init="ones")
    with probe(model) as seen:
        run("hf_data2vec_eager", model)
    for row in seen.rows():
        assert row["logit_bound"] < math.sqrt(8) + 1  # sqrt(head_dim), and a bias that starts at 0


def test_what_was_projected_is_told_from_what_enters_attention() -> None:
    for name in ("vit", "sam", "parallel", "hf_vit", "hf_dinov3"):
        model = sharpened(name)
        with probe(model) as before:
            run(name, model)
        insert_qk_norm(model, QKNorm(), init="ones")
        with probe(model) as after:
            run(name, model)
        for figure in ("q_rms", "k_rms", "q_rms_max", "k_cv"):
            name = f"{figure}_projected"
            assert after.rows()[0][name] == pytest.approx(before.rows()[0][figure], rel=1e-4)
            assert before.rows()[0][name] == before.rows()[0][figure]
        assert after.rows()[0]["q_rms"] == pytest.approx(1.0, abs=0.05)  # short vectors feel eps


def test_prefix_and_patch_rows_are_told_apart() -> None:
    model = sharpened("dinov2")  # one class token and four registers
    with probe(model) as seen:
        run("dinov2", model)
    for layer, row in zip(seen.layers, seen.rows(), strict=True):
        assert layer.prefix == 5
        tokens = 5 + 16
        assert row["entropy_share"] == pytest.approx(
            (5 * row["entropy_share_prefix"] + 16 * row["entropy_share_patch"]) / tokens, rel=1e-6
        )
    model = sharpened("relpos")  # no class token
    with probe(model) as seen:
        run("relpos", model)
    assert seen.rows()[0]["entropy_share_prefix"] is None


def test_percentiles_come_within_a_bin() -> None:
    model = sharpened("vit")
    logits = []
    with probe(model) as seen:
        run("vit", model)
    softmax = torch.Tensor.softmax
    family_of(model).unfuse(model)

    def spy(x, *args, **kwargs):
        logits.append(x.detach().clone())
        return softmax(x, *args, **kwargs)

    torch.Tensor.softmax = spy
    try:
        run("vit", model)
    finally:
        torch.Tensor.softmax = softmax
    for row, values in zip(seen.rows(), logits, strict=True):
        for key, p in (("logit_p50", 0.5), ("logit_p99", 0.99)):
            wanted = values.flatten().quantile(p).item()
            assert row[key] == pytest.approx(wanted, rel=0.02, abs=1e-3)


def test_a_sample_reads_less_and_says_so() -> None:
    model = sharpened("vit")
    with probe(model, images=1, heads=2, rows=4) as some, probe(model) as all_:
        run("vit", model)
    for layer, row, whole in zip(some.layers, some.rows(), all_.rows(), strict=True):
        assert row["sampling"] == {"images": 1, "heads": 2, "rows": 4}
        assert "sampling" not in whole
        assert layer.rows.max() <= 4
        assert layer.logit_max.shape == (2,)
        assert row["logit_absmax"] <= whole["logit_absmax"]
        assert row["q_rms"] == whole["q_rms"]


def test_checkpointed_passes_are_read_once() -> None:
    model = sharpened("vit").train()
    model.set_grad_checkpointing()
    with probe(model) as seen:
        ZOO["vit"].run(model).sum().backward()
    tokens = 17
    assert [layer.rows.tolist() for layer in seen.layers] == [[2.0 * tokens] * 4] * 2


def test_a_compiled_model_is_refused_at_once() -> None:
    from retrofit.errors import ModelError

    compiled = torch.compile(sharpened("vit"), backend="eager")
    with pytest.raises(ModelError, match="compiled"), probe(compiled):
        raise AssertionError("the block must not run")
    in_place = sharpened("vit")
    in_place.compile(backend="eager")
    with pytest.raises(ModelError, match="compiled"), probe(in_place):
        raise AssertionError("the block must not run")
    a_block = sharpened("vit")
    a_block.blocks[1] = torch.compile(a_block.blocks[1], backend="eager")
    with pytest.raises(ModelError, match="compiled"), probe(a_block):
        raise AssertionError("the block must not run")


def test_a_compiled_step_around_the_model_is_read_too() -> None:
    model = sharpened("vit")
    inputs = ZOO["vit"].inputs()
    step = torch.compile(lambda: model(**inputs).sum(), backend="eager")
    with torch.no_grad():
        step()
        with probe(model) as plain:
            model(**inputs)
        with probe(model) as seen:
            step()
        assert seen.rows() == plain.rows()
