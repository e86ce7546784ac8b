"""What insert_qk_norm and remove_qk_norm promise: what they change, what they leave, what they refuse."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from conftest import MAKERS, outputs_of, sharpen, tiny_hf, tiny_timm
from torch import nn

from retrofit.errors import ModelError, RetrofitError
from retrofit.models import family_of, sites_of
from retrofit.norms import HeadNorm
from retrofit.qknorm import PRESETS, QKNorm
from retrofit.surgery import insert_blank, insert_qk_norm, insert_same, remove_qk_norm, spec_of

KINDS = list(MAKERS)


def state(model: nn.Module) -> dict:
    """Everything about a model that surgery must not touch, or must put back."""
    return {
        "keys": list(model.state_dict()),
        "bits": {k: (v.clone(), v.dtype, v.data_ptr()) for k, v in model.state_dict().items()},
        "classes": [(n, type(m)) for n, m in model.named_modules()],
        "modes": [(n, m.training) for n, m in model.named_modules()],
        "grads": [
            (n, p.requires_grad, None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()
        ],
        "hooks": [(n, list(m._forward_hooks), list(m._forward_pre_hooks)) for n, m in model.named_modules()],
        "attributes": [(n, sorted(vars(m))) for n, m in model.named_modules()],
        "children": [(n, list(m._modules)) for n, m in model.named_modules()],
    }


def same(one: dict, other: dict, *names: str) -> None:
    for name in names or one:
        if name == "bits":
            assert one[name].keys() == other[name].keys()
            for key, (value, dtype, pointer) in one[name].items():
                assert torch.equal(value, other[name][key][0]), key
                assert (dtype, pointer) == other[name][key][1:], key
        elif name == "grads":
            assert [g[:2] for g in one[name]] == [g[:2] for g in other[name]]
            for (key, _, a), (_, _, b) in zip(one[name], other[name], strict=True):
                assert (a is None) == (b is None), key
                assert a is None or torch.equal(a, b), key
        else:
            assert one[name] == other[name], name


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if ".q_norm." in n or ".k_norm." in n}


def result_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """With gradients."""
    result = model(images)
    return result if isinstance(result, torch.Tensor) else result.logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init", ["ones", "match", "fit"])
def test_insertion_adds_keys_and_changes_nothing_else(kind: str, init: str, images) -> None:
    model = MAKERS[kind]()
    model.train()
    first = next(iter(model.parameters()))
    first.requires_grad_(False)
    seen: list = []
    model.register_forward_hook(lambda *_: seen.append(1))
    last = list(model.parameters())[-1]
    last.grad = torch.ones_like(last)
    before, random = state(model), torch.get_rng_state()
    insertion = insert_qk_norm(model, QKNorm(gain="per_head"), images, init=init, held_out=images)
    after = state(model)
    assert torch.equal(torch.get_rng_state(), random)
    sites = [site.name for site in sites_of(model)[0]]
    assert insertion.sites == sites
    added = [k for k in after["keys"] if k not in before["keys"]]
    names = ["q_norm.weight", "k_norm.weight"] + ([] if kind == "rope" else ["q_norm.shift", "k_norm.shift"])
    assert sorted(added) == sorted(f"{site}.{name}" for site in sites for name in names)
    assert [k for k in after["keys"] if k not in added] == before["keys"]
    kept = {k: v for k, v in after["bits"].items() if k not in added}
    same({"bits": before["bits"]}, {"bits": kept})
    same({"grads": before["grads"]}, {"grads": [g for g in after["grads"] if g[0] not in added]})
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad and p.ndim == 1 for p in new_parameters(model).values())
    assert len(insertion.layers) == 3
    assert spec_of(model) == insertion.spec


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [True, False])
def test_removal_restores_everything(kind: str, mode: bool, images) -> None:
    model = MAKERS[kind]().train(mode)
    before, output = state(model), outputs_of(model.eval(), images)
    model.train(mode)
    insert_qk_norm(model, QKNorm.preset("chameleon"), images, "match")
    assert not torch.equal(outputs_of(copy.deepcopy(model).eval(), images), output)
    assert remove_qk_norm(model) == 3
    same(before, state(model))
    assert torch.equal(outputs_of(model.eval(), images), output)
    assert spec_of(model) is None
    with pytest.raises(ModelError, match="no QK-Norm"):
        remove_qk_norm(model)
    insert_qk_norm(model, QKNorm(), images, "match")  # and it can go in again


def refused(model: nn.Module, match: str, *args, error: type = ModelError, **kwargs) -> None:
    before, random = state(model), torch.get_rng_state()
    with pytest.raises(error, match=match):
        insert_qk_norm(model, *args, **kwargs)
    same(before, state(model))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("kind", ["timm", "ViT"])
def test_a_second_surgery_is_refused(kind: str, images) -> None:
    model = MAKERS[kind]()
    insert_qk_norm(model, QKNorm(), images, "match")
    refused(model, "already has QK-Norm from retrofit; remove_qk_norm", QKNorm(), images)
    with pytest.raises(ModelError, match="already"):
        insert_blank(model, QKNorm())
    with pytest.raises(ModelError, match="already"):
        insert_same(model, QKNorm(), insert_qk_norm(MAKERS[kind](), QKNorm(), images, "match").norms)


def test_models_with_a_norm_of_their_own_are_refused(images) -> None:
    own = r"it has QK-Norm of its own in 3 of 3 attention layers \(blocks\.0\.attn: LayerNorm\)$"
    refused(tiny_timm(qk_norm=True), rf"^VisionTransformer cannot take QK-Norm: {own}", QKNorm(), images)


def test_models_without_known_attention_are_refused(images) -> None:
    import timm

    refused(nn.Linear(2, 2), "^Linear cannot take QK-Norm: it has no attention with q and k$", QKNorm(), images)
    swin = timm.create_model("swinv2_tiny_window8_256", img_size=64, window_size=4, embed_dim=24, depths=(1, 1, 1, 1))
    cosine = r"4 x WindowAttention: cosine attention already, which bounds it \(layers\.0\.blocks\.0\.attn, …\)$"
    refused(swin, rf"^SwinTransformerV2 cannot take QK-Norm: {cosine}", QKNorm(), images)
    edgenext = timm.create_model("edgenext_xx_small", dims=(8, 16, 16, 16), heads=(2, 2, 2, 2))
    channel = r"3 x CrossCovarianceAttn: channel attention: its softmax is over channels, not over tokens \(stages\.1"
    refused(edgenext, rf"^EdgeNeXt cannot take QK-Norm: {channel}", QKNorm(), images)
    pool = timm.create_model("resnet50_clip")
    only = r"1 x an attention pool; pools=True norms it too \(head\)$"
    refused(pool, rf"^ByobNet cannot take QK-Norm: {only}", QKNorm(), images)


@pytest.mark.parametrize("init", ["match", "fit"])
def test_without_images_both_remedies_are_named(init: str) -> None:
    refused(tiny_timm(), r'pass images=.*init="ones"', QKNorm(), error=RetrofitError, init=init)


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "preprocessed floating-point"),
        (torch.zeros(3, 32, 32), r"not \(3, 32, 32\)"),
        ([torch.zeros(3, 32, 32)], r"not \(3, 32, 32\)"),
        ([torch.zeros(2, 3, 32, 32), "image.png"], "not str"),
        (torch.zeros(0, 3, 32, 32), "no images"),
        ([torch.zeros(0, 3, 32, 32)], "no images"),
        ([], "no images"),
    ],
    ids=["uint8", "3d", "list of 3d", "path", "empty", "list of empty", "nothing"],
)
@pytest.mark.parametrize("kind", ["timm", "ViT"])
def test_wrong_images_are_refused(images, says: str, kind: str) -> None:
    refused(MAKERS[kind](), says, QKNorm(), images, error=RetrofitError)
    refused(MAKERS[kind](), says, QKNorm(), init="ones", held_out=images, error=RetrofitError)


def test_an_unknown_init_and_layers_that_are_not_there(images) -> None:
    refused(tiny_timm(), "one of ones, match, fit", QKNorm(), images, init="magic", error=RetrofitError)
    refused(tiny_timm(), r"layers=\[3, -4\] are not there.*3 attention layers", QKNorm(layers=(0, 3, -4)), images)


def test_a_replaced_forward_is_refused(images) -> None:
    model = tiny_hf()
    module = sites_of(model)[0][1].module
    module.forward = module.forward
    refused(model, r"layers\.1\.attention has had its forward replaced", QKNorm(), images)


def test_a_fault_halfway_leaves_the_model_as_it_was(images, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrofit.calibrate import measure

    def broken(*_args):
        raise KeyboardInterrupt("stop")

    monkeypatch.setattr(measure, "calibrate", broken)
    for kind in ("timm", "ViT"):
        refused(MAKERS[kind](), "stop", QKNorm(), images, error=KeyboardInterrupt)


@pytest.mark.parametrize("kind", ["timm", "ViT"])
def test_layers(kind: str, images) -> None:
    model = sharpen(MAKERS[kind]())
    insertion = insert_qk_norm(model, QKNorm(layers=(-1, 0, 0)), images)
    sites = sites_of(model)[0]
    assert [site.norms is not None for site in sites] == [True, False, True]
    assert insertion.sites == [sites[0].name, sites[2].name]
    assert [(s.name, s.reason) for s in insertion.skipped] == [(sites[1].name, "not in layers")]
    assert remove_qk_norm(model) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "chameleon", "swinv2", "henry2020"])
def test_the_norms_are_applied_and_learn(kind: str, fused: bool, name: str, images) -> None:
    """A gain of 3 changes the output, and every new parameter gets a gradient."""
    model, images = sharpen(MAKERS[kind]()).double(), images[:2].double()
    generator = torch.Generator().manual_seed(2)
    if not fused:
        family_of(model).unfuse(model)
    insert_qk_norm(model, QKNorm.preset(name), images, "match")
    result = result_of(model, images)
    result.square().sum().backward()
    for key, parameter in new_parameters(model).items():
        assert parameter.grad is not None, key
        # A constant added to every key moves no softmax; rounding alone may reach it.
        if key.endswith("k_norm.bias") and kind != "rope":
            continue
        assert parameter.grad.abs().max() > 1e-13, key
        before = result_of(model, images).detach()
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(3).add_(torch.rand(parameter.shape, generator=generator))
        assert (result_of(model, images) - before).abs().max() > 1e-12, key
        with torch.no_grad():
            parameter.copy_(kept)


def test_the_fused_and_the_manual_path_agree(images) -> None:
    for kind in KINDS:
        for name in ("qwen3", "olmo2", "swinv2", "henry2020"):
            model = sharpen(MAKERS[kind](), 10)
            insert_qk_norm(model, QKNorm.preset(name), images, "match")
            fused = outputs_of(model, images)
            family_of(model).unfuse(model)
            torch.testing.assert_close(outputs_of(model, images), fused, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}")


@pytest.mark.parametrize("kind", ["timm", "ViT"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(kind: str, dtype: torch.dtype, images) -> None:
    model = sharpen(MAKERS[kind]()).to(dtype)
    insert_qk_norm(model, QKNorm(gain="per_head"), images, "match", held_out=images)
    assert {p.dtype for p in model.parameters()} == {dtype}
    result = outputs_of(model, images.to(dtype))
    assert result.dtype == dtype
    assert result.isfinite().all()
    wide = sharpen(MAKERS[kind]())
    insert_qk_norm(wide, QKNorm(gain="per_head"), images, "match")
    torch.testing.assert_close(result.float(), outputs_of(wide, images), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("kind", ["timm", "rope", "ViT"])
def test_under_autocast_q_and_k_stay_in_values_dtype(kind: str, images) -> None:
    model = sharpen(MAKERS[kind]())
    insert_qk_norm(model, QKNorm(), images, "match")
    seen: list[torch.dtype] = []
    for site in sites_of(model)[0]:
        for norm in site.norms:
            norm.register_forward_hook(lambda _m, args, out: seen.append((args[0].dtype, out.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        result = outputs_of(model, images)
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    torch.testing.assert_close(result.float(), outputs_of(model, images), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("kind", ["timm", "rope", "ViT"])
def test_copies_and_pickles(kind: str, images) -> None:
    model = sharpen(MAKERS[kind]())
    insert_qk_norm(model, QKNorm.preset("swinv2"), images, "match")
    before = outputs_of(model, images)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs_of(other, images), before)
        remove_qk_norm(other)
        assert not torch.equal(outputs_of(other, images), before)
    assert torch.equal(outputs_of(model, images), before)


@pytest.mark.parametrize("kind", ["timm", "ViT"])
def test_compiles_as_one_graph(kind: str, images) -> None:
    model = sharpen(MAKERS[kind]())
    insert_qk_norm(model, QKNorm.preset("chameleon"), images, "match")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = result_of(compiled, images)
    torch.testing.assert_close(result.detach(), outputs_of(model, images), rtol=1e-4, atol=1e-5)
    result.sum().backward()
    assert all(p.grad is not None for p in new_parameters(model).values())


@pytest.mark.parametrize("kind", ["timm", "ViT"])
def test_insert_same(kind: str, images) -> None:
    one, other = sharpen(MAKERS[kind]()), sharpen(MAKERS[kind]())
    insertion = insert_qk_norm(one, QKNorm.preset("henry2020", layers=(0, 2)), images)
    with torch.no_grad():
        for p in new_parameters(one).values():
            p.add_(1)  # training the first does not reach what was kept
    insert_same(other, insertion.spec, insertion.norms)
    with torch.no_grad():
        for p in new_parameters(other).values():
            p.add_(1)
    assert outputs_of(one, images).equal(outputs_of(other, images))
    assert list(one.state_dict()) == list(other.state_dict())
    with pytest.raises(ModelError, match="not the same model"):
        insert_same(MAKERS[kind](), QKNorm(), insertion.norms)
    every = insert_qk_norm(MAKERS[kind](), QKNorm.preset("henry2020"), images, "match")
    untouched = MAKERS[kind]()
    with pytest.raises(ModelError, match="not the same model"):
        insert_same(untouched, insertion.spec, every.norms)
    assert spec_of(untouched) is None


def test_insert_same_below_a_head(images) -> None:
    """transformers puts the body one name deeper when a head comes on."""
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8, num_labels=4
    )
    body, headed = transformers.Dinov2Model(config), transformers.Dinov2ForImageClassification(config)
    headed.dinov2.load_state_dict(body.state_dict())
    for layers in (None, (1,)):  # one site alone has no name that differs
        one, other = copy.deepcopy(body), copy.deepcopy(headed)
        insertion = insert_qk_norm(one, QKNorm(layers=layers), images, "match")
        insert_same(other, insertion.spec, insertion.norms)
        for name, value in one.state_dict().items():
            assert value.equal(other.state_dict()[f"dinov2.{name}"])


def test_shock_is_measured_on_held_out_images_only(images) -> None:
    held_out = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(8))
    original = sharpen(tiny_timm(), 10)
    tokens, logits = original.forward_features(held_out).detach(), outputs_of(original, held_out)
    assert insert_qk_norm(copy.deepcopy(original), QKNorm(), images, "match").shock == {}
    for init in ("ones", "match"):
        model = copy.deepcopy(original)
        given = images if init == "match" else None
        insertion = insert_qk_norm(model, QKNorm(), given, init=init, held_out=[held_out[:2], held_out[2:]])
        shock = insertion.shock[init]
        now = model.forward_features(held_out).detach()
        cosine = torch.nn.functional.cosine_similarity(tokens.double(), now.double(), dim=-1)
        assert shock.images == 5
        assert shock.cosine_class == pytest.approx(float(cosine[:, 0].mean()), abs=1e-5)
        assert shock.cosine_patch == pytest.approx(float(cosine[:, 1:].mean()), abs=1e-5)
        p, q = logits.double().softmax(-1), outputs_of(model, held_out).double().softmax(-1)
        assert shock.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), abs=1e-5)
        assert shock.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
        assert set(insertion.shock) == {"ones", init}
    assert insertion.shock["match"].cosine_patch > insertion.shock["ones"].cosine_patch


def test_any_module_that_contains_attention(images) -> None:
    inner = sharpen(tiny_timm())
    model = nn.Sequential(inner, nn.Linear(5, 2))
    insertion = insert_qk_norm(model, QKNorm(), images, "match")
    assert insertion.sites == [f"0.blocks.{i}.attn" for i in range(3)]
    alone = sharpen(tiny_timm())
    insert_qk_norm(alone, QKNorm(), images, "match")
    assert outputs_of(alone, images).equal(outputs_of(inner, images))
    remove_qk_norm(model)
    with pytest.raises(RetrofitError, match="scale_init is needed"):
        insert_qk_norm(model, QKNorm.preset("henry2020"), images, "match")
    insert_qk_norm(model, QKNorm.preset("henry2020", scale_init=3.0), images, "match")


def test_grouped_queries(images) -> None:
    from timm.layers.attention import AttentionRope

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 32, 8, 8)
            self.attn = AttentionRope(32, num_heads=4, num_kv_heads=2, qkv_fused=False)

        def forward(self, x):
            return self.attn(self.patch(x).flatten(2).mT)

    model = Grouped()
    for name in PRESETS:
        insert_qk_norm(
            model,
            QKNorm.preset(name, gain="per_head", scale_init=None)
            if QKNorm.preset(name).scale == "fixed"
            else QKNorm.preset(name, scale_init=5.0),
            images,
        )
        q_norm, k_norm = sites_of(model)[0][0].norms
        assert (q_norm.heads, k_norm.heads) == (4, 2)
        assert outputs_of_plain(model, images).isfinite().all()
        remove_qk_norm(model)


def outputs_of_plain(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(images)


@pytest.mark.parametrize("name", PRESETS)
def test_published_start(name: str) -> None:
    """init="ones" is the formula's own start: Henry's scale is log2(n^2 - n) for n tokens, Swin's 10 a head."""
    model = tiny_timm()
    insert_qk_norm(model, QKNorm.preset(name), init="ones")
    for site in sites_of(model)[0]:
        for norm in site.norms:
            assert isinstance(norm, HeadNorm)
            assert (norm.gain == 1).all()
    q_norm = sites_of(model)[0][0].norms[0]
    if name == "henry2020":
        assert q_norm.learned_scale.tolist() == pytest.approx([8.0875], abs=1e-3)  # log2(17^2 - 17)
    if name == "swinv2":
        assert q_norm.learned_scale.tolist() == pytest.approx([10.0] * 4)
        assert q_norm.scale.tolist() == pytest.approx([2.302585] * 4)


@pytest.mark.parametrize("kind", ["timm", "ViT"])
def test_weight_decay_spares_every_new_parameter(kind: str, images) -> None:
    from timm.optim import param_groups_weight_decay

    for name in PRESETS:
        model = MAKERS[kind]()
        insert_qk_norm(model, QKNorm.preset(name, **({"gain": "per_head"} if name == "qwen3" else {})), images, "match")
        new = {id(p) for p in new_parameters(model).values()}
        decayed = [g for g in param_groups_weight_decay(model, 0.05) if g["weight_decay"] > 0]
        assert len(decayed) == 1
        assert not new & {id(p) for p in decayed[0]["params"]}, name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("use", ["images", "held_out"])
def test_images_that_are_not_finite_are_refused(images, value: float, use: str) -> None:
    broken = images.clone()
    broken[0, 0, 0, 0] = value
    given = {"images": images, "held_out": images, use: broken}
    refused(tiny_timm(), "not finite", QKNorm(), error=RetrofitError, **given)


def test_a_name_in_place_of_a_formula_is_told_how_to_write_it(images) -> None:
    refused(tiny_timm(), r"QKNorm\.preset", "qwen3", images, error=RetrofitError)


def test_shock_of_a_wrapper_is_that_of_what_it_returns(images) -> None:
    model = nn.Sequential(sharpen(tiny_timm()))
    shock = insert_qk_norm(model, QKNorm(gain="per_head"), images, "match", held_out=images).shock["match"]
    assert shock.cosine_patch is None
    assert 0 <= shock.kl < 10


def test_norms_made_in_inference_mode_can_be_trained(images) -> None:
    model = tiny_timm()
    with torch.inference_mode():
        insert_qk_norm(model, QKNorm(gain="per_head"), images, "match", held_out=images)
    model(images).sum().backward()
    assert sites_of(model)[0][0].norms[0].weight.grad is not None
