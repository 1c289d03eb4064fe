"""The program ``fragmeter``: its verbs, its error output and its exit status.

Exit status: 0 success; 2 a user error, one line on standard error; 1 an internal fault, one line and how to report it
(``FRAGMETER_DEBUG=1`` shows the traceback, and that of an exception of a plug-in); 130 Ctrl-C and 143 SIGTERM, finished results are kept; 141 the reader of
the output has closed it.

Integer flags of all verbs are checked before cyclopts and pydantic convert them: decimal digits, optionally with a
minus. Without the check cyclopts rounds 1.5 and reads 0x10, and pydantic reads 1.0 and 1_0. Flags that vLLM reads with
a suffix (16K) are read with it here, too.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from functools import partial
from io import TextIOWrapper
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

import pydantic
from cyclopts import (
    App,
    Argument,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    Token,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from ... import __version__
from ...sim.config.settings import setting_error
from ...sim.output.interrupts import handle, message_of, status_of
from ...sim.policy.registry import installed, policy
from ...sim.spec.deployment import require_counted
from ...sim.types.bounds import human_readable_int
from ...sim.types.errors import NotSimulated, PluginError, SettingError, UserError
from ...sim.types.notes import collected_notes
from ...sim.types.plugins import plugin_code
from ..runs.output import Terminal, print_beside
from ..vllm_serve.flags import spellings

_WHOLE = re.compile("-?[0-9]+")
#: The flags of ``vllm serve`` with ``human_readable_int`` that other verbs have as well (``vllm/engine/arg_utils.py``).
_HUMAN_READABLE = ("max_model_len", "max_num_batched_tokens")


def whole_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Check the values of integer flags, and write those with a suffix as digits; one of cyclopts' ``config`` functions.

    Args:
        app, commands: The verb; unused.
        arguments: Arguments of one command line, parsed and not yet converted.

    Raises:
        SettingError: A value that is not a whole number.
    """
    for argument in arguments:
        if is_whole(argument.hint):
            argument.tokens = [_in_digits(argument, token) for token in argument.tokens]


def _in_digits(argument: Argument, token: Token) -> Token:
    field = _field(argument)
    if field in _HUMAN_READABLE and (number := human_readable_int(token.value)) is not None:
        return token.evolve(value=str(number))
    if _WHOLE.fullmatch(token.value):
        return token
    suffix = ", or with a suffix as 16K" if field in _HUMAN_READABLE else ""
    raise SettingError(field, token.value, f"must be a whole number, in digits{suffix}")


def _field(argument: Argument) -> str:
    """The setting that a flag gives, as errors name it: ``max_num_seqs`` of ``--max-num-seqs``."""
    return argument.name.lstrip("-").replace("-", "_").lower()


def is_whole(hint: Any) -> bool:
    """Whether a flag of this type takes only integers, or None."""
    return hint is int or set(get_args(hint)) == {int, NoneType}


#: What a value must be, by the type that it is converted to; integers are checked by ``whole_numbers``.
_REQUIREMENTS = {float: "must be a number", bool: "must be true or false"}
_HELP = ("--help", "-h", "--help-all")
DONE, FAULT, MISTAKE, NO_READER = 0, 1, 2, 141
#: Seconds after which an interrupted program ends even if it still waits.
MOST_UNWINDING_S = 5

app = App(
    name="fragmeter",
    help="Every slot of an LLM server's KV cache, accounted for.",
    help_epilogue="Start with: fragmeter reproduce all --out results",
    help_flags=_HELP,
    version=__version__,
    config=whole_numbers,
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
    console=Terminal(),
    result_action="return_none",
)
VERBS = {
    "reproduce": "Rerun the figures of the PagedAttention paper, simulated beside published.",
    "simulate": "Simulate one or several replicas that serve a trace.",
    "sweep": "Run every combination of settings, or search for the best; write one Parquet file.",
    "compare": "Compare the metrics of runs or settings, with confidence intervals.",
    "report": "Draw one or several runs as an HTML page, with the block map.",
    "story": "Run a few requests word by word, as a page to step through.",
    "explore": "Draw a page with sliders over a grid of finished runs.",
    "plan": "Find the GPUs and flags for a load; check whether a vllm serve line starts.",
    "diagnose": "Say why a vllm serve line preempts or is slow, and which flags to change.",
    "validate": "Compare the simulation with a device, or with a benchmark of a real server.",
    "traces": "Describe, convert, fetch and synthesise request traces.",
    "list": "List policies, models, GPUs or stories.",
    "calibrate": "Measure the operations of a step on a device.",
    "doctor": "Check the installation: packages, compilers, GPU.",
}
# Verbs are imported on demand: pictures and tables take a second to load.
for _place, (_verb, _help) in enumerate(VERBS.items()):
    _name = _verb.replace("-", "_")
    app.command(f"{__package__}.{_name}:{_name}", name=_verb, help=_help, sort_key=_place)


def main() -> None:
    """Entry point: run the command line and exit."""
    if hasattr(signal, "alarm"):
        # Registered before the modules of verbs, so it runs last: a later alarm would end the program by its signal.
        atexit.register(signal.alarm, 0)
    handle(_limit_unwinding)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        # Names that the encoding lacks are escaped, such as names that are not UTF-8.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(status(sys.argv[1:]))


def _limit_unwinding(status: int) -> None:
    """Limit the time in which an interrupted program unwinds."""
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, partial(_exit_now, status))
        signal.alarm(MOST_UNWINDING_S)


def _exit_now(status: int, *_: object) -> NoReturn:
    """End the workers and exit at once, without the interpreter's own exit, which waits for the workers."""
    # Here, as loading it takes a twentieth of a small run.
    import psutil

    # The trackers of shared memory ignore SIGTERM and clean up afterwards.
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    os._exit(status)


def status(tokens: Sequence[str]) -> int:
    """Run the command line and return the exit status."""
    try:
        with plugin_code(), collected_notes():
            _know_policies(tokens)
            _show_help(tokens)
            app(tokens)
    except CycloptsError as error:
        return _refuse(_one_line(error))
    except UserError as error:
        if isinstance(error, PluginError):
            _show_traceback()
        return _refuse(str(error))
    except KeyboardInterrupt as interrupt:
        _complain(message_of(interrupt, keeps=any(token.startswith(("--out", "--json", "--save")) for token in tokens)))
        return status_of(interrupt)
    except BrokenPipeError:
        # Without this, Python reports the error again when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except MemoryError as error:
        # numpy says how much; C and Python say nothing.
        found = f" ({error})" if str(error) else ""
        return _refuse(f"more memory than this machine has{found}; ask for fewer requests, or for less time")
    except OSError as error:
        return _refuse(_of_machine(error))
    except (Exception, SystemExit) as error:
        return _fault(error)
    return DONE


def _of_machine(error: OSError) -> str:
    """An error of the machine that no reader or writer has named: of standard output, which has no file name, or of a library."""
    where = error.filename or ("standard output" if error.errno in (ENOSPC, EDQUOT, EIO, EFBIG) else "this machine")
    return f"{where}: {error.strerror or error}; make room or choose another place, and run again"


def _show_help(tokens: Sequence[str]) -> None:
    """Choose the tier of the help that a command line asks for."""
    if not set(_HELP).isdisjoint(tokens):
        # Here, as loading it takes a tenth of a small run.
        from .help import TieredHelp

        app.help_formatter = TieredHelp(tokens)


def _know_policies(tokens: Sequence[str]) -> None:
    """Import the policies of other packages that a command line names, because their options are flags too."""
    for text in re.findall(r"policy=(\S+)", " ".join(tokens).replace("--policy ", "--policy=")):
        for name in text.split(","):
            if ":" in name or name in installed():
                policy(name)


def _one_line(error: CycloptsError) -> str:
    """An error of parsing as field, value and remedy; those without a field keep cyclopts' text."""
    if isinstance(error.__cause__, pydantic.ValidationError):
        argument = getattr(error, "argument", None)
        return str(setting_error(error.__cause__, _field(argument) if isinstance(argument, Argument) else ""))
    verb = " ".join(("fragmeter", *(error.command_chain or ())))
    match error:
        case UnknownCommandError(app=App() as parent, unused_tokens=[name, *_]):
            return _unknown("command", name, (each for each in parent if not each.startswith("-")))
        case UnknownOptionError():
            flag = error.token.keyword or error.token.value
            near = _near_flags(flag, [name for each in error.argument_collection for name in each.names])
            short = spellings().get(flag[1:])
            named = [f"--{short}"] if flag[:1] == "-" and short else near
            return f"{flag}: {verb} has no such flag; {f'did you mean {named[0]}?' if named else f'see {verb} --help'}"
        case MissingArgumentError(argument=Argument() as argument):
            wanted = argument.token_count()[0]
            number = "a value" if wanted == 1 else f"{wanted} values"
            return f"{argument.name}: needs {number}; see {verb} --help"
        case UnusedCliTokensError(unused_tokens=[token, *_]):
            return f"{token}: {verb} takes no further arguments; leave it out"
        case RepeatArgumentError():
            return f"{error.token.keyword}: is given more than once; keep one"
        case CoercionError(token=Token() as token, argument=Argument() as argument):
            field = _field(argument)
            if get_origin(error.target_type) is Literal:
                return _uncounted(field, token.value) or _unknown(field, token.value, get_args(error.target_type))
            if error.target_type in _REQUIREMENTS:
                return str(SettingError(field, token.value, _REQUIREMENTS[error.target_type]))
    return " ".join(str(error).split())


def _near_flags(flag: str, known: Sequence[str]) -> list[str]:
    """At most one flag: one that has the words of ``flag``, rather at its end, where the noun is: --request-rate for --rate;
    else one that is spelt nearly so."""
    words = f"-{flag.strip('-')}-"
    having = [name for name in known if words in f"{name}-"]
    nearest = sorted(having, key=lambda name: (not f"{name}-".endswith(words), len(name)))
    return nearest[:1] or get_close_matches(flag, known, n=1, cutoff=0.7)


def _uncounted(field: str, value: str) -> str | None:
    """The complaint about a format of vLLM's KV cache that is not simulated; None for any other value."""
    try:
        if field == "kv_cache_dtype":
            require_counted(field, value)
    except NotSimulated as error:
        return str(error)
    return None


def _unknown(field: str, value: str, known: Iterable[str]) -> str:
    near = get_close_matches(value, known := list(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return str(SettingError(field, value, f"one of {', '.join(known)}{hint}"))


def _refuse(text: str) -> int:
    _complain(text)
    return MISTAKE


def _show_traceback() -> None:
    """Print the traceback of the exception that is handled, where FRAGMETER_DEBUG asks for it."""
    if os.environ.get("FRAGMETER_DEBUG") == "1":
        traceback.print_exc()


def _fault(error: BaseException) -> int:
    _show_traceback()
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    _complain(f"an internal fault ({summary}); please report it with the output of FRAGMETER_DEBUG=1")
    return FAULT


def _complain(text: str) -> None:
    """Print one line. Characters in names that would break the line or control the terminal are escaped."""
    print_beside(f"fragmeter: {text}")
