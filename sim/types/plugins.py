"""Plug-ins: policies, memories and costs with classes that are not of this package.

Their exceptions, and their calls of ``sys.exit``, become a ``PluginError`` where ``plugin_code`` surrounds the call. It finds
them in the traceback: the innermost frame of a method of a known class says which one raised, and the innermost frame of user
code says where.

    fragmeter    simulate
    plug-in        Greedy.schedule          the class that is named
    plug-in          helper.longest         the file and line that are named
    fragmeter          PagedTransaction.blocks_of
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from .errors import Overdrawn, PluginError, UserError
from .user_code import is_user_module

_PACKAGE = __name__.partition(".")[0]
#: Characters of an exception's text that an error shows.
_SHOWN = 300
#: Classes of plug-ins that this process has met, with what each one is.
_KNOWN: dict[type, str] = {}


def is_plugin(part: object) -> bool:
    """Whether the class of an object, or a class itself, is not of this package."""
    kind = part if isinstance(part, type) else type(part)
    return kind.__module__.partition(".")[0] != _PACKAGE


def know(part: str, kind: object) -> None:
    """Note what a class is, "policy", "memory" or "cost", unless it is of this package."""
    if isinstance(kind, type) and is_plugin(kind):
        _KNOWN.setdefault(kind, part)


def owner_of(kind: type) -> str:
    """What a class is, and its name, for errors."""
    return f"{_KNOWN.get(kind, 'plug-in')} {kind.__module__}:{kind.__qualname__}"


def place_of(kind: type, method: str) -> tuple[str, int]:
    """File and line of a method of a class, or of the class where the method is not its own."""
    code = getattr(inspect.unwrap(getattr(kind, method, kind)), "__code__", None)
    if code is not None and getattr(kind, method).__module__.partition(".")[0] != _PACKAGE:
        return code.co_filename, code.co_firstlineno
    try:
        return inspect.getsourcefile(kind) or kind.__module__, inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):
        # Without a source file, as in a console.
        return kind.__module__, 1


def broken(kind: type, method: str, rule: str, what: str, step: int | None = None) -> PluginError:
    """The error of a class that breaks a rule.

    Args:
        method: Of its methods the one that does.
        rule: Name of the rule in docs/extending.md.
        what: What is wrong, and the remedy.
        step: Decode step, if the run has begun.
    """
    return PluginError(" ".join(what.split()), owner_of(kind), *place_of(kind, method), rule, step)


@contextmanager
def plugin_code(suspect: Callable[[], type | None] = lambda: None) -> Iterator[None]:
    """Convert exceptions of plug-ins in this context, or in a function that it decorates.

    A ``UserError`` that a plug-in raises stays as it is: it is one line with a remedy.

    Args:
        suspect: The class of a plug-in that takes part, which is named also where it raises nothing itself and leaves a state
            in which this package cannot go on.

    Raises:
        PluginError: A plug-in raised an exception, which is its ``__cause__``, or ended the program.
    """
    try:
        yield
    except PluginError as error:
        # SimPy raises a copy, without attributes.
        original = error.__cause__ if isinstance(error.__cause__, PluginError) else error
        raise original from original.__cause__
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        kind = suspect()
        found = blamed(error, None, kind) or failed(kind, "schedule", error)
        if found is None:
            raise
        raise found from error


def blamed(error: BaseException, step: int | None = None, suspect: type | None = None) -> PluginError | None:
    """The error of the plug-in that raised an exception; None if none did.

    Args:
        step: Decode step, if the run has begun.
        suspect: The class to name where user code raised that is of no known class, such as a part that a memory was made with.
    """
    if isinstance(error.__cause__, StopIteration) and isinstance(error, RuntimeError):
        # What Python makes of it in a generator, such as the process of an engine.
        error = error.__cause__
    frames = reversed([frame for frame, _ in walk_tb(error.__traceback__)])
    kind = next((found for frame in frames if (found := _class_of(frame)) is not None), suspect)
    place = where_raised(error)
    if kind is None or place is None:
        return None
    what = f"raises {described(error)}; correct it"
    if isinstance(error, SystemExit):
        what = f"ends the program ({described(error)}); raise an exception instead"
    return PluginError(what, owner_of(kind), *place, None, step)


def described(error: BaseException) -> str:
    """Class and text of an exception, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def where_raised(error: BaseException) -> tuple[str, int] | None:
    """File and line of the innermost user code that an exception left; None where there is none."""
    frames = reversed([*walk_tb(error.__traceback__)])
    return next(((frame.f_code.co_filename, line) for frame, line in frames if _is_user_code(frame)), None)


def failed(kind: type | None, method: str, error: BaseException, step: int | None = None) -> PluginError | None:
    """The error of a class with which a run cannot go on, although it raises nothing itself; None without one, and where the
    machine has no more memory."""
    if kind is None or not isinstance(error, Exception) or isinstance(error, UserError | MemoryError):
        return None
    if isinstance(error, Overdrawn):
        remedy = "grant what the transaction has free, and promise fewer steps"
        return broken(kind, method, "blocks", f"{error}; {remedy}", step)
    return broken(kind, method, "execution", f"the run cannot go on with it ({described(error)}); correct it", step)


def _class_of(frame: FrameType) -> type | None:
    """The class of a plug-in that a frame runs a method of, or a function of its module."""
    module, name = _module_of(frame), frame.f_code.co_qualname
    kinds = [kind for kind in _KNOWN if any(base.__module__ == module for base in kind.__mro__)]
    for kind in kinds:
        if any(base.__module__ == module and name.startswith(f"{base.__qualname__}.") for base in kind.__mro__):
            return kind
    return next((kind for kind in kinds if kind.__module__ == module), None)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_user_code(frame: FrameType) -> bool:
    return is_user_module(_module_of(frame), Path(frame.f_code.co_filename), {kind.__module__ for kind in _KNOWN})
