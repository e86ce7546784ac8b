"""The guarantees of surgery, on one small model of every attention class that it knows."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import timm
import torch
from sharpened import sharpened
from torch import nn
from zoo import ZOO

from retrofit import QKNorm, insert_qk_norm, probe, remove_qk_norm
from retrofit.calibrate import fit as fitting
from retrofit.errors import ModelError
from retrofit.models import ATTENTION_CLASSES, Site, sites_of
from retrofit.models.derive import original
from retrofit.norms import HeadNorm
from retrofit.surgery import survey

each = pytest.mark.parametrize("animal", [pytest.param(a, id=name) for name, a in ZOO.items()])
rotating = pytest.mark.parametrize("animal", [pytest.param(a, id=n) for n, a in ZOO.items() if "rope" in a.facts])
native = pytest.mark.parametrize("name", [n for n, a in ZOO.items() if "native" in a.facts])


CALIBRATED = [name for name, animal in ZOO.items() if len(animal.inputs()) == 1]
"""All but those that are called with more than pixels."""


class Same(HeadNorm):
    """A norm that does nothing."""

    def forward(self, x: torch.Tensor, head: int | None = None) -> torch.Tensor:
        return x


def run(animal, model):
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)  # MAE draws the order of its patches
        return animal.run(model)


def sites(model) -> list[Site]:
    return [site for site in sites_of(model)[0] if not site.kind.pool]


def formula(x: torch.Tensor, norm: HeadNorm, head: int | None) -> torch.Tensor:
    """RMSNorm per head with a gain per head, in float64, from x [B, H, N, D]."""
    x = x.double()
    gain = norm.weight.double().view(norm.heads, 1, norm.head_dim)
    shift = torch.zeros_like(gain) if norm.shift is None else norm.shift.double().view_as(gain)
    if head is not None:
        gain, shift = gain[head], shift[head]
    x = x - shift
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def as_bhnd(x: torch.Tensor, norm: HeadNorm, head: int | None) -> torch.Tensor:
    """x as [B, H, N, D], whatever way it came; windows count as images."""
    if head is not None:  # [B, N, D] of that head
        return x[:, None]
    if norm.layout == "BNHD":
        return x.transpose(1, 2)
    if norm.layout == "BN(HD)":
        return x.reshape(*x.shape[:2], norm.heads, norm.head_dim).transpose(1, 2)
    if norm.layout == "BGHND":
        return x.reshape(-1, *x.shape[2:])
    if norm.layout.startswith("(BH)"):
        x = x.reshape(-1, norm.heads, *x.shape[1:])
    return torch.cat(x.unbind(2)) if x.ndim == 5 else x


def test_the_zoo_holds_every_class_that_surgery_knows() -> None:
    held = set()
    for animal in ZOO.values():
        for site in sites_of(animal.build())[0]:
            held.add(site.kind.path)
    wanted = {kind.path for kind in ATTENTION_CLASSES} - {"timm.models.gemma4_vit.Gemma4Attention"}  # normed already
    assert held == wanted


@each
def test_counts_every_token_attention(animal) -> None:
    found = survey(animal.build())
    assert found.refusal is None
    assert len(found.sites) == animal.sites
    assert any(site.rotated for site in found.sites) == ("rope" in animal.facts)
    assert ("an attention pool" in " ".join(s.reason for s in found.skipped)) == ("pool" in animal.facts)


@each
@pytest.mark.parametrize("position", ["before_rope", "after_rope"])
def test_a_norm_that_does_nothing_leaves_every_bit(animal, position: str) -> None:
    model = animal.build()
    before = run(animal, model)
    spec = QKNorm(gain="none", position=position)
    for site in sites(model):
        layout = site.layout(spec)
        site.place(
            *(Same(spec, r, h, site.head_dim, layout=layout) for r, h in (("q", site.heads), ("k", site.kv_heads)))
        )
    assert torch.equal(run(animal, model), before)


@each
@pytest.mark.parametrize("position", ["before_rope", "after_rope"])
def test_norms_each_head_by_the_formula(animal, position: str) -> None:
    model = animal.build()
    insert_qk_norm(model, QKNorm(gain="per_head", position=position), init="ones")
    seen = []
    generator = torch.Generator().manual_seed(1)
    for site in sites(model):
        for norm in site.norms:
            for p in norm.parameters():
                p.data = torch.randn(p.shape, generator=generator)
            norm.register_forward_hook(lambda m, args, out: seen.append((m, *args, out)))
    run(animal, model)
    assert len(seen) >= 2 * animal.sites
    for norm, x, *head, out in seen:
        assert out.dtype == x.dtype
        assert out.shape == x.shape
        one = head[0] if head else None
        wanted = formula(as_bhnd(x, norm, one), norm, one)
        torch.testing.assert_close(as_bhnd(out, norm, one).double(), wanted, rtol=1e-4, atol=1e-5)


@each
def test_base_keys_stay_and_removal_restores_every_bit(animal) -> None:
    model = animal.build()
    before, keys, types = run(animal, model), set(model.state_dict()), [type(m) for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    insert_qk_norm(model, QKNorm.preset("chameleon"), init="ones")
    added = set(model.state_dict()) - keys
    assert keys <= set(model.state_dict())
    assert {key.split(".")[-2] for key in added} == {"q_norm", "k_norm"}
    incompatible = model.load_state_dict(state, strict=False)
    assert set(incompatible.missing_keys) == added
    assert not incompatible.unexpected_keys
    assert remove_qk_norm(model) == animal.sites
    assert set(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == types
    assert torch.equal(run(animal, model), before)


@each
@pytest.mark.parametrize("training", [True, False])
def test_every_new_parameter_matters_and_gets_a_gradient(animal, training: bool) -> None:
    model = animal.build()
    insert_qk_norm(model, QKNorm(gain="per_head"), init="ones")
    normed = run(animal, model)
    for site in sites(model):
        for norm in site.norms:
            norm.weight.data.fill_(3.0)
    assert not torch.equal(run(animal, model), normed)
    model.train(training)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        animal.run(model).double().pow(2).sum().backward()
    for site in sites(model):
        for norm in site.norms:
            for name, parameter in norm.named_parameters():
                if name == "shift":  # softmax is blind to it only before the norm, so that it matters too
                    assert parameter.grad is not None
                assert parameter.grad is not None
                assert parameter.grad.abs().sum() > 0, (site.name, norm.role, name)


@pytest.mark.parametrize("animal", [pytest.param(a, id=n) for n, a in ZOO.items() if "pool" in a.facts])
@pytest.mark.parametrize("position", ["before_rope", "after_rope"])
def test_pools_are_normed_on_request(animal, position: str) -> None:
    model = animal.build()
    before = run(animal, model)
    pools = [site for site in sites_of(model)[0] if site.kind.pool]
    assert len(pools) == 1
    spec = QKNorm(gain="per_head", position=position, pools=True)
    same = [Same(spec, r, pools[0].heads, pools[0].head_dim, layout=pools[0].layout(spec)) for r in ("q", "k")]
    pools[0].place(*same)
    assert torch.equal(run(animal, model), before)
    pools[0].restore()
    assert len(insert_qk_norm(model, spec, init="ones").sites) == animal.sites + 1
    normed = run(animal, model)
    for norm in pools[0].norms:
        norm.weight.data.fill_(3.0)
    assert not torch.equal(run(animal, model), normed)
    assert remove_qk_norm(model) == animal.sites + 1
    assert torch.equal(run(animal, model), before)


@rotating
def test_after_rope_equals_before_for_norms_that_commute_with_rotations(animal) -> None:
    outputs = {}
    for position in ("before_rope", "after_rope"):
        model = animal.build()
        insert_qk_norm(model, QKNorm(gain="none", position=position), init="ones")
        outputs[position] = run(animal, model)
    torch.testing.assert_close(outputs["before_rope"], outputs["after_rope"], rtol=1e-4, atol=1e-5)


@rotating
def test_after_rope_differs_with_a_gain_per_channel(animal) -> None:
    largest = {}
    for position in ("before_rope", "after_rope"):
        model = animal.build()
        insert_qk_norm(model, QKNorm(position=position), init="ones")
        for site in sites(model):
            for norm in site.norms:
                norm.weight.data = torch.linspace(0.2, 6.0, norm.weight.numel())
        with probe(model) as seen:
            run(animal, model)
        largest[position] = seen.rows()[0]["logit_max"]
    assert largest["before_rope"] != pytest.approx(largest["after_rope"], rel=1e-3)


@native
def test_equals_timms_own_qk_norm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    animal = ZOO[name]
    ours = animal.build()
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *args, **settings: create(*args, **settings, qk_norm=True))
    theirs = animal.build()
    kinds = {type(site.module.q_norm) for site in sites(theirs)}
    assert len(kinds) == 1
    (kind,) = kinds
    layer_norm = issubclass(kind, nn.LayerNorm)
    eps = sites(theirs)[0].module.q_norm.eps
    insert_qk_norm(ours, QKNorm(norm="layernorm" if layer_norm else "rms", bias=layer_norm, eps=eps), init="ones")
    generator = torch.Generator().manual_seed(2)
    for site in sites(theirs):
        for norm in (site.module.q_norm, site.module.k_norm):
            for parameter in norm.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator)
    state = theirs.state_dict()
    missing = ours.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all(key.endswith("_norm.shift") for key in missing.missing_keys)
    torch.testing.assert_close(run(animal, ours), run(animal, theirs), rtol=1e-4, atol=1e-5)
    assert survey(theirs).refusal is not None
    assert "QK-Norm of its own" in survey(theirs).refusal


@each
def test_probes_see_every_site_and_no_logit_above_the_bound(animal) -> None:
    model = animal.build()
    insert_qk_norm(model, QKNorm(gain="per_head"), init="ones")
    with probe(model) as seen:
        run(animal, model)
    rows = [row for row in seen.rows() if row["logit_bound"] is not None]
    assert len(rows) == animal.sites
    for row in rows:
        assert row["logit_absmax"] <= row["logit_bound"] * (1 + 1e-4)


@pytest.mark.parametrize("name", CALIBRATED)
def test_calibration_keeps_attention_better_than_the_plain_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "STEPS", 4)
    animal = ZOO[name]
    model = sharpened(animal.build(), animal.inputs())
    (like,) = animal.inputs().values()
    images, held_out = torch.randn(2, 4, *like.shape[1:], generator=torch.Generator().manual_seed(5))
    state = copy.deepcopy(model.state_dict())
    done = insert_qk_norm(model, QKNorm(gain="per_head"), images, held_out=held_out)
    assert len(done.layers) == animal.sites
    for layer in done.layers:
        assert math.isfinite(layer.kl)
        assert layer.kl <= layer.kl_match * (1 + 1e-6) + 1e-7, layer
        assert layer.kl < layer.kl_ones or layer.kl_ones < 1e-4, layer
    assert sum(layer.kl for layer in done.layers) < 0.9 * sum(layer.kl_ones for layer in done.layers)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vit", (2, 3, 48, 48)),  # timm asserts its size
        ("vit", (2, 4, 3, 32, 32)),
        ("swin", (2, 4, 32, 32)),
        ("hf_clip", (2, 1, 32, 32)),
        ("hf_vjepa2", (2, 3, 32, 32)),
        ("hf_timesformer", (2, 3, 32, 32)),
        ("hf_siglip2", (2, 3, 32, 32)),  # is called with patches and more
    ],
)
def test_images_that_the_model_does_not_take_are_refused_before_any_change(name: str, shape: tuple[int, ...]) -> None:
    model = ZOO[name].build()
    keys, images = list(model.state_dict()), torch.randn(shape)
    for init, given in (("match", {"images": images}), ("ones", {"held_out": images})):
        with pytest.raises(ModelError, match=r"does not run on images of shape \[2, "):
            insert_qk_norm(model, QKNorm(), init=init, **given)
        assert list(model.state_dict()) == keys
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@each
def test_survives_deepcopy_and_pickle(animal) -> None:
    model = animal.build()
    insert_qk_norm(model, QKNorm(gain="per_head"), init="ones")
    expected = run(animal, model)
    twin = copy.deepcopy(model)
    if "unpicklable" not in animal.facts:
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(run(animal, again), expected)
    for site in sites(twin):
        site.norms[0].weight.data.fill_(3.0)
    assert torch.equal(run(animal, model), expected)  # the copy has norms of its own
    assert not torch.equal(run(animal, twin), expected)


@each
def test_works_in_half_precision_and_on_meta(animal) -> None:
    model = animal.build()
    insert_qk_norm(model, QKNorm(gain="per_head"), init="ones")
    model.bfloat16()
    assert {norm.weight.dtype for site in sites(model) for norm in site.norms} == {torch.bfloat16}
    inputs = {
        k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in animal.inputs().items()
    }
    with torch.random.fork_rng(), torch.no_grad():
        result = animal.output(model(**inputs))
    assert torch.isfinite(result).all()
    late = animal.build().bfloat16()
    insert_qk_norm(late, QKNorm(), init="ones")
    assert {norm.weight.dtype for site in sites(late) for norm in site.norms} == {torch.bfloat16}
    model.to("meta")
    assert all(p.is_meta for p in model.parameters())


def test_heads_that_come_one_after_another_have_no_norm_over_all_of_them() -> None:
    model = ZOO["efficientvit_msra"].build()
    found = survey(model, QKNorm.preset("olmo2"))
    assert found.refusal == 'CascadedGroupAttention computes its heads one after another; take axis="head"'


def test_the_residual_of_pooled_queries_stays_as_it_was() -> None:
    """MViTv2 adds q to what attention returns: with keys and values of zero that is all that is left."""
    model = ZOO["mvitv2"].build()
    seen = []
    for site in sites(model):
        with torch.no_grad():
            width = site.heads * site.head_dim
            site.module.qkv.weight[width:] = 0
            site.module.qkv.bias[width:] = 0
            for values in (site.module.norm_k, site.module.norm_v):
                if values is not None:
                    values.bias.zero_()
        site.module.register_forward_hook(lambda m, args, out: seen.append(out[0]))
    run(animal := ZOO["mvitv2"], model)
    before = list(seen)
    insert_qk_norm(model, QKNorm(), init="ones")
    for site in sites(model):
        site.norms[0].weight.data.fill_(3.0)
    seen.clear()
    run(animal, model)
    assert all(torch.equal(a, b) for a, b in zip(before, seen, strict=True))


def test_classes_are_put_back() -> None:
    model = ZOO["hf_vit"].build()
    insert_qk_norm(model, QKNorm(), init="ones")
    swapped = {type(site.module) for site in sites(model)}
    remove_qk_norm(model)
    assert {original(cls) for cls in swapped} == {type(site.module) for site in sites(model)}
