"""SIGTERM and SIGINT end a training run at the end of a step, with all that it has done saved."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from accelerate.utils import gather_object

from retrofit.errors import Interrupted
from retrofit.train.processes import join

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """The signals that have come. Outside of `hold` they raise Interrupted at once.

    Of several processes none may leave the others waiting: there, they raise it in `agree`, in all at once.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._held = False
        self._alone = join().num_processes == 1

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Puts off a signal to the end of the block, so that what is done in it is whole."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self.number is not None and self._alone:
            raise Interrupted(self.number)

    def agree(self) -> None:
        """Raises Interrupted in every process where one of them has received a signal."""
        if not self._alone:
            number = max(gather_object([self.number or 0]))
            if number:
                raise Interrupted(number)

    def receive(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt  # the second: at once
            return
        self.number = number
        print("retrofit: ending; once more Ctrl-C ends without saving", file=sys.stderr)
        if not self._held and self._alone:
            raise Interrupted(number)


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Receives the signals inside the block. Elsewhere than in the main thread Python lets nobody receive them."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    earlier = {number: signal.signal(number, stop.receive) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
