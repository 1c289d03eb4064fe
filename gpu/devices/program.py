"""What ``python -m fragmeter.gpu...`` programs share: exit statuses, one line for what went wrong, and their file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...sim.output.files import as_json, require_writable_file, write_whole
from ...sim.output.interrupts import message_of, status_of
from ...sim.types.errors import SettingError, UserError
from . import devices
from .devices import Device


def run(body: Callable[[], bool]) -> int:
    """The exit status: 0 where ``body`` says that all is well, 1 where not, 2 for a mistake, 130 and 143 for signals."""
    try:
        return int(not body())
    except UserError as error:
        print(f"fragmeter: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"fragmeter: {message_of(interrupt)}", file=sys.stderr)
        return status_of(interrupt)


def gpu(name: str) -> Device:
    """The GPU of that name.

    Raises:
        UserError: As :func:`devices.open`, or it is a device of another kind.
    """
    device = devices.open(name)
    if device.torch_device.type != "cuda":
        raise SettingError("device", name, "must be a GPU: cuda, or cuda: and a number")
    return device


class JsonFile:
    """The file of ``--json``, which is written whole or not at all; none where none is asked for.

    Raises:
        UserError: It cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        if path == Path("-"):
            raise SettingError("json", "-", "standard output has the text; name a file")
        self._path = path
        if path is not None:
            require_writable_file(path)

    def write(self, document: Any) -> None:
        """What there is to say, in place of what was written before."""
        if self._path is not None:
            write_whole(self._path, as_json(document))
