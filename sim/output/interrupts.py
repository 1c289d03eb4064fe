"""Ctrl-C and SIGTERM end a program in the same way: what is finished stays, and nothing is left half-written."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NoReturn

#: Exit statuses, as a shell has them: 128 and the number of the signal.
INTERRUPTED, TERMINATED = 130, 143
#: The default handling of a signal.
_DEFAULTS = {signal.SIGINT: (signal.default_int_handler, signal.SIG_DFL), signal.SIGTERM: (signal.SIG_DFL,)}


class Terminated(KeyboardInterrupt):
    """SIGTERM. What unwinds at Ctrl-C unwinds at this, too."""


def status_of(interrupt: KeyboardInterrupt) -> int:
    """The exit status of a program that an interrupt ends."""
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def message_of(interrupt: KeyboardInterrupt) -> str:
    """What a program says when an interrupt ends it."""
    return f"{'terminated' if isinstance(interrupt, Terminated) else 'interrupted'}; what is finished stays"


def handle(on_first: Callable[[int], object] = lambda status: None) -> None:
    """Raise the first Ctrl-C or SIGTERM as an interrupt, and ignore those that follow while the program unwinds.

    A signal that the program's parent had it ignore, as a shell does for what it starts in the background, stays
    ignored.

    Args:
        on_first: Is called with the exit status before the interrupt is raised.
    """

    def interrupt(number: int, _: object) -> NoReturn:
        for each in _DEFAULTS:
            signal.signal(each, signal.SIG_IGN)
        raised = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        on_first(status_of(raised))
        raise raised

    for number, defaults in _DEFAULTS.items():
        if signal.getsignal(number) in defaults:
            signal.signal(number, interrupt)
