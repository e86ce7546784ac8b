"""Run in each of several processes: trains every study of a JSON file, {name: recipe}, by retrofit.pair.run_pair.

python two_processes.py STUDIES FOLDER: the main process is given FOLDER/name, the others FOLDER/others/name, which
must never come to be. What a study is refused for is written to FOLDER/name.<rank>. A study of "sharded": true trains
under FSDP2.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard

from retrofit import evaluate
from retrofit.errors import RetrofitError
from retrofit.pair import run_pair
from retrofit.recipe import parse
from retrofit.train import arm, memory


@contextmanager
def sharded() -> Iterator[None]:
    """FSDP2 on CPUs, where accelerate has none: what its `prepare` and `no_sync` do on GPUs, by torch's fully_shard."""

    def prepare(self: Accelerator, module: Any, optimizer: Any) -> tuple[nn.Module, Any]:
        names = {id(p): name for name, p in module.named_parameters()}
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for inner in list(module.modules()):
            if type(inner).__name__ in module._no_split_modules:
                fully_shard(inner)
        fully_shard(module)
        shards = dict(module.named_parameters())
        for group, found in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [shards[name] for name in found]
        return module, optimizer

    @contextmanager
    def no_sync(self: Accelerator, module: Any) -> Iterator[None]:
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)

    @contextmanager
    def measured(self: Any, model: nn.Module, optimizer: Any, compiled: bool = False) -> Iterator[None]:
        yield
        self.peak = memory.held_bytes(model, optimizer)  # as a GPU's is, but for the allocator

    accelerator = mock.patch.multiple(Accelerator, prepare=prepare, no_sync=no_sync, unscale_gradients=lambda _: None)
    with (
        accelerator,
        mock.patch.object(memory.StepMemory, "measured", measured),
        mock.patch.object(arm, "sharded", return_value=True),
    ):
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    studies, folder, rank = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), os.environ["RANK"]
    for name, document in studies.items():
        evaluate._BATCH = document.pop("evaluate", 64)
        fsdp = sharded() if document.pop("sharded", False) else nullcontext()
        try:
            with fsdp:
                run_pair(parse(document), folder / name if rank == "0" else folder / "others" / name)
        except RetrofitError as error:
            (folder / f"{name}.{rank}").write_text(str(error))
    torch.distributed.destroy_process_group()
