"""Shared parts of the ``python -m fragmeter.gpu...`` programs: exit statuses, one-line errors, and the output file."""

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
    """The exit status: 0 if ``body`` returns True, 1 if it returns False, 2 for a user error, 130 and 143 for signals."""
    try:
        return int(not body())
    except UserError as error:
        print(f"fragmeter: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"fragmeter: {message_of(interrupt)}", file=sys.stderr)
        return status_of(interrupt)


def gpu(name: str) -> Device:
    """The GPU with this name.

    Raises:
        UserError: As :func:`devices.open`, or the device is not a GPU.
    """
    device = devices.open(name)
    if device.torch_device.type != "cuda":
        raise SettingError("device", name, "must be a GPU: cuda, or cuda: and a number")
    return device


class JsonFile:
    """The file of ``--json``, written atomically; without a path nothing is written.

    Raises:
        UserError: The file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        if path == Path("-"):
            raise SettingError("json", "-", "standard output has the text; name a file")
        self._path = path
        if path is not None:
            require_writable_file(path)

    def write(self, document: Any) -> None:
        """Write a document in place of the previous one."""
        if self._path is not None:
            write_whole(self._path, as_json(document))
