"""What of an arm a checkpoint holds: all that its next step depends on, and what its result tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from retrofit import runfiles
from retrofit.errors import RetrofitError
from retrofit.train.processes import sharded

if TYPE_CHECKING:
    from retrofit.train.arm import ArmRun

_COUNTED = ("diverged_at", "diverged_by", "nonfinite", "in_a_row", "seconds", "resumed_at")


def state_of(arm: ArmRun) -> dict[str, Any]:
    """Tensors and plain values. Under FSDP all processes must ask, and the first gets it."""
    scaler = arm.accelerator.scaler
    tensors: Mapping[str, Any]
    if sharded():
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        tensors, optimizer = get_state_dict(arm.eager, arm.optimizer.optimizer, options=whole)
    else:
        tensors, optimizer = _tensors(arm), arm.optimizer.state_dict()
    return {
        "tensors": dict(tensors),
        "optimizer": optimizer,
        "scaler": None if scaler is None else scaler.state_dict(),
        "losses": torch.tensor(arm.losses, dtype=torch.float64),
        "counted": {name: getattr(arm, name) for name in _COUNTED},
    }


def restore(arm: ArmRun, saved: Mapping[str, Any]) -> None:
    """Puts an arm that has not begun where it was when `saved` was written.

    Raises RetrofitError where `saved` is of another model or optimizer.
    """
    try:
        _restore_tensors(arm, saved)
    except (KeyError, RuntimeError, ValueError) as error:
        raise RetrofitError(
            f"{arm.folder / runfiles.LAST} is of another model or optimizer, as another version of a library makes "
            f"them ({' '.join(str(error).split())}); remove it, and the run starts again"
        ) from None
    if arm.accelerator.scaler is not None:
        arm.accelerator.scaler.load_state_dict(saved["scaler"])
    arm.losses = saved["losses"].tolist()
    for name, value in saved["counted"].items():
        setattr(arm, name, value)
    arm.at = saved["step"]
    arm.resumed_at.append(arm.at)


def _restore_tensors(arm: ArmRun, saved: Mapping[str, Any]) -> None:
    if sharded():
        set_state_dict(
            arm.eager,
            arm.optimizer.optimizer,
            model_state_dict=saved["tensors"],
            optim_state_dict=saved["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
    else:
        now, then = _tensors(arm), saved["tensors"]
        differing = [n for n in (*now, *then) if n not in now or n not in then or now[n].shape != then[n].shape]
        if differing:
            raise ValueError(f"{differing[0]} is not in both, in one shape")
        with torch.no_grad():
            for name, tensor in now.items():
                tensor.copy_(then[name])
        arm.optimizer.load_state_dict(saved["optimizer"])


def _tensors(arm: ArmRun) -> dict[str, Tensor]:
    """All that training changes in the weights and their average; buffers too that a state dict leaves out."""
    modules = nn.ModuleDict({"model": arm.model, **({} if arm.ema is None else {"ema": arm.ema.module})})
    return {name: t.detach() for name, t in (*modules.named_parameters(), *modules.named_buffers())}
