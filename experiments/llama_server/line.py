"""Parser of a pasted ``llama-server`` line, or of a container of its image; names and defaults are those of ``common/arg.cpp``.

``facts/flags.json`` has all arguments of one build by how many values follow them, as ``tests/real_llama_cpp/flags.py`` writes it. Other
words are refused, as by that build (``common_params_parse_ex``); it knows no ``--flag=value``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ...sim.spec import ModelSpec, model, model_names
from ...sim.spec.repositories import nearest
from ...sim.spec.stored import stored_names
from ...sim.types.errors import SettingError
from ..vllm_serve.deployments import is_deployment
from ..vllm_serve.line import until_shell
from ..vllm_serve.shell import assigned, filled, line_words, split
from .gguf import CACHE_BITS, quantization_in

_PROGRAM = re.compile(r"(?:^|[\\/])llama-server(?:\.exe)?$")
#: Of a ``bash -c``.
_SCRIPT = re.compile(r"llama-server(?:\.exe)?\s")
_IMAGE = re.compile(r"(?:^|/)llama\.cpp:server")
#: Flags that are read, by every spelling, with the variable of the environment that sets each.
_READ = {
    "model": ("-m", "--model"), "repository": ("-hf", "-hfr", "--hf-repo"), "file": ("-hff", "--hf-file"),
    "ctx-size": ("-c", "--ctx-size"), "parallel": ("-np", "--parallel"), "batch-size": ("-b", "--batch-size"),
    "ubatch-size": ("-ub", "--ubatch-size"), "cache-type-k": ("-ctk", "--cache-type-k"), "cache-type-v": ("-ctv", "--cache-type-v"),
    "flash-attn": ("-fa", "--flash-attn"), "gpu-layers": ("-ngl", "--gpu-layers", "--n-gpu-layers"), "fit": ("-fit", "--fit"),
}  # fmt: skip
_VARIABLES = {
    "LLAMA_ARG_MODEL": "model", "LLAMA_ARG_HF_REPO": "repository", "LLAMA_ARG_HF_FILE": "file", "LLAMA_ARG_CTX_SIZE": "ctx-size",
    "LLAMA_ARG_N_PARALLEL": "parallel", "LLAMA_ARG_BATCH": "batch-size", "LLAMA_ARG_UBATCH": "ubatch-size",
    "LLAMA_ARG_CACHE_TYPE_K": "cache-type-k", "LLAMA_ARG_CACHE_TYPE_V": "cache-type-v", "LLAMA_ARG_FLASH_ATTN": "flash-attn",
    "LLAMA_ARG_N_GPU_LAYERS": "gpu-layers", "LLAMA_ARG_FIT": "fit",
}  # fmt: skip
_SWITCHES = {
    "-kvu": ("kv-unified", True), "--kv-unified": ("kv-unified", True), "-no-kvu": ("kv-unified", False),
    "--no-kv-unified": ("kv-unified", False), "-nkvo": ("kv-offload", False), "--no-kv-offload": ("kv-offload", False),
    "-kvo": ("kv-offload", True), "--kv-offload": ("kv-offload", True), "--swa-full": ("swa-full", True),
    "--cache-prompt": ("cache-prompt", True), "--no-cache-prompt": ("cache-prompt", False),
}  # fmt: skip
#: What takes memory, or moves it, and is not counted.
_UNCOUNTED = {
    "-mm": "the projector of images", "--mmproj": "the projector of images", "-md": "a drafter", "--model-draft": "a drafter",
    "-cmoe": "experts on the host", "--cpu-moe": "experts on the host", "-ncmoe": "experts on the host",
    "--n-cpu-moe": "experts on the host", "-ot": "tensors elsewhere", "--override-tensor": "tensors elsewhere",
    "-ts": "several GPUs", "--tensor-split": "several GPUs", "--lora": "an adapter", "--lora-scaled": "an adapter",
    "--spec-draft-model": "a drafter", "-hfd": "a drafter", "--hf-repo-draft": "a drafter", "--spec-draft-hf": "a drafter",
    "-mmu": "the projector of images", "--mmproj-url": "the projector of images", "-ncffn": "layers on the host",
    "--n-cpu-ffn": "layers on the host", "--rpc": "other machines", "--kv-unified-per-slot": "another context",
    "-fitt": "another margin of --fit", "--fit-target": "another margin of --fit", "-fitc": "another least context of --fit",
    "--fit-ctx": "another least context of --fit",
}  # fmt: skip
_BY_KEY = {spelling: name for name, spellings in _READ.items() for spelling in spellings}
_NUMBER = re.compile(r"-\d+")
_FLAGS = Path(__file__).with_name("facts") / "flags.json"
#: Of a file of several parts, and of a repository.
_ENDINGS = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$|-gguf$", re.IGNORECASE)
#: Slots where ``--parallel`` is not given; they share one cache.
AUTO_SLOTS = 4


@dataclass(frozen=True)
class LlamaLine:
    """A parsed line.

    Attributes:
        name: Model file or repository, as written.
        values: Values of the flags that are read, by name.
        switches: Switches that are given.
        uncounted: Flags that take or move memory and are not counted, each with the reason.
        ignored: All others.
        refused: llama-server's error for each word that it does not take.
    """

    name: str
    values: dict[str, str]
    switches: dict[str, bool]
    uncounted: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def whole(self, name: str, default: int, least: int = 0) -> int:
        """A whole number; negative and ``auto`` are the default.

        Raises:
            SettingError: It is none, or less than ``least``.
        """
        text = self.values.get(name, "auto")
        if text in ("auto", "all", "-1"):
            return default
        if not text.isascii() or not text.isdigit() or not least <= int(text) < 2**31:
            raise SettingError(f"--{name}", text, f"must be a whole number of at least {least}")
        return int(text)

    @property
    def ctx_size(self) -> int | None:
        """Tokens of the context; 0 is the model's length, which ``--fit`` does not lower, as it does where nothing is given."""
        return None if self.values.get("ctx-size", "-1") in ("auto", "-1") else self.whole("ctx-size", 0)

    @property
    def slots(self) -> int:
        return self.whole("parallel", AUTO_SLOTS, 1)

    @property
    def kv_unified(self) -> bool:
        """Whether all slots share one cache: by default only where their number is left to the server."""
        return self.switches.get("kv-unified", self.values.get("parallel", "-1") in ("-1", "auto"))

    @property
    def fits(self) -> bool:
        """Whether what is not given is lowered until it fits (``--fit``)."""
        return self.values.get("fit", "on") not in ("off", "0", "false")

    @property
    def flash_attention(self) -> bool:
        return self.values.get("flash-attn", "auto") not in ("off", "0", "false", "disabled")

    def cache_type(self, which: str) -> str:
        """``--cache-type-k`` or ``-v``.

        Raises:
            SettingError: llama.cpp has no such type, or V needs flash attention.
        """
        found = self.values.get(f"cache-type-{which}", "f16")
        if found not in CACHE_BITS:
            raise SettingError(f"--cache-type-{which}", found, f"one of {', '.join(CACHE_BITS)}")
        if which == "v" and CACHE_BITS[found] < 16 and not self.flash_attention:
            raise SettingError(
                "--cache-type-v", found, "needs flash attention: llama-server does not start with -fa off"
            )
        return found

    def quantization(self) -> str:
        """Of the weights, by the name of the file.

        Raises:
            SettingError: The name has none.
        """
        found = self._parts()[1]
        if found is None:
            remedy = "names no quantisation; name the file as llama-quantize does, such as MODEL-Q4_K_M.gguf"
            raise SettingError("--model", self.name, remedy)
        return found

    def model(self, given: str | None) -> ModelSpec:
        """The shape: of the given model, or of the one that the file is named after.

        Raises:
            SettingError: No model is named so.
        """
        if given is not None:
            return model(given)
        bare = self._parts()[0]
        known = nearest(bare, [*model_names(), *stored_names()])
        if known is None:
            raise SettingError(
                "--model", self.name, "is the name of no known model; give its shape by --model NAME or FOLDER"
            )
        return model(known)

    def _parts(self) -> tuple[str, str | None]:
        bare, _, tag = self.name.partition(":") if "repository" in self.values else (self.name, "", "")
        stem = _ENDINGS.sub("", re.split(r"[\\/]", bare)[-1])
        name, found = quantization_in(stem)
        file = _ENDINGS.sub("", self.values.get("file", ""))
        # llama-server takes Q4_K_M from a repository that is named alone.
        by_default = "Q4_K_M" if "repository" in self.values else None
        return name, tag.upper() or quantization_in(file)[1] or found or by_default


def llama_arguments(words: list[str]) -> int | None:
    """Index of the first argument of llama-server; None where the words start none."""
    for place, word in enumerate(words):
        if _PROGRAM.search(word) or (_IMAGE.search(word) and not any(map(_PROGRAM.search, words[place:]))):
            return place + 1
    return None


def read_llama(text: str) -> LlamaLine | None:
    """A line of llama-server; None of any other program.

    Raises:
        SettingError: It names no model, or a flag lacks its value.
    """
    try:
        words = [] if is_deployment(text) else line_words(text)
        words = [each for word in words for each in (split(word) if _SCRIPT.search(word) else [word])]
    except ValueError:
        return None
    start = llama_arguments(words)
    if start is None:
        return None
    environment = assigned(words[:start])
    values = {_VARIABLES[name]: value for name, value in environment.items() if name in _VARIABLES}
    switches: dict[str, bool] = {}
    uncounted: list[str] = []
    ignored: list[str] = []
    refused: list[str] = []
    left = [filled(word, environment) for word in until_shell(words[start:])][::-1]
    while left:
        word = left.pop()
        flag, joined, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        follows = bool(left) and (not left[-1].startswith("-") or bool(_NUMBER.fullmatch(left[-1])))
        if (error := _refused(flag, word)) is not None:
            refused.append(error)
        if flag in _SWITCHES:
            name, on = _SWITCHES[flag]
            switches[name] = on
        elif flag in _BY_KEY:
            if not joined and not follows and flag not in _READ["flash-attn"]:
                raise SettingError("serve", flag, "lacks its value")
            values[_BY_KEY[flag]] = value if joined else left.pop() if follows else "on"
        elif flag.startswith("-"):
            if flag in _UNCOUNTED:
                uncounted.append(f"{flag} ({_UNCOUNTED[flag]})")
            elif flag in _values():
                ignored.append(flag)
            for _ in range(0 if joined else _values().get(flag, int(follows))):
                left[-1:] = []
    named = values.get("model") or values.get("repository")
    if not named:
        raise SettingError(
            "serve", " ".join(text.split())[:60], "names no model; paste a line with llama-server -m FILE.gguf"
        )
    return LlamaLine(named, values, switches, uncounted, ignored, refused)


@cache
def _arguments() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FLAGS.read_text("utf-8"))
    return found


@cache
def _values() -> dict[str, int]:
    """How many values follow each argument."""
    return {name: int(number) for number, names in _arguments()["values"].items() for name in names.split()}


def build_of_flags() -> str:
    """The build of which the arguments are."""
    return str(_arguments()["of"])


def _refused(flag: str, word: str) -> str | None:
    """llama-server's error for a word in place of an argument; None for one that it has."""
    if (advice := _arguments()["removed"].get(flag)) is not None:
        return f'error while handling argument "{flag}": the argument has been removed. {advice}'
    if flag in _values() and "=" not in word:
        return None
    spaced = f"; write {flag} {word.partition('=')[2]}" if flag in _values() else ""
    return f"error: invalid argument: {word}{spaced}"
