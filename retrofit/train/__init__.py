"""Training: arms in lockstep.

arm.py       one arm's run, step by step
watch.py     what attention does meanwhile
finish.py    what it leaves at its end
loop.py      the loop over the arms
optim.py     what is trained, at which rate and weight decay
wrapped.py   a model inside accelerate's and torch.compile's wrappers
match.py     that they saw the same
resume.py    checkpoints to go on from
state.py     what of an arm they hold
signals.py   an end that is asked for
track.py     experiment trackers
processes.py several processes that train one study
memory.py    what a step of one arm needs of memory, and how many runs fit
"""

from retrofit.train.arm import ArmRun, attention_of
from retrofit.train.loop import probed_at, steps_of, train_lockstep
from retrofit.train.match import RATE, Seen, check_matched
from retrofit.train.memory import held_bytes, runs_at_once
from retrofit.train.processes import check_devices, check_shares, join, on_main
from retrofit.train.signals import Stop, stoppable
from retrofit.train.track import check_trackers

__all__ = [
    "RATE",
    "ArmRun",
    "Seen",
    "Stop",
    "attention_of",
    "check_devices",
    "check_matched",
    "check_shares",
    "check_trackers",
    "held_bytes",
    "join",
    "on_main",
    "probed_at",
    "runs_at_once",
    "steps_of",
    "stoppable",
    "train_lockstep",
]
