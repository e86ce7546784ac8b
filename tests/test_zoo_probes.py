"""Probes against brute force in float64, on one small model of every attention class."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from test_zoo import Same
from zoo import FLAT, ZOO

from retrofit import QKNorm, insert_qk_norm, probe
from retrofit.models import family_of, sites_of
from retrofit.runfiles import dumps
from retrofit.tap import tapped

each = pytest.mark.parametrize("name", [name for name in ZOO if name != "hf_data2vec_eager"])


def sharpened(name: str):
    """With logits of some size; a fresh ViT's are near 0."""
    model = ZOO[name].build()
    factor = 8 if name in FLAT else 1 if name == "visformer" else 3
    with torch.no_grad():
        for site in sites_of(model)[0]:
            for weight in site.projections:
                weight *= factor
    return model


def run(name: str, model) -> torch.Tensor:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        return ZOO[name].run(model)


SECOND_SOFTMAX = {"convit": "blocks.0.attn"}
"""Gated attention takes a softmax over positions too, right after that over q.k."""


class Seen(Same):
    """A norm that does nothing and remembers the mean square of what passed."""

    squares: list[float]

    def forward(self, x: torch.Tensor, head: int | None = None) -> torch.Tensor:
        self.squares.append(x.pow(2).mean().item())
        return x


def brute_force(name: str, model, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, float]]]:
    """Every attention of a float64 copy, written out: all logits at once, entropy by its definition.

    q is taken where the norm would take it.
    """
    calls: dict[str, list[dict[str, float]]] = {}
    inside: list[str] = []
    softmax = torch.Tensor.softmax

    def note(logits: torch.Tensor) -> None:
        if inside:
            visible = logits > (-50 if "swin" in name else -1e4)  # its masks are -100, and these logits small
            weights = (logits - logits.amax(-1, keepdim=True)).exp()
            weights = weights / weights.sum(-1, keepdim=True)
            entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1)
            shown, keys = logits[visible], visible.sum(-1)
            share = torch.where(keys > 1, entropy / keys.clamp_min(2).double().log(), 1.0)
            figures = {"rows": entropy.numel(), "absmax": shown.abs().max(), "max": shown.max()}
            figures |= {"entropy": entropy.sum(), "share": share.sum()}
            calls.setdefault(inside[-1], []).append({key: float(value) for key, value in figures.items()})

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        logits = torch.einsum("...nd,...md->...nm", q, k.expand(*q.shape[:-2], *k.shape[-2:]))
        logits = logits * (scale or 1 / math.sqrt(q.shape[-1]))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            logits = logits + attn_mask
        note(logits)
        return softmax(logits, dim=-1) @ v

    def written_out(x, *args, **kwargs):
        note(x)
        return softmax(x, *args, **kwargs)

    double = copy.deepcopy(model).double()
    for site in sites_of(double)[0]:
        layout = site.layout(QKNorm())
        norms = [
            Seen(QKNorm(gain="none"), role, heads, site.head_dim, layout=layout)
            for role, heads in (("q", site.heads), ("k", site.kv_heads))
        ]
        for norm in norms:
            norm.squares = []
        site.place(*norms)
        site.module.register_forward_pre_hook(lambda *_, name=site.name: inside.append(name))
        site.module.register_forward_hook(lambda *_: inside.clear())
    with monkeypatch.context() as patch, torch.random.fork_rng(), torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", attention)
        patch.setattr(torch.Tensor, "softmax", written_out)
        patch.setattr(torch, "get_default_dtype", lambda: torch.float64)
        inputs = ZOO[name].inputs()
        torch.manual_seed(0)
        double(**{k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()})
    for site in sites_of(double)[0]:
        if site.name == SECOND_SOFTMAX.get(name):
            calls[site.name] = calls[site.name][::2]
        for call in calls[site.name]:
            call["q"] = sum(site.module.q_norm.squares) / len(site.module.q_norm.squares)
    return calls


@each
def test_figures_are_those_of_brute_force(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharpened(name)
    with probe(model) as seen:
        run(name, model)
    rows = seen.rows()
    calls = brute_force(name, model, monkeypatch)
    assert set(calls) == {row["site"] for row in rows}
    for row in rows:
        mine = calls[row["site"]]  # differential attention calls twice a layer
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


@pytest.mark.parametrize("name", ["cait", "efficientformer_v2"])
def test_mixed_heads_leave_no_bias_that_depends_on_q_and_k(name: str) -> None:
    """Of talking heads, what q.k and the mixing do not explain is a constant: calibration takes it as one."""
    model, seen = sharpened(name), []
    for factor in (1.0, 3.0):
        with torch.no_grad():
            for site in sites_of(model)[0]:
                for weight in site.projections:
                    weight *= factor
        with tapped(sites_of(model)[0], seen.append):
            run(name, model)
    half = len(seen) // 2
    mixing = [(one, other) for one, other in zip(seen[:half], seen[half:], strict=True) if one.mixing is not None]
    assert mixing
    for one, other in mixing:
        assert not torch.allclose(one.q, other.q, rtol=0.5)
        bias = one.bias if one.bias is not None else torch.zeros(())
        scale = one.logits(slice(None))[0].abs().max()
        assert (other.bias - bias).abs().max() < 1e-4 * scale
        assert (other.bias - other.bias[:1]).abs().max() < 1e-4 * scale


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


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, 1e38])
def test_a_model_that_has_diverged_can_be_looked_at(value: float) -> None:
    """What its attention comes to is no number, or none that is finite: it is said, and nothing fails."""
    model = sharpened("vit")
    with torch.no_grad():
        for site in sites_of(model)[0]:
            for weight in site.projections:
                weight.fill_(value)
                weight.view(torch.int32).bitwise_or_(-(math.isnan(value)))  # all bits: the last of all NaN
    with probe(model) as seen:
        run("vit", model)
    rows = json.loads(dumps(seen.rows(per_head=True)))
    assert {row["logit_p99"] for row in rows} == {None}
    assert {row["logit_absmax"] for row in rows} == {None}


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
