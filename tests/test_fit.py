"""The fit against independent formulas in float64: its loss, its descent, its bound, and that it disturbs nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import MAKERS, SHARED, outputs_of, sharpen, tiny_hf, tiny_relpos, tiny_timm
from hypothesis import given, settings
from hypothesis import strategies as st
from test_calibrate import cifar
from torch import nn
from zoo import ZOO

from retrofit.calibrate import LOGIT_LIMIT, Excerpt, Moments, remarks, rotations
from retrofit.calibrate import fit as fitting
from retrofit.calibrate.excerpt import PREFIX_SHARE
from retrofit.calibrate.moments import match
from retrofit.models import evaluating, sites_of
from retrofit.norms import HeadNorm
from retrofit.qknorm import QKNorm
from retrofit.surgery import insert_qk_norm, remove_qk_norm
from retrofit.tap import Reading, tapped

PER_HEAD = QKNorm(gain="per_head")
FORMULAS = [
    PER_HEAD,
    QKNorm(),
    QKNorm(gain="per_head", zero_centered=True),
    QKNorm.preset("olmo2"),
    QKNorm.preset("vit22b"),
    QKNorm.preset("timm"),
    QKNorm.preset("chameleon"),
    QKNorm.preset("llama4"),
    QKNorm.preset("henry2020", scale_init=5.0),
    QKNorm.preset("swinv2"),
]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "STEPS", 40)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kl_by_hand(model: nn.Module, original: nn.Module, images: torch.Tensor, prefix: int) -> list[float]:
    """Mean over heads of the weighted KL, a value a layer: the norms' own output on the original's q and k, loops."""
    taken: dict[str, tuple] = {}

    def keep(reading: Reading) -> None:
        taken[reading.site.name] = (reading.q, reading.k, reading.bias, reading.scale)

    with tapped(sites_of(original)[0], keep), torch.no_grad():
        original(images)
    found = []
    for site in sites_of(model)[0]:
        q, k, bias, scale = taken[site.name]
        step = site.heads // site.kv_heads
        with torch.no_grad():
            q_new = site.norms[0].by_head(site.norms[0](site.norms[0].as_laid_out(q)))
            k_new = site.norms[1].by_head(site.norms[1](site.norms[1].as_laid_out(k[:, ::step])))
        added = 0 if bias is None else bias.expand(*q.shape[:3], k.shape[2]).numpy()
        total = 0.0
        for b in range(len(q)):
            for h in range(site.heads):
                p = softmax(scale * q[b, h].numpy() @ k[b, h].numpy().T + (added if bias is None else added[b, h]))
                logits = scale * q_new[b, h].numpy() @ k_new[b, h // step].numpy().T
                r = softmax(logits + (added if bias is None else added[b, h]))
                rows = (p * (np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(r, 1e-300)))).sum(-1)
                patches = rows[prefix:].mean()
                total += patches if not prefix else PREFIX_SHARE * rows[:prefix].mean() + (1 - PREFIX_SHARE) * patches
        found.append(total / len(q) / site.heads)
    return found


@pytest.mark.parametrize("kind", ["timm", "relpos", "Dinov2", "Dinov2WithRegisters"])
@pytest.mark.parametrize("init", ["ones", "match", "fit"])
def test_the_divergence_is_what_it_is_said_to_be(kind: str, init: str, images) -> None:
    changes = {"num_register_tokens": 2} if "Registers" in kind else {}
    original = sharpen(MAKERS[kind](**changes)).double()
    model = copy.deepcopy(original)
    layers = insert_qk_norm(model, PER_HEAD, images.double(), init).layers
    prefix = {"timm": 1, "relpos": 0, "Dinov2": 1, "Dinov2WithRegisters": 3}[kind]
    assert [layer.kl for layer in layers] == pytest.approx(
        kl_by_hand(model, original, images.double(), prefix), rel=1e-6
    )


@pytest.mark.parametrize("spec", FORMULAS, ids=str)
@pytest.mark.parametrize("kind", ["timm", "rope", "ViT"])
def test_every_formula_comes_nearer(spec: QKNorm, kind: str, images) -> None:
    """In every layer: match is not worse than ones on the whole, and the fit not worse than match anywhere."""
    model = sharpen(MAKERS[kind]())
    layers = insert_qk_norm(model, spec, images).layers
    assert all(layer.kl <= layer.kl_match for layer in layers)
    held = 1.0 if kind == "rope" else 0.97  # without a shift and a gain per head there is little to move
    assert sum(layer.kl for layer in layers) < held * sum(layer.kl_match for layer in layers)
    assert sum(layer.kl for layer in layers) < sum(layer.kl_ones for layer in layers)
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(layer.shifted == (kind != "rope" or spec.position == "after_rope") for layer in layers)


VIDEO = ("hf_vivit", "hf_videomae", "hf_timesformer", "hf_vjepa2")


@pytest.mark.parametrize("name", [name for name in ZOO if name not in (*VIDEO, "hf_siglip2", "hf_pixtral")])
def test_every_class_of_attention_is_fitted(name: str) -> None:
    """What the result says was reached is reached in the live model, whose layers below are the original's own."""
    animal = ZOO[name]
    model = animal.build()
    side = next(iter(animal.inputs().values())).shape[-1]
    images = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(5))
    insertion = insert_qk_norm(model, PER_HEAD, images)
    assert len(insertion.layers) == animal.sites
    for layer in insertion.layers:
        assert -1e-7 <= layer.kl <= layer.kl_match + 1e-7
        assert layer.kl < max(layer.kl_ones, 1e-5)  # where attention is all but uniform there is nothing to reach
    assert ("RoPE" in " ".join(insertion.remarks)) == ("rope" in animal.facts)


class Alone(nn.Module):
    """One attention of timm, so that what it reads does not depend on norms below."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        from timm.layers.attention import Attention, AttentionRope

        torch.manual_seed(0)
        self.patch = nn.Conv2d(3, 32, 8, 8)
        self.attn = AttentionRope(32, num_heads=4, num_kv_heads=2, qkv_fused=False) if grouped else Attention(32, 4)
        self.rope = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(x).flatten(2).mT
        out: torch.Tensor = self.attn(tokens)
        return out


def live_logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    seen = []
    with tapped(sites_of(model)[0], lambda r: seen.append(r.logits(slice(None))[0])), torch.no_grad():
        model(images)
    return seen[0]


@pytest.mark.parametrize("grouped", [False, True])
def test_the_live_model_has_the_divergence_that_is_reported(grouped: bool, images) -> None:
    with torch.random.fork_rng():
        original = Alone(grouped).eval()
    if grouped:
        with torch.no_grad():
            original.attn.q_proj.weight *= 4
            original.attn.k_proj.weight *= 4
    model = copy.deepcopy(original)
    layer = insert_qk_norm(model, PER_HEAD, images).layers[0]
    p, r = (live_logits(m, images).double().log_softmax(-1) for m in (original, model))
    assert layer.kl == pytest.approx(float((p.exp() * (p - r)).sum(-1).mean()), rel=1e-3)


@pytest.mark.parametrize("name", ["eva02", "dinov3", "pe", "rope_grouped", "hf_dinov3"])
def test_rotations_are_found(name: str) -> None:
    """Taken off and put on again, the read rotation gives back q and k; and it keeps lengths."""
    model = ZOO[name].build()
    sites = [s for s in sites_of(model)[0] if not s.kind.pool]
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    rotated, raw = {}, {}
    insert_qk_norm(model, PER_HEAD, init="ones")

    def keep(reading: Reading) -> None:
        rotated[reading.site.name] = (reading.q, reading.k[:, :: reading.site.heads // reading.site.kv_heads])

    handles = [n.register_forward_hook(lambda n, a, _o: a[0]) for s in sites for n in s.norms]
    for site in sites:
        for i, n in enumerate(site.norms):
            handles.append(
                n.register_forward_pre_hook(lambda n, a, key=(site.name, i): raw.__setitem__(key, n.by_head(a[0])))
            )
    with evaluating(model), tapped(sites, keep):
        model(images)
    for handle in handles:
        handle.remove()
    with evaluating(model):
        found = rotations(sites, lambda count: model(images[:1].expand(count, -1, -1, -1)))
    for site in sites:
        rotation = found[site.name]
        for i, x in enumerate(rotated[site.name]):
            torch.testing.assert_close(rotation(raw[site.name, i]), x, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(rotation.undone(x), raw[site.name, i], rtol=1e-4, atol=1e-5)
    assert all(not torch.equal(r.other, torch.zeros_like(r.other)) for r in found.values())


def test_the_gradient_is_that_of_the_loss() -> None:
    """One step of plain descent along what autograd gives, against central differences of the loss in float64."""
    site, moments, excerpt = made(PER_HEAD)
    q, k = norms(site, PER_HEAD)
    match(q, k, moments)
    maps = excerpt.batches(10**6)
    for norm, name in ((q, "weight"), (k, "weight"), (k, "shift"), (q, "shift")):
        parameter = norm.get_parameter(name)
        target = maps[0].logits().softmax(-1)
        loss = fitting._divergence(maps[0], maps[0].logits(q, k), target).sum()
        (gradient,) = torch.autograd.grad(loss, parameter)
        for at in (0, 9, 30):
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter[at] += sign * 1e-5
                    ends.append(float(fitting.divergence(maps, q, k).sum()))
                    parameter[at] -= sign * 1e-5
            assert float(gradient[at]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-9), (name, at)


def made(spec: QKNorm, bias: torch.Tensor | None = None, seed: int = 0, images: int = 6):
    """A site of 4 heads of 8 channels with raw q and k of 12 tokens, read in float64."""
    generator = torch.Generator().manual_seed(seed)
    site = sites_of(tiny_timm())[0][0]
    moments, excerpt = Moments.of(site, spec), Excerpt(site, 0, 1 << 30)
    q = torch.randn(images, 4, 12, 8, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 2, 4, 3]).view(
        4, 1, 1
    )
    k = torch.randn(images, 4, 12, 8, generator=generator, dtype=torch.float64) + 2 * torch.randn(
        1, 4, 1, 8, generator=generator, dtype=torch.float64
    )
    for reader in (moments, excerpt):
        reader.read(Reading(site, q, k, site.scale, bias))
    return site, moments, excerpt


def norms(site, spec: QKNorm) -> tuple[HeadNorm, HeadNorm]:
    kinds = {"attention_scale": site.scale, "scale_init": 3.0, "shifted": True, "dtype": torch.float64}
    return HeadNorm(spec, "q", 4, 8, **kinds), HeadNorm(spec, "k", 4, 8, **kinds)


@settings(max_examples=15, deadline=None)
@given(
    spec=st.sampled_from(FORMULAS),
    seed=st.integers(0, 1000),
    hidden=st.integers(0, 11),
    relative=st.booleans(),
)
def test_masks_and_biases_stay_in_place(spec: QKNorm, seed: int, hidden: int, relative: bool) -> None:
    """Hidden keys get no weight, whatever stands in them; the fit lowers the loss and leaves finite parameters."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.zeros(6, 1, 12, 12, dtype=torch.float64)
    if relative:
        bias = bias + torch.randn(1, 4, 12, 12, generator=generator, dtype=torch.float64)
    bias[..., 12 - hidden :] = float("-inf")
    site, moments, excerpt = made(spec, bias, seed)
    q, k = norms(site, spec)
    match(q, k, moments)
    maps = excerpt.batches(10**6)
    before = fitting.divergence(maps, q, k)
    assert before.isfinite().all()
    assert (before >= -1e-12).all()
    assert float(maps[0].logits(q, k).softmax(-1)[..., 12 - hidden :].abs().max() if hidden else 0) == 0
    fitting.fit(q, k, moments, excerpt)
    after = fitting.divergence(maps, q, k)
    assert after.sum() <= before.sum()
    assert all(p.isfinite().all() for p in (*q.parameters(), *k.parameters()))


@pytest.mark.parametrize("spec", [s for s in FORMULAS if not s.bias and s.axis == "head"], ids=str)
def test_no_bound_is_raised_above_the_limit(spec: QKNorm, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrofit.norms import logit_bounds

    monkeypatch.setattr(fitting, "STEPS", 150)
    site, moments, excerpt = made(spec)
    q, k = norms(site, spec)
    match(q, k, moments)
    before = logit_bounds(q, k, rotated=False).expand(4)
    monkeypatch.setattr(fitting, "LOGIT_LIMIT", float(before.median()))
    fitting.fit(q, k, moments, excerpt)
    after = logit_bounds(q, k, rotated=False).expand(4)
    assert (after <= torch.maximum(before, torch.tensor(fitting.LOGIT_LIMIT, dtype=torch.float64)) * (1 + 1e-9)).all()
    assert fitting.LOGIT_LIMIT != LOGIT_LIMIT


def test_shared_gains_hold_each_heads_temperature_by_longer_keys() -> None:
    """Four heads of different temperature: with a shift, one gain for all comes as near as a gain for each."""
    kl = {}
    for name, spec in (("shared", QKNorm()), ("own", PER_HEAD)):
        site, moments, excerpt = made(spec)
        q, k = norms(site, spec)
        match(q, k, moments)
        kl[name] = float(fitting.divergence(excerpt.batches(10**6), q, k).mean())
        k.shift.data.zero_()
        kl[f"{name} unshifted"] = float(fitting.divergence(excerpt.batches(10**6), q, k).mean())
    assert kl["shared"] < 1.2 * kl["own"]
    assert kl["shared unshifted"] > 2 * kl["shared"]


def test_what_one_temperature_costs_is_said(images) -> None:
    """Under RoPE no shift can hold what one gain cannot; the result says what that costs and what would help."""
    model = sharpen(MAKERS["rope"](), 10)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:8] *= 12  # one head sharper than the others
    insertion = insert_qk_norm(model, QKNorm(), images, "match")
    assert all(layer.kl_match_per_head < layer.kl_match for layer in insertion.layers)
    assert any("gain=per_head" in remark for remark in insertion.remarks)
    remove_qk_norm(model)
    insertion = insert_qk_norm(model, PER_HEAD, images, "match")
    assert all(layer.kl_match_per_head is None for layer in insertion.layers)
    assert not any("gain=per_head" in remark for remark in insertion.remarks)


def test_a_large_remaining_shock_is_said_with_its_layers(images) -> None:
    model = sharpen(tiny_timm(), 30)
    insertion = insert_qk_norm(model, PER_HEAD, images, "ones")
    worst = max(insertion.layers, key=lambda layer: layer.kl)
    assert any("still changes the model" in r and worst.site in r and "init=fit" in r for r in insertion.remarks)
    assert not any("still changes" in r for r in remarks(PER_HEAD, "fit", insertion.layers, 0.99, 64))


def test_a_fit_to_few_images_is_said(images) -> None:
    few = insert_qk_norm(sharpen(tiny_timm()), PER_HEAD, images, "fit")
    assert any(f"fitted to {len(images)} images" in r and "init=match" in r for r in few.remarks)
    for init, batches in (("match", images), ("fit", [images] * 6)):
        insertion = insert_qk_norm(sharpen(tiny_timm()), PER_HEAD, batches, init)
        assert not any("images" in r for r in insertion.remarks)


@pytest.mark.parametrize("kind", ["timm", "ViT", "relpos", "rope"])
def test_the_same_images_give_the_same_norms_bit_for_bit(kind: str, images) -> None:
    models = [sharpen(MAKERS[kind]()) for _ in range(2)]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        insert_qk_norm(model, PER_HEAD, images)
    for a, b in zip(*(m.state_dict().values() for m in models), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["no_grad", "inference", "autocast", "float64"])
def test_the_callers_modes_change_nothing(mode: str, images) -> None:
    one, other = sharpen(tiny_hf()), sharpen(tiny_hf())
    insert_qk_norm(one, PER_HEAD, images)
    contexts = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "float64": lambda: torch.set_default_dtype(torch.float64) or torch.enable_grad(),
    }
    try:
        with contexts[mode]():
            insert_qk_norm(other, PER_HEAD, images)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        if mode == "autocast":  # in which the model itself computes otherwise
            assert b.isfinite().all()
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(p.requires_grad and p.grad is None for p in other.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_norms_keep_the_models_dtype(dtype: torch.dtype, images) -> None:
    model = sharpen(tiny_timm()).to(dtype)
    layers = insert_qk_norm(model, PER_HEAD, images).layers
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(layer.kl < layer.kl_match for layer in layers)


def test_what_is_kept_does_not_outgrow_its_budget() -> None:
    """Every second map goes when there are too many, so that what is kept stays spread over all images."""
    site = sites_of(tiny_timm())[0][0]
    size = 4 * (4 * 12 * 8 + 4 * 12 * 8)
    excerpt = Excerpt(site, 0, 10 * size)
    for first in range(0, 40, 5):
        q = torch.zeros(5, 4, 12, 8) + torch.arange(first, first + 5.0).view(5, 1, 1, 1)
        excerpt.read(Reading(site, q, q, site.scale))
    kept = [int(m.q[0, 0, 0, 0]) for m in excerpt.maps]
    assert excerpt.held <= 10 * size
    assert kept == list(range(0, 40, 4))


def test_long_attention_is_read_by_evenly_spaced_queries_and_every_prefix() -> None:
    site = sites_of(tiny_timm())[0][0]
    excerpt = Excerpt(site, 2, 1 << 30)
    x = torch.arange(202.0).view(1, 1, 202, 1).expand(7, 4, 202, 8)
    excerpt.read(Reading(site, x, x, site.scale))
    seen = set()
    for m in excerpt.maps:
        rows = m.q[0, 0, :, 0].tolist()
        assert rows == m.rows[0].tolist()
        assert rows[:2] == [0, 1]
        assert set(np.diff(rows[2:])) == {4.0}
        assert len(rows) == 52
        seen |= set(rows)
        assert m.weight.sum().item() == pytest.approx(1)
        assert m.weight[:2].sum().item() == pytest.approx(PREFIX_SHARE)
    assert seen == set(range(202))


def test_images_of_several_sizes_are_fitted_together() -> None:
    model = sharpen(tiny_timm(dynamic_img_size=True))
    images = [torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(side)) for side in (32, 48)]
    layers = insert_qk_norm(model, PER_HEAD, images).layers
    assert all(layer.kl < layer.kl_match for layer in layers)


def test_the_relative_bias_of_sam_stays_that_of_q(images) -> None:
    """Where the bias is computed from the normed q, the fit leaves q's norm as match set it."""
    models = [ZOO["sam"].build() for _ in range(2)]
    pictures = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(5))
    for model, init in zip(models, ("match", "fit"), strict=True):
        insert_qk_norm(model, PER_HEAD, pictures, init)
    (q, k), (q_fit, k_fit) = (sites_of(m)[0][0].norms for m in models)
    assert torch.equal(q.weight, q_fit.weight)
    assert torch.equal(q.shift, q_fit.shift)
    assert not torch.equal(k.weight, k_fit.weight)


def test_removal_after_a_fit_restores_the_base(images) -> None:
    model = sharpen(tiny_relpos())
    before = outputs_of(model, images)
    insert_qk_norm(model, PER_HEAD, images)
    assert not torch.equal(outputs_of(model, images), before)
    remove_qk_norm(model)
    assert torch.equal(outputs_of(model, images), before)


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(
    ("spec", "matched", "fitted"),
    [
        (PER_HEAD, (0.98, 0.98), (0.997, 0.997)),
        (QKNorm(), (0.98, 0.98), (0.997, 0.997)),
        (QKNorm.preset("olmo2"), (0.99, 0.994), (0.997, 0.998)),
        (QKNorm.preset("vit22b", gain="per_head"), (0.975, 0.975), (0.994, 0.995)),
    ],
    ids=["rms", "qwen3", "olmo2", "vit22b"],
)
def test_dinov2_small_reaches_its_targets(spec, matched, fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrofit.checkpoint import load_model

    monkeypatch.undo()
    calibration, held_out = cifar("train", 96), cifar("test", 200)
    source = f"timm:{SHARED}/checkpoints/dinov2_small_timm"
    for init, (least_class, least_patch) in (("match", matched), ("fit", fitted)):
        insertion = insert_qk_norm(load_model(source, image_size=98), spec, calibration, init, held_out=held_out)
        reached = insertion.shock[init]
        assert reached.cosine_class >= least_class
        assert reached.cosine_patch >= least_patch
        if spec.axis == "head":
            assert max(layer.logit_bound for layer in insertion.layers) <= LOGIT_LIMIT * (1 + 1e-6)
    assert not any("still changes" in remark for remark in insertion.remarks)
