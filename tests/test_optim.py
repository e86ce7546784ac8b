"""retrofit.train.optim: what is trained, at which rate, with which weight decay, in both libraries' names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

import pytest
import timm.optim
import torch
from conftest import MAKERS, tiny_hf, tiny_timm
from timm.optim import param_groups_layer_decay
from torch import nn
from zoo import FLAT, HIERARCHICAL, ZOO

from retrofit.errors import RetrofitError
from retrofit.models import family_of, sites_of
from retrofit.qknorm import QKNorm
from retrofit.recipe import Train
from retrofit.surgery import insert_qk_norm
from retrofit.train.optim import freeze, layers_of, optimizer_of, parameter_groups, schedule_of

SPEC = QKNorm.preset("qwen3", gain="per_head")


def by_name(model: nn.Module, train: Train, key: str) -> dict[str, Any]:
    names = {id(p): name for name, p in model.named_parameters()}
    found = [(names[id(p)], g[key]) for g in parameter_groups(model, train) for p in g["params"]]
    assert len(dict(found)) == len(found), "a parameter in two groups"
    return dict(found)


# Layer-wise decay of the learning rate


def test_layer_decay_is_timms_own_where_timm_has_it() -> None:
    model = tiny_timm()
    names = {id(p): name for name, p in model.named_parameters()}
    theirs = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.6)
    expected = {names[id(p)]: g["lr_scale"] for g in theirs for p in g["params"]}
    assert by_name(model, Train(layer_decay=0.6), "lr_scale") == expected


BLOCK = re.compile(r"(?:^|\.)(?:blocks|layers?)\.(\d+)\.")


def classifiers(animals: Iterable[str]) -> list[str]:
    return [name for name in animals if family_of(model := ZOO[name].build()).head(model) is not None]


@pytest.mark.parametrize("name", classifiers(HIERARCHICAL))
def test_in_stages_a_norm_has_the_rate_of_its_attention(name: str) -> None:
    """Or the model's stages are not known, and that is said."""
    model = ZOO[name].build()
    insert_qk_norm(model, SPEC, init="ones")
    try:
        scales = by_name(model, Train(layer_decay=0.5), "lr_scale")
    except RetrofitError:
        with pytest.raises(RetrofitError, match=r"^train\.layer_decay: .*; take 1$"):
            parameter_groups(model, Train(layer_decay=0.5))
        return
    names = {id(p): name for name, p in model.named_parameters()}
    assert scales.keys() == set(names.values())
    for p in family_of(model).head(model).parameters():
        assert scales[names[id(p)]] == 1.0
    for site in sites_of(model)[0]:
        if site.kind.pool:  # it is the head
            continue
        (rate,) = {scales[names[id(weight)]] for weight in site.projections}
        assert rate < 1
        for norm in site.norms or ():
            assert {scales[names[id(p)]] for p in norm.parameters()} == {rate}


@pytest.mark.parametrize("name", classifiers(FLAT))
def test_every_block_has_its_own_rate_and_its_norms_have_it_too(name: str) -> None:
    """With b blocks the head has 1, block i decay^(b-i), and what stands before the blocks decay^(b+1)."""
    model = ZOO[name].build()
    insert_qk_norm(model, SPEC, init="ones")
    scales = by_name(model, Train(layer_decay=0.5), "lr_scale")
    names = [name for name, _ in model.named_parameters()]
    assert scales.keys() == set(names)
    blocks = {n: int(m[1]) for n in names if (m := BLOCK.search(n))}
    count = max(blocks.values()) + 1
    assert count >= 2
    first, last = names.index(next(iter(blocks))), names.index(list(blocks)[-1])
    head = {id(p) for p in family_of(model).head(model).parameters()}
    for i, (parameter, p) in enumerate(model.named_parameters()):
        if id(p) in head:
            assert scales[parameter] == 1.0
        elif parameter in blocks:
            assert scales[parameter] == 0.5 ** (count - blocks[parameter]), parameter
        elif i < first:
            assert scales[parameter] == 0.5 ** (count + 1), parameter
        else:  # the last norm goes with the last block, a pooler or a neck with the head
            assert i > last
            assert scales[parameter] in (0.5, 1.0), parameter
    assert len([n for n in blocks if re.search(r"\.[qk]_norm\.weight$", n)]) >= 2 * count


class OldNames(nn.Module):
    """A ViT under the names that transformers 4 gave it."""

    def __init__(self) -> None:
        super().__init__()
        now = tiny_hf()
        self.config = now.config
        self.vit = nn.ModuleDict(
            {
                "embeddings": now.vit.embeddings,
                "encoder": nn.ModuleDict({"layer": now.vit.layers}),
                "layernorm": now.vit.layernorm,
            }
        )
        self.classifier = now.classifier


def test_names_of_transformers_4_and_5_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = OldNames(), tiny_hf()
    monkeypatch.setattr("retrofit.train.optim.family_of", lambda _: family_of(new))
    now = by_name(new, Train(layer_decay=0.7), "lr_scale")
    before = by_name(old, Train(layer_decay=0.7), "lr_scale")
    assert before == {name.replace("vit.layers.", "vit.encoder.layer."): scale for name, scale in now.items()}
    assert len(set(now.values())) == 5


def test_register_tokens_and_a_norm_before_the_blocks_are_not_the_heads() -> None:
    """timm's own matcher leaves the first to the head's group and takes the second for the last norm."""
    for name, parameter in (("dinov2", "reg_token"), ("pe", "norm_pre.weight")):
        model = ZOO[name].build()
        assert layers_of(model)[parameter] == 0
        assert layers_of(model)["head.weight"] == max(layers_of(model).values())


def test_a_model_without_known_blocks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    resnet = timm.create_model("resnet10t", num_classes=3)
    assert parameter_groups(resnet, Train())
    with pytest.raises(RetrofitError, match=r"train\.layer_decay: the blocks of ResNet are not known; take 1"):
        parameter_groups(resnet, Train(layer_decay=0.9))
    model = tiny_timm()
    layers = {**family_of(model).layers(model), "blocks.1.norm1.weight": 99}
    monkeypatch.setattr(type(family_of(model)), "layers", lambda *_: layers)
    with pytest.raises(RetrofitError, match=r"not known to which block blocks\.1\.norm1\.weight belongs"):
        layers_of(model)


def test_the_head_comes_first_and_all_rates_follow_the_schedule() -> None:
    train = Train(layer_decay=0.5, warmup=0.2, min_lr=1e-5)
    optimizer = optimizer_of(tiny_timm(), train, 1e-3)
    schedule = schedule_of(optimizer, train, 1e-3, 10)
    for step in range(10):
        schedule.step_update(step)
        lrs = [g["lr"] for g in optimizer.param_groups]
        assert lrs == [pytest.approx(lrs[0] * g["lr_scale"]) for g in optimizer.param_groups]
        assert optimizer.param_groups[0]["lr_scale"] == 1.0


# Weight decay


@pytest.mark.parametrize("name", list(ZOO))
def test_weight_decay_spares_what_has_one_dimension_and_every_norm(name: str) -> None:
    model = ZOO[name].build()
    decay = by_name(model, Train(weight_decay=0.3), "weight_decay")
    norms = {id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(recurse=False)}
    spared = family_of(model).no_weight_decay(model)
    for parameter_name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.ndim < 2 or id(p) in norms or any(fnmatch(parameter_name, pattern) for pattern in spared):
            assert decay[parameter_name] == 0.0, parameter_name
        elif isinstance(model.get_submodule(parameter_name.rpartition(".")[0]), nn.Linear | nn.Conv2d):
            assert decay[parameter_name] == 0.3, parameter_name


def test_a_gain_of_two_dimensions_is_spared_too() -> None:
    class TwoDNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 8))

    model = tiny_timm()
    model.blocks[0].attn.q_norm = TwoDNorm()
    assert by_name(model, Train(weight_decay=0.3), "weight_decay")["blocks.0.attn.q_norm.weight"] == 0.0


# Freezing


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", list(MAKERS))
@pytest.mark.parametrize("normed", [False, True])
def test_freezing_leaves_what_it_says(kind: str, normed: bool) -> None:
    def fresh() -> nn.Module:
        model = MAKERS[kind]()
        if normed:
            insert_qk_norm(model, SPEC, init="ones")
        return model

    every = {name for name, _ in fresh().named_parameters()}
    head = {n for n in every if n.split(".")[0] in ("head", "classifier")}
    attention = {n for n in every if re.search(r"\.(attn|attention)\.", n)}
    norms = {n for n in every if re.search(r"norm", n.rpartition(".")[0].rpartition(".")[2])}
    for mode, expected in (
        ("none", every),
        ("head_only", head),
        ("attention_only", head | attention),
        ("norms_only", head | norms),
    ):
        model = fresh()
        freeze(model, mode)
        assert trained(model) == expected, mode
        grouped = {id(p) for g in parameter_groups(model, Train()) for p in g["params"]}
        assert grouped == {id(p) for n, p in model.named_parameters() if n in expected}
    assert head
    assert attention >= {n for n in every if re.search(r"(attn|attention)\.(qkv|q_proj|proj|o_proj)\.", n)}
    assert not normed or {n for n in every if re.search(r"\.[qk]_norm\.", n)} <= norms & attention


def test_the_output_projection_belongs_to_attention_where_it_stands_around_it() -> None:
    model = ZOO["hf_data2vec"].build()
    freeze(model, "attention_only")
    block = "data2vec_vision.encoder.layer.0.attention"
    assert {f"{block}.attention.query.weight", f"{block}.output.dense.weight"} <= trained(model)
    assert f"{block.rpartition('.')[0]}.intermediate.dense.weight" not in trained(model)


def test_a_mode_with_nothing_to_train_names_what_would_work() -> None:
    import timm

    with pytest.raises(RetrofitError, match=r"attention_only leaves nothing .* but the head: ResNet .*; take none or"):
        freeze(timm.create_model("resnet10t", num_classes=3), "attention_only")
    model = tiny_timm(norm_layer=nn.Identity)
    with pytest.raises(RetrofitError, match="norms_only leaves nothing to train but the head"):
        freeze(model, "norms_only")
    assert trained(model) == {name for name, _ in model.named_parameters()}


# Optimizers and schedules


def usable() -> list[Any]:
    """Those whose libraries are here. Kron compiles for a minute, on its own account."""
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in ("kron", "kronw", "kronc")]
    missing = ("bnb", "fused", "kron")
    return [*(name for name in timm.optim.list_optimizers() if not name.startswith(missing)), "lookahead_adamw", *slow]


@pytest.mark.parametrize("name", usable())
def test_every_optimizer_of_timm_takes_a_step_or_says_why_not(name: str) -> None:
    model = tiny_timm(depth=1)
    insert_qk_norm(model, SPEC, init="ones")
    train = Train(optimizer=name, layer_decay=0.8)
    if name == "adahessian":
        with pytest.raises(RetrofitError, match="needs second derivatives"):
            optimizer_of(model, train, 1e-3)
        return
    optimizer = optimizer_of(model, train, 1e-3)
    schedule = schedule_of(optimizer, train, 1e-3, 10)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for step in range(3):  # some only look on at first
            schedule.step_update(step)
            model(torch.randn(2, 3, 32, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    still = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    assert all("bias" in n or "qkv" in n for n in still), still
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["bnbadamw", "fusedadam"])
def test_an_optimizer_whose_library_is_missing_says_so(name: str) -> None:
    with pytest.raises(RetrofitError, match=rf"train\.optimizer: {name} cannot be used: "):
        optimizer_of(tiny_timm(depth=1), Train(optimizer=name), 1e-3)


def test_arguments_reach_the_optimizer() -> None:
    model = tiny_timm(depth=1)
    train = Train(optimizer="adamw", optimizer_args={"betas": [0.8, 0.9], "eps": 1e-15})
    group = optimizer_of(model, train, 1e-3).param_groups[0]
    assert (tuple(group["betas"]), group["eps"]) == ((0.8, 0.9), 1e-15)
    assert optimizer_of(model, Train(optimizer="sgd"), 1e-3).param_groups[0]["momentum"] == 0.9
    with pytest.raises(RetrofitError, match=r"train\.optimizer_args: adamw does not take them: .*nonsense"):
        optimizer_of(model, Train(optimizer_args={"nonsense": 1}), 1e-3)


def test_a_cpu_has_the_optimizer_in_one_kernel_unless_told_otherwise() -> None:
    """The same update: AdamW with and without, from the same gradients."""
    one, other = tiny_timm(depth=1), tiny_timm(depth=1)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for model, arguments in ((one, {}), (other, {"foreach": False})):
        optimizer = optimizer_of(model, Train(optimizer_args=arguments), 1e-2)
        assert optimizer.param_groups[0]["fused"] == (not arguments or None)
        for _ in range(3):
            model(images).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in one.state_dict().items():
        if "qkv.bias" not in name:
            torch.testing.assert_close(value, other.state_dict()[name], atol=1e-5, rtol=1e-4)
    assert optimizer_of(one, Train(), 1e-2, device="cuda").param_groups[0]["fused"] is None
    assert "fused" not in optimizer_of(one, Train(optimizer="lion"), 1e-2).param_groups[0]


def test_muon_leaves_head_tokens_and_norms_to_adamw() -> None:
    model = tiny_timm()
    fallback = {
        n: g.get("use_fallback", False)
        for g in parameter_groups(model, Train(optimizer="muon"))
        for n, p in model.named_parameters()
        if any(p is q for q in g["params"])
    }
    assert fallback["head.weight"]
    assert fallback["pos_embed"]
    assert fallback["blocks.0.norm1.weight"]
    assert not fallback["blocks.0.attn.qkv.weight"]
    assert not any("use_fallback" in g for g in parameter_groups(model, Train()))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("steps", "warmup", "low"), [(1, 0.1, 0.0), (2, 1.0, 0.0), (10, 0.3, 1e-4), (37, 0.1, 0.0)])
def test_schedules_are_what_they_are_called(schedule: str, steps: int, warmup: float, low: float) -> None:
    peak, rising = 2e-3, min(int(warmup * steps), steps - 1)
    shape = {
        "cosine": lambda x: low + (peak - low) * 0.5 * (1 + math.cos(math.pi * x)),
        "linear": lambda x: low + (peak - low) * (1 - x),
        "constant": lambda x: peak,
    }[schedule]
    expected = [
        peak * (s + 1) / (rising + 1) if s < rising else shape((s - rising) / (steps - rising)) for s in range(steps)
    ]
    train = Train(schedule=schedule, warmup=warmup, min_lr=low)  # type: ignore[arg-type]
    optimizer = optimizer_of(tiny_timm(depth=1), train, peak)
    curve, seen = schedule_of(optimizer, train, peak, steps), []
    for step in range(steps):
        curve.step_update(step)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx(expected, rel=1e-12)
