"""What a step's memory is said to be, against tensors counted by hand."""

from __future__ import annotations

import torch
from torch import nn

from retrofit.train.memory import StepMemory


class _Chain(nn.Module):
    """Linear, ReLU, linear: autograd keeps the input, and ReLU's output once for both of its readers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).relu())
        return out


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, halves: int = 1) -> None:
    for part in x.chunk(halves):
        model(part).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_holds_weights_moments_gradients_and_what_the_backward_pass_reads() -> None:
    model = _Chain()
    optimizer = torch.optim.AdamW(model.parameters())
    memory, x = StepMemory(torch.device("cpu")), torch.ones(8, 6)
    with memory.measured(model, optimizer):
        _step(model, optimizer, x)
    weights = 4 * sum(p.numel() for p in model.parameters())
    counters = 4 * len(list(model.parameters()))
    assert memory.peak == weights + (2 * weights + counters) + weights + 4 * (8 * 6 + 8 * 32)
    assert memory.source == "tensors"


def test_accumulation_holds_one_part_at_a_time_and_measuring_changes_nothing() -> None:
    torch.manual_seed(0)
    measured, plain = _Chain(), _Chain()
    plain.load_state_dict(measured.state_dict())
    memory, x = StepMemory(torch.device("cpu")), torch.ones(8, 6)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (measured, plain))
    for _ in range(2):
        with memory.measured(measured, optimizer):
            _step(measured, optimizer, x, halves=2)
        _step(plain, other, x, halves=2)
    weights = 4 * sum(p.numel() for p in measured.parameters())
    # The halves are views of one batch, whose storage is counted whole.
    assert memory.peak == 2 * weights + 4 * (8 * 6 + 4 * 32)
    assert all(torch.equal(a, b) for a, b in zip(measured.parameters(), plain.parameters(), strict=True))
