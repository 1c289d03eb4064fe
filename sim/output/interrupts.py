"""Handling of Ctrl-C and SIGTERM: finished outputs are kept, and no output is left incomplete."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NoReturn

#: Exit statuses as in a shell: 128 plus the number of the signal.
INTERRUPTED, TERMINATED = 130, 143
#: The default handling of a signal.
_DEFAULTS = {signal.SIGINT: (signal.default_int_handler, signal.SIG_DFL), signal.SIGTERM: (signal.SIG_DFL,)}


class Terminated(KeyboardInterrupt):
    """SIGTERM. Code that handles Ctrl-C handles it too."""


def status_of(interrupt: KeyboardInterrupt) -> int:
    """Exit status of a program that is ended by an interrupt."""
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def message_of(interrupt: KeyboardInterrupt, keeps: bool = True) -> str:
    """Message of a program that is ended by an interrupt.

    Args:
        keeps: Whether it writes results to files.
    """
    ended = "terminated" if isinstance(interrupt, Terminated) else "interrupted"
    return f"{ended}; finished results are kept" if keeps else ended


def handle(on_first: Callable[[int], object] = lambda status: None) -> None:
    """Raise the first Ctrl-C or SIGTERM as an interrupt, and ignore further ones while the program unwinds.

    A signal that the parent process has set to be ignored remains ignored; a shell does this for background commands.

    Args:
        on_first: Called with the exit status before the interrupt is raised.
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
