"""A pasted ``vllm serve`` command line: found in what stands around it, split into flags, and its values read.

Understood are ``vllm serve MODEL ...``, ``python -m vllm.entrypoints.openai.api_server ...`` and
``docker run ... vllm/vllm-openai:TAG ...``, with environment assignments in front, line continuations, dashes
or underscores, ``--flag value`` or ``--flag=value``, and flags shortened as far as they stay unique.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import overload

from ...sim.types.errors import SettingError, UserError
from .flags import KNOWN, MANY, NOT_SIMULATED, READ, SHORT, SWITCHES

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_TAG = re.compile(r"vllm-openai:(v?\d{1,4}\.\d{1,4})")
_NUMBER = re.compile(r"-?[\d.]+[kKmMgGtT]?")
_OPTIMIZATION = re.compile(r"^-O(\d)$")
#: Where a shell goes on to something else; redirections too.
_SHELL_ENDS = re.compile(r"[|;&].*|\d?>.*|<")
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MODULE = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class ServeLine:
    """What a command line says.

    Attributes:
        model: As it is written, a repository or a path.
        flags: Values of the flags that are read, by name; switches are booleans.
        ignored: Flags that change neither memory nor what is scheduled.
        not_simulated: Flags without an effect in the simulation.
        environment: Variables assigned in front of the program, or handed to the container.
        version: Major and minor number of vLLM, where a container's tag says it.
    """

    model: str
    flags: dict[str, str | bool]
    ignored: list[str] = field(default_factory=list)
    not_simulated: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    version: tuple[int, int] | None = None

    def text(self, name: str, default: str) -> str:
        """The value of a flag as it is written."""
        return str(self.flags.get(name, default))

    def switch(self, name: str, default: bool = False) -> bool:
        """Whether a switch is on."""
        return bool(self.flags.get(name, default))

    @overload
    def whole(self, name: str, default: int) -> int: ...

    @overload
    def whole(self, name: str, default: None = None) -> int | None: ...

    def whole(self, name: str, default: int | None = None) -> int | None:
        """A whole number; ``8k`` is 8,000 and ``8K`` 8,192, as vLLM has them.

        Raises:
            SettingError: It is none, or below 1.
        """
        if name not in self.flags:
            return default
        value = str(self.flags[name])
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", value)
        number = float(found[1]) * _SUFFIXES.get(found[2], 1) if found else 0
        if number < 1 or number != int(number) or number > 2**50:
            raise SettingError(f"--{name}", value, "must be a whole number of at least 1")
        return int(number)

    def share(self, name: str, default: float) -> float:
        """A number above 0 and up to 1; raises SettingError for any other."""
        value = self.flags.get(name, default)
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number <= 1:
            raise SettingError(f"--{name}", value, "must be above 0 and at most 1")
        return number


def pasted(text: str) -> str:
    """The text, or what the file of that name holds."""
    try:
        return Path(text).read_text("utf-8") if "\n" not in text and Path(text).is_file() else text
    except (OSError, UnicodeDecodeError):
        # A long line is no name of a file.
        return text


def parse_serve(text: str) -> ServeLine:
    """Read a pasted command line.

    Raises:
        SettingError: It starts no server, has a flag that vLLM does not know, or lacks a value or the model.
    """
    words = _words(text)
    start = _start(words)
    environment = dict(word.split("=", 1) for word in words[:start] if _ASSIGNMENT.fullmatch(word))
    line = _Reader(_until_shell(words[start:])).line(environment)
    tag = next(filter(None, map(_TAG.search, words[:start])), None)
    return replace(line, version=version(tag[1])) if tag else line


def version(text: str) -> tuple[int, int]:
    """Major and minor number of a release, as ``0.16`` or ``v0.16.0``; raises SettingError for anything else."""
    found = re.fullmatch(r"v?(\d{1,4})\.(\d{1,4})(\..*)?", text)
    if found is None:
        raise SettingError("vllm", text, "must be a release, as 0.16")
    return int(found[1]), int(found[2])


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\r\n", " ").replace("\\\n", " "))
    except ValueError as error:
        raise SettingError("serve", _short(text), f"cannot be split into words ({error}); check its quotes") from None


def _start(words: Sequence[str]) -> int:
    """Where the server's arguments begin."""
    for place, (word, after) in enumerate(pairwise(words)):
        if word.rsplit("/", 1)[-1] == "vllm" and after == "serve" or word == "-m" and after == _MODULE:
            return place + 2
    for place, word in enumerate(words):
        if "vllm-openai" in word and not word.startswith("-"):
            return place + 1
    raise SettingError("serve", _short(" ".join(words)), "starts no server; paste a line with vllm serve MODEL")


def _until_shell(words: Sequence[str]) -> list[str]:
    ends = (place for place, word in enumerate(words) if _SHELL_ENDS.fullmatch(word))
    return list(words[: next(ends, len(words))])


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Reader:
    """Goes through the arguments once."""

    def __init__(self, words: list[str]) -> None:
        self._left = words[::-1]
        self._model: str | None = None
        self._flags: dict[str, str | bool] = {}
        self._ignored: list[str] = []
        self._not_simulated: list[str] = []

    def line(self, environment: dict[str, str]) -> ServeLine:
        """All words, read; ``environment`` is what stood before the program."""
        while self._left:
            word = self._left.pop()
            if word.startswith("-") and not _NUMBER.fullmatch(word):
                self._flag(word)
            elif self._model is None:
                self._model = word
            else:
                raise SettingError("serve", word, "is neither a flag nor the value of one; one model is served")
        model = self._flags.pop("model", None) or self._model
        if not model:
            raise SettingError("serve", None, "names no model; paste a line with vllm serve MODEL")
        return ServeLine(str(model), self._flags, self._ignored, self._not_simulated, environment)

    def _flag(self, word: str) -> None:
        word = _OPTIMIZATION.sub(r"-O=\1", word)
        written, joined, value = word.partition("=")
        name, off = _resolved(written)
        if name == "config":
            raise SettingError(written, value or "a file", "is not read; paste its contents as flags")
        if name in SWITCHES:
            found: str | bool = self._truth(value, joined) != off
        else:
            found = value if joined else self._value(written, name)
        if name in NOT_SIMULATED:
            self._not_simulated.append(f"--{name} ({NOT_SIMULATED[name][1]})")
        elif name in READ:
            self._flags[name] = found
        else:
            self._ignored.append(f"--{name}")

    def _truth(self, value: str, joined: str) -> bool:
        if not joined and self._left and self._left[-1].lower() in ("true", "false"):
            value = self._left.pop()
        return value.lower() != "false"

    def _value(self, written: str, name: str) -> str:
        values = []
        while self._left and (not self._left[-1].startswith("-") or _NUMBER.fullmatch(self._left[-1])):
            values.append(self._left.pop())
            if name not in MANY:
                break
        if not values:
            raise SettingError("serve", written, "needs a value")
        return " ".join(values)


def _resolved(written: str) -> tuple[str, bool]:
    """The flag's full name, and whether ``--no-`` turns it off; raises SettingError for what vLLM does not know."""
    bare = written.lstrip("-").split(".", 1)[0]
    name = bare.replace("_", "-")
    name = SHORT.get(name, name)
    if name in KNOWN:
        return name, False
    if name.startswith("no-") and name[3:] in SWITCHES:
        return name[3:], True
    longer = [known for known in KNOWN if known.startswith(name)]
    if written.startswith("--") and len(longer) == 1:
        return longer[0], False
    near = difflib.get_close_matches(name, KNOWN, n=1)
    meant = f"; did you mean --{near[0]}?" if near else ""
    raise UserError(f"{written}: is no flag of vllm serve that is known here{meant}")
