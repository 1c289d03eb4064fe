"""Parser of a pasted ``vllm serve`` command line: find it in the surrounding text, split it into flags, read the values.

The parser accepts ``vllm serve MODEL ...``, ``python -m vllm.entrypoints.openai.api_server ...``, ``docker run ...
vllm/vllm-openai:TAG ...`` and deployment files (``deployments``), with environment assignments in front, line continuations, dashes or
underscores, ``--flag value`` or ``--flag=value``, and flags shortened as far as they stay unique.

``flags`` says of each flag which releases have it, and what becomes of it here.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self, TypeVar, overload

from ...sim.spec.attention_backends import named_backend
from ...sim.spec.gpu import GIB
from ...sim.spec.kernels import named_experts
from ...sim.spec.speculative import ACCEPTANCE_KEYS, parse_speculative
from ...sim.types.bounds import human_readable_int
from ...sim.types.errors import SettingError, UserError
from ...sim.types.notes import note
from ...sim.types.signatures import remedy
from ...sim.types.user_files import json_value, text_of
from .deployments import config_flags, deployed, flag_words, is_deployment
from .flags import (
    CHANGES_MEMORY,
    NOT_SIMULATED,
    READ,
    UNCHANGED,
    VARIABLES,
    VARIABLES_OF_TIMES,
    Release,
    flags,
    releases,
    spellings,
    text_of_release,
)
from .shell import ASSIGNMENT, assigned, filled, first_argument, line_words

Read = TypeVar("Read")

#: Flags with an object, as JSON or key by key; the second is read for its graphs alone.
_OBJECTS = (
    "speculative-config",
    "compilation-config",
    "eplb-config",
    "kv-transfer-config",
    "attention-config",
    "limit-mm-per-prompt",
    "hf-overrides",
)
_VARIABLE = "VLLM_ATTENTION_BACKEND"
#: Last release that reads it.
_LAST_BY_VARIABLE = (0, 14)
_OF_OLDER = "releases up to 0.14 read it; paste the image of yours, or give --attention-backend"
_KERNELS = "kernels are those that vLLM chooses"
#: Flags without a simulated effect that decide whether a server starts (``graphs``).
_DECIDE = frozenset(
    """
    compilation-config cuda-graph-sizes cudagraph-capture-sizes disable-custom-all-reduce hf-overrides
    max-cpu-loras max-cudagraph-capture-size optimization-level performance-mode rope-scaling
    """.split()
)
#: Flags of drafts, by the key of ``--speculative-config`` that each sets.
_DRAFTS = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
#: Flags that took several words in some release.
_MANY = {"allowed-headers", "default-mm-loras", "middleware"}

#: The tags of other projects' images count their own releases.
_TAG = re.compile(r"(?:^|/)vllm/vllm-openai:(v?\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)")
_DOCKER_GPUS = re.compile(r"--gpus[= ]\"?(?:(\d{1,4})|device=([\w,-]+))\"?(?: |$)")
_NUMBER = re.compile(r"-?[\d.]+[kKmMgGtT]?")
_OPTIMIZATION = re.compile(r"^-O(\d)$")
#: Tokens at which a shell starts another command; redirections too.
_SHELL_ENDS = re.compile(r"[|;&].*|\d?>.*|<")


@dataclass(frozen=True)
class ServeLine:
    """A parsed command line.

    Attributes:
        model: As written, a repository or a path.
        flags: Values of the flags that are read, by name; switches are booleans.
        ignored: Flags that change neither memory, nor scheduling, nor step times.
        not_simulated: Flags and variables without an effect in the simulation, each with the reason.
        uncounted: Those of them that change the KV cache, or what is served from it.
        named: Full names of all its flags that a release has.
        served_model_names: Names by which clients know the model.
        environment: Variables assigned in front of the program, or passed to the container.
        version: Major and minor number of vLLM, from a container's tag.
        gpus: GPUs that its deployment requests, or that its container gets; None if nothing says so.
        accelerator: The card that its deployment asks for.
        written: The words of each of ``named``, as the line has them.
        patch: The third number of vLLM's version, if it is stated.
    """

    model: str
    flags: dict[str, str | bool]
    ignored: list[str] = field(default_factory=list)
    not_simulated: list[str] = field(default_factory=list)
    uncounted: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    served_model_names: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    version: Release | None = None
    gpus: int | None = None
    accelerator: str | None = None
    written: dict[str, str] = field(default_factory=dict)
    patch: int | None = None

    #: The server that it starts, its flag that sets the size of the KV cache, and when that server admits a sequence.
    server: ClassVar[str] = "vLLM"
    pool_flag: ClassVar[str] = "num-gpu-blocks-override"
    admits: ClassVar[str] = "as soon as their prompts fit"

    def changed(self, flags: Mapping[str, str | bool | None]) -> Self:
        """The line with other flags, of which None removes one."""
        kept = {name: value for name, value in self.flags.items() if name not in flags}
        return replace(self, flags=kept | {name: value for name, value in flags.items() if value is not None})

    def words(self) -> str:
        """Its flags as the user types them."""
        return " ".join(self.flag_text(name, value) for name, value in self.flags.items())

    def as_planned(self) -> ServeLine:
        """The line as a plan changes it: without a flag it takes the longest sequence that fits on each GPU."""
        return self if self.flags else replace(self, flags={"max-model-len": "auto"})

    def flag_name(self, name: str) -> str:
        """A key of ``flags`` as the user types it."""
        return f"--{name}"

    def flag_text(self, name: str, value: str | bool | None) -> str:
        """A flag with a value as the user types it; None removes the flag."""
        if value is None:
            return f"without --{name}"
        if isinstance(value, bool):
            return f"--{'' if value else 'no-'}{name}"
        return f"--{name} {value}"

    @property
    def of_other_releases(self) -> list[str]:
        """Flags that its release does not have, each with the releases that do; the newest release, if it has none."""
        return [f"--{name} ({flags()[name].range_text})" for name in self._unrecognized]

    @property
    def parser_error(self) -> str | None:
        """What the parser of the release that the line states says of flags that it does not have; None if it takes all."""
        if self.version is None or not self._unrecognized:
            return None
        return f"unrecognized arguments: {' '.join(self.written[name] for name in self._unrecognized)}"

    @property
    def _unrecognized(self) -> list[str]:
        release = self.version or releases()[-1]
        return [name for name in self.named if not flags()[name].is_of(release)]

    @property
    def uncounted_names(self) -> list[str]:
        """The flags and variables of ``uncounted`` alone, each once."""
        return list(dict.fromkeys(text.split(" ")[0].split("=")[0] for text in self.uncounted))

    @property
    def other_kernels(self) -> list[str]:
        """Flags and variables, as written, that ask for kernels which are not simulated, or may."""
        reasons = (_KERNELS,) if self.version else (_KERNELS, _OF_OLDER)
        return [
            text.partition(" (")[0]
            for text in self.not_simulated
            if text.endswith(tuple(f"({why})" for why in reasons))
        ]

    def text(self, name: str, default: str) -> str:
        """A flag's value as text, as the line has it; ``default`` if the line does not have the flag."""
        return str(self.flags.get(name, default))

    def switch(self, name: str, default: bool = False) -> bool:
        """Whether a switch is on."""
        return bool(self.flags.get(name, default))

    @overload
    def whole(self, name: str, default: int) -> int: ...

    @overload
    def whole(self, name: str, default: None = None) -> int | None: ...

    def whole(self, name: str, default: int | None = None) -> int | None:
        """A whole number; ``8k`` is 8,000 and ``8K`` is 8,192, as in vLLM.

        Raises:
            SettingError: The value is not a number, or is below 1.
        """
        if name not in self.flags:
            return default
        value = str(self.flags[name])
        number = human_readable_int(value) or 0
        if not 1 <= number <= 2**50:
            raise SettingError(f"--{name}", value, "must be a whole number of at least 1")
        return number

    def json_of(self, name: str) -> object:
        """A flag's JSON, an empty object without the flag; raises SettingError for a text that is none."""
        text = self.text(name, "{}")
        try:
            return json_value(text)
        except ValueError as error:
            raise SettingError(f"--{name}", text[:60], f"is not readable JSON ({error})") from None

    def gib_as_bytes(self, name: str) -> int:
        """A number of GiB in bytes, 0 without the flag; raises SettingError for one below 0."""
        value = self.flags.get(name, 0)
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number <= 2**20:
            raise SettingError(f"--{name}", value, "must be a number of GiB of at least 0")
        return int(number * GIB)

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


def pasted(text: str, field: str = "serve") -> str:
    """The text, or the content of the file of that name, which ``field`` gives."""
    try:
        is_file = "\n" not in text and Path(text).is_file()
    except (OSError, ValueError):
        # A long line is not a file name.
        return text
    return text_of(text, field) if is_file else text


def read_pasted(given: str, read: Callable[[str], Read]) -> Read:
    """Read a line, or the file with it or with its deployment; an error names the file.

    Raises:
        UserError: As ``read``.
    """
    text = pasted(given)
    try:
        return read(text)
    except UserError as error:
        if text is given:
            raise
        raise UserError(f"{given}: {error}") from None


def parse_serve(text: str, stated: tuple[int, ...] | None = None) -> ServeLine:
    """Read a pasted command line.

    Args:
        stated: Version of vLLM, as ``version`` reads it; None takes that of a container's tag, or the newest.

    Raises:
        SettingError: The line starts no server, has a flag that vLLM does not have, or lacks a value or the model.
    """
    gpus = accelerator = None
    if is_deployment(text):
        _, text, gpus, replicas, accelerator = deployed(text)
        if replicas is not None:
            note(
                f"The deployment starts {replicas} replicas: the answer is for one of them, and the load is what reaches that one;"
                " fragmeter simulate --num-replicas has several behind a router."
            )
    words = _with_values(_words(text))
    start = _start(words)
    environment = assigned(words[:start])
    gpus = _docker_gpus(words[:start]) if gpus is None else gpus
    tag = next(filter(None, map(_TAG.search, words[:start])), None)
    if stated is None and tag is not None:
        stated = version(tag[1])
    release = None if stated is None else (stated[0], stated[1])
    line = _Reader(until_shell(words[start:]), release).line(environment, text)
    patch = stated[2] if stated is not None and len(stated) > 2 else None
    return replace(line, version=release, patch=patch, gpus=gpus, accelerator=accelerator)


def version(text: str) -> tuple[int, ...]:
    """The numbers of a release, as ``0.16`` or ``v0.16.0``, two or three; raises SettingError for anything else."""
    found = re.fullmatch(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4})?.*)?", text)
    if found is None:
        raise SettingError("vllm", text, "must be a release, as 0.16")
    return tuple(int(number) for number in found.groups() if number is not None)


def _words(text: str) -> list[str]:
    try:
        return line_words(text)
    except ValueError as error:
        raise SettingError("serve", _short(text), f"cannot be split into words ({error}); check its quotes") from None


def _with_values(words: Sequence[str]) -> list[str]:
    """The words, with the values of variables that are assigned in words before."""
    found: list[str] = []
    environment: dict[str, str] = {}
    for word in words:
        found.append(filled(word, environment))
        environment |= assigned(found[-1:])
    return found


def _docker_gpus(words: Sequence[str]) -> int | None:
    """GPUs that ``docker run --gpus`` gives the container; None for all of them, or if it does not say."""
    given = _DOCKER_GPUS.search(" ".join(words))
    if given is None:
        return None
    return int(given[1]) if given[1] else given[2].count(",") + 1


def _start(words: Sequence[str]) -> int:
    """Index of the first argument of the server."""
    if (found := first_argument(words)) is not None:
        return found
    for place, word in enumerate(words):
        if "vllm-openai" in word and not word.startswith("-") and not ASSIGNMENT.fullmatch(word):
            # With --entrypoint vllm the image starts by the name of the command.
            return place + 1 + (list(words[place + 1 : place + 2]) == ["serve"])
    text = " ".join(words)
    said = (
        remedy(text.encode(errors="surrogateescape"), "", "serve")
        or "starts no server; paste a line with vllm serve MODEL"
    )
    raise SettingError("serve", _short(text), said)


def until_shell(words: Sequence[str]) -> list[str]:
    """The words up to the end of a command, or to a redirection."""
    found = []
    for word in words:
        if _SHELL_ENDS.fullmatch(word):
            break
        found.append(word.removesuffix(";"))
        if word.endswith(";"):
            break
    return found


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Reader:
    """Reads the arguments in one pass."""

    def __init__(self, words: list[str], release: Release | None) -> None:
        self._left, self._all = words[::-1], words
        self._release = release
        self._model: str | None = None
        #: Filled word by word.
        self._line = ServeLine("", {})
        self._flags = self._line.flags

    def line(self, environment: dict[str, str], written: str) -> ServeLine:
        """The parsed line; ``environment`` has the assignments in front of the program, ``written`` is all of it."""
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
            shown = " ".join(written.split())[:60]
            raise SettingError("serve", shown, "names no model; paste a line with vllm serve MODEL")
        self._gather_drafts()
        self._gather_attention(environment)
        self._check_experts()
        if "speculative-config" in self._flags:
            self._check_drafts(str(self._flags["speculative-config"]))
        for variable in (name for name in environment if name in VARIABLES):
            self._leave_out(f"{variable}={environment[variable]}", VARIABLES[variable], changes_memory=True)
        for variable in (name for name in environment if name in VARIABLES_OF_TIMES):
            self._leave_out(f"{variable}={environment[variable]}", VARIABLES_OF_TIMES[variable], changes_memory=False)
        return replace(self._line, model=str(model), environment=environment)

    def _flag(self, word: str) -> None:
        word = _OPTIMIZATION.sub(r"--optimization-level=\1", word)
        written, joined, value = word.partition("=")
        name, off = _resolved(written, self._release)
        if name is None:
            self._of_a_newer_release(written, joined)
            return
        if name == "config":
            self._config(value if joined else self._value(written, name))
            return
        if flags()[name].kind == "switch":
            found: str | bool = self._truth(value, joined) != off
        else:
            found = value if joined else self._value(written, name)
        self._line.named.append(name)
        self._line.written[name] = written if isinstance(found, bool) else f"{written} {found}"
        # Where it is turned off it takes no memory.
        is_off = name in CHANGES_MEMORY and found is False or found in UNCHANGED.get(name, ())
        left_out = name in NOT_SIMULATED and not is_off
        if left_out:
            self._leave_out(f"--{name}", NOT_SIMULATED[name], name in CHANGES_MEMORY)
        if name in _OBJECTS:
            self._flags[name] = self._object(name, written, str(found))
        elif name in READ or name in _DECIDE:
            self._flags[name] = found
            if name == "all2all-backend":
                # DeepEP itself computes the buffers of its kernels for few tokens.
                self._leave_out(f"--{name} {found}", "kernels with times of their own", found == "deepep_low_latency")
        elif not left_out:
            self._line.ignored.append(f"--{name}")
        if name == "served-model-name":
            self._line.served_model_names.extend(str(found).split())

    def _config(self, path: str) -> None:
        """Add the flags of a file that the line does not give; as in vLLM those of the line count."""
        given = {_resolved(word.partition("=")[0], self._release)[0] for word in self._all if word.startswith("--")}
        # Loaders before that of 0.33 leave a switch out that is false, and so at its default.
        drops_false = self._release is not None and self._release < releases()[-1]
        text = text_of(Path(path), "config")
        try:
            content = config_flags(text)
        except SettingError as error:
            raise UserError(f"{path}: {error}") from None
        for name, value in content.items():
            words = [] if value is False and drops_false else flag_words(name, value)
            if name == "model":
                self._model = self._model or str(value)
            elif words and _resolved(words[0].partition("=")[0], self._release)[0] not in given:
                self._left += reversed(words)

    def _leave_out(self, what: str, why: str, changes_memory: bool) -> None:
        text = f"{what} ({why})"
        self._line.not_simulated.append(text)
        if changes_memory:
            self._line.uncounted.append(text)

    def _of_a_newer_release(self, written: str, joined: str) -> None:
        """Leave out a flag that no release has that was read; a word after it that is no flag is its value."""
        if not joined and self._left and not self._left[-1].startswith("-"):
            self._left.pop()
        self._leave_out(written, "unknown; its releases were not read", changes_memory=True)

    def _gather_drafts(self) -> None:
        """Add ``--spec-method``, ``--spec-model`` and ``--spec-tokens`` to the object of drafts, as vLLM does."""
        for name, key in _DRAFTS.items():
            if name not in self._flags:
                continue
            known = _json_or_text(str(self._flags.get("speculative-config", "{}")))
            if not isinstance(known, dict) or key in known:
                raise SettingError(
                    f"--{name}", self._flags[name], f"excludes {key} in --speculative-config; give one of them"
                )
            self._flags["speculative-config"] = json.dumps(known | {key: _json_or_text(str(self._flags.pop(name)))})

    def _object(self, name: str, written: str, value: str) -> str:
        """A flag's JSON object, or that of all its keys up to this one (``--speculative-config.method eagle3``)."""
        _, _, key = written.partition(".")
        if not key:
            return value
        known = _json_or_text(str(self._flags.get(name, "{}")))
        if not isinstance(known, dict):
            raise SettingError(f"--{name}", known, "is no JSON object, so that no key can be added to it")
        return json.dumps(_with_key(known, key.split("."), _json_or_text(value)))

    def _gather_attention(self, environment: Mapping[str, str]) -> None:
        """Make one flag of all that names the backend of attention; what is not simulated is named."""
        config = _json_or_text(str(self._flags.pop("attention-config", "{}")))
        others = dict(config) if isinstance(config, dict) else {"attention-config": config}
        asked = {
            "--attention-config.backend": others.pop("backend", None),
            "--attention-backend": self._flags.pop("attention-backend", None),
        }
        by_variable = environment.get(_VARIABLE)
        if self._release is not None and self._release <= _LAST_BY_VARIABLE:
            asked[_VARIABLE] = by_variable
        elif by_variable is not None:
            self._leave_out(f"{_VARIABLE}={by_variable}", _OF_OLDER, changes_memory=False)
        for what, name in asked.items():
            try:
                found = None if name is None else named_backend(str(name))
            except SettingError:
                self._leave_out(f"{what} {name}", _KERNELS, changes_memory=False)
                continue
            if found is not None:
                self._flags["attention-backend"] = found
        if others:
            self._leave_out("--attention-config", _KERNELS, changes_memory=False)

    def _check_experts(self) -> None:
        """Name kernels of experts that are not simulated."""
        name = self._flags.pop("moe-backend", None)
        try:
            found = None if name is None else named_experts(str(name))
        except SettingError:
            self._leave_out(f"--moe-backend {name}", _KERNELS, changes_memory=False)
            return
        if found is not None:
            self._flags["moe-backend"] = found

    def _check_drafts(self, text: str) -> None:
        """Name drafts of methods that are not simulated; with rates that vLLM refuses no server starts."""
        try:
            parse_speculative(text, needs_rates=False)
        except SettingError as error:
            _, _, key = error.field.partition(".")
            if not key or key in ACCEPTANCE_KEYS:
                raise
            del self._flags["speculative-config"]
            self._leave_out("--speculative-config", f"{key} {error.value!r} {error.remedy}", changes_memory=True)

    def _truth(self, value: str, joined: str) -> bool:
        if not joined and self._left and self._left[-1].lower() in ("true", "false"):
            value = self._left.pop()
        return value.lower() != "false"

    def _value(self, written: str, name: str) -> str:
        values = []
        while self._left and (not self._left[-1].startswith("-") or _NUMBER.fullmatch(self._left[-1])):
            values.append(self._left.pop())
            if flags()[name].kind != "values" and name not in _MANY:
                break
        if not values:
            raise SettingError("serve", written, "needs a value")
        return " ".join(values)


def _with_key(known: dict[str, object], path: Sequence[str], value: object) -> dict[str, object]:
    key, *rest = path
    inner = known.get(key)
    return known | {key: _with_key(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def _json_or_text(value: str) -> object:
    try:
        return json_value(value)
    except ValueError:
        return value


def _resolved(written: str, release: Release | None) -> tuple[str | None, bool]:
    """The flag's full name, and whether ``--no-`` or ``--disable-`` turns it off; None for one of a release that was not read.

    Raises:
        UserError: No release of vLLM has it.
    """
    bare = written.lstrip("-").split(".", 1)[0]
    name = bare.replace("_", "-")
    name = spellings().get(name, name)
    known = flags()
    if name in known:
        return name, False
    for prefix, positive in (("no-", ""), ("disable-", "enable-"), ("enable-", "disable-")):
        turned = positive + name.removeprefix(prefix)
        if name.startswith(prefix) and turned in known and known[turned].kind == "switch":
            return turned, True
    # As argparse has it, a flag may be shortened as far as it stays unique in its release.
    longer = [each for each in known if each.startswith(name)]
    longer = [each for each in longer if known[each].is_of(release or releases()[-1])] or longer
    if written.startswith("--") and len(longer) == 1:
        return longer[0], False
    if release is not None and release > releases()[-1]:
        return None, False
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean --{near[0]}?" if near else ""
    raise UserError(
        f"{written}: no release of vLLM from {text_of_release(releases()[0])} to {text_of_release(releases()[-1])} has it{meant}"
    )
