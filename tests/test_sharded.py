"""The state of weights that FSDP2 shards, saved and restored by two processes on CPUs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from retrofit.train.state import restore, state_of

STEPS = 6


def an_arm(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
    counted = {"diverged_at": None, "diverged_by": None, "nonfinite": 0, "in_a_row": 0, "seconds": 0.0}
    scaler = SimpleNamespace(scaler=None)
    return SimpleNamespace(
        eager=model, model=model, optimizer=optimizer, accelerator=scaler, losses=[], at=0, resumed_at=[], **counted
    )


def take(arm: Any, batches: list[torch.Tensor], steps: range) -> Any:
    for step in steps:
        loss = arm.eager(batches[step]).square().mean()
        loss.backward()
        arm.optimizer.optimizer.step()
        arm.optimizer.optimizer.zero_grad()
        arm.losses.append(loss.item())
        arm.at = step + 1
    return arm


def work(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    os.environ["ACCELERATE_USE_FSDP"] = "true"
    torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 8, generator=generator) for _ in range(STEPS)]
    one = take(an_arm(mesh), batches, range(STEPS))
    two = take(an_arm(mesh), batches, range(3))
    state = state_of(two)
    assert bool(state["tensors"]) == (rank == 0)
    if rank == 0:
        torch.save({**state, "step": two.at}, f"{folder}/state.pt")
    torch.distributed.barrier()
    resumed = an_arm(mesh)
    restore(resumed, torch.load(f"{folder}/state.pt", weights_only=True))
    take(resumed, batches, range(3, STEPS))
    assert resumed.losses[3:] == one.losses[3:]  # before, they are the first process's; training has one for all
    assert resumed.resumed_at == [3]
    for weight, other in zip(one.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(weight.to_local(), other.to_local())
        assert weight.to_local().shape != weight.shape
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_sharded_weights_and_optimizer_go_on_to_the_same_bits(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
