"""Replaces a folder and is killed (SIGKILL) at every step of that; run as a program, which forks once for each kill.

A step is each line of ``sim/output/folders.py`` and ``sim/output/files.py``, and each call that Python audits (open, rename, remove,
rmdir, mkdir, chmod, listdir, flock, a function of the C library): so there is a kill before and after every call.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from fragmeter.sim.output import files, folders

KIND = folders.FolderKind("test", ("a",), marker="run.json", recognises=lambda run: run["version"] > 0)
_SOURCES = (files.__file__, folders.__file__)
_AUDITED = ("open", "os.", "fcntl.", "shutil.", "ctypes.call_function")


def content(version: int) -> dict[str, bytes]:
    return {"run.json": b'{"version": %d}' % version, "a": b"%d" % version * 9}


def replace(target: Path, version: int) -> None:
    writers = {name: lambda path, data=data: path.write_bytes(data) for name, data in content(version).items()}
    folders.replace_folder(target, KIND, writers)


def found(folder: Path) -> int | None:
    """The version of a complete folder, 0 where there is none.

    Raises:
        AssertionError: It is there and not complete.
    """
    if not folder.exists():
        return 0
    held = {path.name: path.read_bytes() for path in folder.iterdir()}
    [version] = [version for version in (1, 2, 3) if held == content(version)] or [None]
    assert version, f"half a folder: {held}"
    return version


def killed_at(step: int, action: Callable[[], object]) -> bool:
    """Run an action in a process that is killed at a step; whether it came that far."""
    child = os.fork()
    if child:
        _, how = os.waitpid(child, 0)
        assert os.WIFSIGNALED(how) and os.WTERMSIG(how) == signal.SIGKILL or how == 0, how
        return how != 0
    count = 0

    def tick() -> None:
        nonlocal count
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in _SOURCES:
            return None
        tick()
        return trace

    # The kill is a call that is audited, too.
    sys.addaudithook(lambda event, _: tick() if event.startswith(_AUDITED) and event != "os.kill" else None)
    sys.settrace(trace)
    try:
        action()
    except BaseException:
        sys.settrace(None)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path != target)


def check_recovery(target: Path, allowed: set[int]) -> None:
    """The next command finds a complete version, and leaves nothing else."""
    folders.restore(target)
    assert found(target) in allowed
    folders.check_folder(target, KIND)
    assert found(target) in allowed and not beside(target), beside(target)
    replace(target, 3)
    assert found(target) == 3 and not beside(target)
    for path in target.iterdir():
        path.unlink()
    target.rmdir()


def main(place: Path, has_exchange: bool) -> None:
    if not has_exchange:
        folders._renameat2 = lambda: None
    target, kills, moments = place / "run", 0, 0
    for first in (False, True):
        step = 0
        while True:
            if not first:
                replace(target, 1)
            if not killed_at(step, lambda: replace(target, 2)):
                break
            left = found(target)
            if left == 0 and not first:
                # Under another name, complete.
                assert not has_exchange
                [old] = [name for name in beside(target) if name.endswith("-old")]
                assert found(place / old) == 1
                moments += 1
                # The command that brings it back is killed, too.
                assert killed_at(step % 7, lambda: folders.check_folder(target, KIND))
            check_recovery(target, {0, 2} if first else {1, 2})
            step += 1
        assert found(target) == 2
        check_recovery(target, {2})
        assert step > 50
        kills += step
    assert bool(moments) != has_exchange
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "exchange")
