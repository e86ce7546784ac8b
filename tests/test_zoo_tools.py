"""A retrofitted model under the tools that people use: compile, export, several processes, adapters, hooks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from zoo import ZOO

from retrofit import QKNorm, insert_qk_norm
from retrofit.errors import ModelError
from retrofit.models import family_of, sites_of

some = pytest.mark.parametrize("name", ["vit", "eva02", "sam", "hf_vit", "hf_dinov2", "hf_clip", "hf_dinov3"])
windowed = pytest.mark.parametrize("name", ["mvitv2", "twins_svt", "efficientvit_msra", "hf_swin"])
SPEC = QKNorm(gain="per_head")


def retrofitted(name: str, spec: QKNorm = SPEC):
    model = ZOO[name].build()
    insert_qk_norm(model, spec, init="ones")
    return model


@some
@pytest.mark.parametrize("position", ["before_rope", "after_rope"])
def test_compiles_as_one_graph(name: str, position: str) -> None:
    model = retrofitted(name, QKNorm(gain="per_head", position=position))
    with torch.no_grad():
        expected = ZOO[name].run(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(ZOO[name].run(compiled), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@windowed
def test_windowed_and_pooled_attention_compiles_as_one_graph(name: str) -> None:
    model = retrofitted(name)
    with torch.no_grad():
        expected = ZOO[name].run(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(ZOO[name].run(compiled), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vit", "eva02", "hf_vit", "hf_dinov2", "swin", "hiera"])
def test_exports(name: str) -> None:
    model, inputs = retrofitted(name), ZOO[name].inputs()
    with torch.no_grad():
        expected = ZOO[name].run(model)
        program = torch.export.export(model, (), inputs, strict=False)
        result = program.module()(**inputs)
        result = result if torch.is_tensor(result) else result[0]
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vit", "hf_vit"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    plain, saving = retrofitted(name).train(), retrofitted(name).train()
    if name == "vit":
        saving.set_grad_checkpointing()
    else:
        saving.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (plain, saving):
        ZOO[name].run(model).pow(2).sum().backward()
    for (key, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        if "_norm" in key:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


FORKED = ("beit", "swin", "maxvit", "coatnet", "davit", "pvt_v2", "twins_svt", "twins_pcpvt", "hiera", "sam2")
FORKED += ("caformer", "nest", "volo", "nextvit", "tiny_vit", "visformer", "fastvit", "iformer", "lowformer", "cpubone")
FORKED += ("multi_query", "attention_2d", "hf_swin", "hf_segformer", "hf_blip2", "hf_internvl", "hf_vjepa2")


@pytest.mark.parametrize("name", ["vit", "hf_dinov2", "hf_clip", *FORKED])
@pytest.mark.parametrize("fused", [True, False])
def test_fused_and_unfused_agree_and_both_norm(name: str, fused: bool) -> None:
    model, twin = retrofitted(name), retrofitted(name)
    for module in model.modules():
        if hasattr(module, "fused_attn"):  # off by default in Swin and Visformer
            module.fused_attn = True
    family_of(twin).unfuse(twin)
    with torch.no_grad():
        torch.testing.assert_close(ZOO[name].run(model), ZOO[name].run(twin), rtol=1e-3, atol=1e-4)
    changed = model if fused else twin
    with torch.no_grad():
        before = ZOO[name].run(changed)
        for site in sites_of(changed)[0]:
            site.norms[0].weight.data.fill_(3.0)
        assert not torch.equal(ZOO[name].run(changed), before)


def test_adapters_do_not_bypass_the_norm() -> None:
    peft = pytest.importorskip("peft")
    for name, targets in (("hf_vit", ["q_proj", "k_proj"]), ("vit", ["qkv"])):
        model = retrofitted(name)
        seen: list[torch.Tensor] = []
        for site in sites_of(model)[0]:
            site.norms[0].register_forward_hook(lambda m, args, out, seen=seen: seen.append(out))
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, init_lora_weights=False))
        with torch.no_grad():
            ZOO[name].run(adapted)
        assert len(seen) == 2
        for out in seen:  # unit root mean square whatever the adapter added
            torch.testing.assert_close(out.square().mean(-1), torch.ones(out.shape[:-1]), rtol=1e-3, atol=1e-3)


def test_a_model_under_accelerates_hooks_is_refused_before_any_change() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = ZOO["hf_vit"].build()
    add_hook_to_module(sites_of(model)[0][1].module, ModelHook())
    keys = list(model.state_dict())
    with pytest.raises(ModelError, match="accelerate"):
        insert_qk_norm(model, SPEC, init="ones")
    assert list(model.state_dict()) == keys


def test_pruned_heads_keep_their_width() -> None:
    from timm.layers import Attention

    model = nn.Sequential(Attention(48, num_heads=3, attn_head_dim=8))  # attention is narrower than the tokens
    insert_qk_norm(model, SPEC, init="ones")
    assert model[0].q_norm.weight.shape == (24,)
    assert model(torch.randn(2, 5, 48)).shape == (2, 5, 48)


def _worker(rank: int, path: str, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store-{kind}", rank=rank, world_size=2)
    for name in ("vit", "hf_dinov2"):
        model = retrofitted(name).train()
        single = copy.deepcopy(model)
        if kind == "ddp":
            parallel = nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            parallel = fully_shard(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        ZOO[name].run(parallel).pow(2).sum().backward()
        optimizer.step()
        other = torch.optim.SGD(single.parameters(), lr=0.1)
        ZOO[name].run(single).pow(2).sum().backward()
        other.step()
        with torch.no_grad():
            torch.testing.assert_close(ZOO[name].run(parallel), ZOO[name].run(single), rtol=1e-3, atol=1e-5)
        gains = [p for key, p in parallel.named_parameters() if "q_norm.weight" in key]
        assert len(gains) == 2
        for gain in gains:
            gain = gain.full_tensor() if hasattr(gain, "full_tensor") else gain
            assert not torch.equal(gain, torch.ones_like(gain))
    Path(path, f"{kind}-{rank}").touch()
    dist.barrier()  # a process that leaves first aborts the other in gloo
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_trains_in_two_processes(kind: str, tmp_path: Path) -> None:
    mp.spawn(_worker, (str(tmp_path), kind), nprocs=2)
    assert {p.name for p in tmp_path.glob(f"{kind}-*")} == {f"{kind}-0", f"{kind}-1"}
