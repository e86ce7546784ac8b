"""Training: arms in lockstep.

arm.py       one arm's run, step by step
watch.py     what attention does meanwhile
finish.py    what it leaves at its end
loop.py      the loop over the arms
optim.py     what is trained, at which rate and weight decay
wrapped.py   a model inside accelerate's and torch.compile's wrappers
memory.py    what a step of one arm needs of memory
"""

from retrofit.train.arm import ArmRun, attention_of
from retrofit.train.loop import steps_of, train_lockstep

__all__ = ["ArmRun", "attention_of", "steps_of", "train_lockstep"]
