"""Parser of a pasted line of SGLang's server: ``python -m sglang.launch_server``, ``sglang serve``, or a container of its image.

``facts/flags.json`` has all flags of one release by how many values follow them, as ``tests/real_sglang/flags.py`` writes it. Other words
are refused, as by SGLang's ``argparse``, which also takes ``--flag=value`` and flags that are shortened as far as they stay unique.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...sim.types.bounds import human_readable_int
from ...sim.types.errors import SettingError
from ..vllm_serve.deployments import is_deployment
from ..vllm_serve.line import until_shell
from ..vllm_serve.shell import assigned, filled, line_words, split

_MODULE = "sglang.launch_server"
#: Of a ``bash -c``.
_SCRIPT = re.compile(r"-m\s+sglang\.launch_server\b|\bsglang\s+serve\b")
#: Settings of ``simulate`` by the flags that give them, under every spelling.
_READ = {
    "model": ("--model-path", "--model"),
    "tensor_parallel_size": ("--tp-size", "--tensor-parallel-size"),
    "pipeline_parallel_size": ("--pp-size", "--pipeline-parallel-size"),
    "mem_fraction_static": ("--mem-fraction-static",),
    "max_num_batched_tokens": ("--chunked-prefill-size",),
    "max_num_seqs": ("--max-running-requests",),
    "block_size": ("--page-size",),
    "slots": ("--max-total-tokens",),
    "max_model_len": ("--context-length",),
    "schedule_policy": ("--schedule-policy",),
    "quantization": ("--quantization",),
    "kv_cache_dtype": ("--kv-cache-dtype",),
    "enable_prefix_caching": ("--disable-radix-cache",),
    "enforce_eager": ("--disable-cuda-graph",),
    "disable_overlap_schedule": ("--disable-overlap-schedule",),
    "enable_priority_scheduling": ("--enable-priority-scheduling",),
    "schedule_low_priority_values_first": ("--schedule-low-priority-values-first",),
    "disable_priority_preemption": ("--disable-priority-preemption",),
    "priority_scheduling_preemption_threshold": ("--priority-scheduling-preemption-threshold",),
    "retraction_policy": ("--retraction-policy",),
    "swa_full_tokens_ratio": ("--swa-full-tokens-ratio",),
    "disable_hybrid_swa_memory": ("--disable-hybrid-swa-memory",),
    "enable_hierarchical_cache": ("--enable-hierarchical-cache",),
    "hicache_ratio": ("--hicache-ratio",),
    "hicache_size": ("--hicache-size",),
    "hicache_write_policy": ("--hicache-write-policy",),
}
_BY_FLAG = {spelling: name for name, spellings in _READ.items() for spelling in spellings}
_WHOLE = frozenset(
    """
    tensor_parallel_size pipeline_parallel_size max_num_batched_tokens max_num_seqs block_size slots max_model_len
    priority_scheduling_preemption_threshold hicache_size
    """.split()
)
#: Formats by SGLang's names; a name that is missing is not simulated.
_WEIGHTS = {"awq_marlin": "awq", "gptq_marlin": "gptq", "w8a8_int8": "int8", "w8a8_fp8": "fp8", "modelopt_fp4": "nvfp4"}
_WEIGHTS |= {name: name for name in ("awq", "gptq", "fp8")}
_CACHE = {"auto": "auto", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bf16": "bf16", "bfloat16": "bf16"}
#: What changes memory or decisions and is not simulated.
_NOT_SIMULATED = {
    "--dp-size": "replicas", "--data-parallel-size": "replicas", "--enable-dp-attention": "attention by ranks", "--ep-size": "experts by ranks",
    "--expert-parallel-size": "experts by ranks", "--speculative-algorithm": "drafts", "--enable-mixed-chunk": "decodes beside prefills",
    "--hicache-storage-backend": "a store behind the host", "--hicache-host-memory-mode": "another use of the host", "--hicache-io-backend": "copies of another speed", "--disaggregation-mode": "prefills elsewhere", "--cpu-offload-gb": "weights on the host",
    "--schedule-conservativeness": "another share of outputs", "--max-prefill-tokens": "another input of a prefill",
    "--prefill-max-requests": "a bound on prefills", "--radix-eviction-policy": "another order of eviction", "--enable-lora": "adapters",
    "--lora-paths": "adapters", "--attention-backend": "kernels, and the page size that they need",
    "--dtype": "another number format", "--enable-unified-memory": "one pool of bytes", "--prefill-decode-interval": "decodes between prefills",
    "--max-queued-requests": "rejected requests", "--cuda-graph-max-bs-decode": "another largest graph",
    "--disable-chunked-prefix-cache": "other kernels", "--dcp-size": "caches by ranks", "--attn-cp-size": "caches by ranks",
    "--nnodes": "several machines",
}  # fmt: skip
_FLAGS = Path(__file__).with_name("facts") / "flags.json"


@dataclass(frozen=True)
class SGLangLine:
    """A parsed line.

    Attributes:
        settings: Settings of ``simulate`` that its flags give; ``slots`` is ``--max-total-tokens``.
        not_simulated: Flags that change memory or decisions and are not simulated, each with the reason.
        ignored: All others.
        refused: The error of SGLang's parser for each word that it does not take.
    """

    settings: dict[str, Any]
    not_simulated: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def sglang_arguments(words: list[str]) -> int | None:
    """Index of the first argument of the server; None where the words start none."""
    for place, (word, after) in enumerate(pairwise(words)):
        if word == "-m" and after == _MODULE or word.rsplit("/", 1)[-1] == "sglang" and after == "serve":
            return place + 2
    return None


def read_sglang(text: str) -> SGLangLine | None:
    """A line of SGLang's server; None of any other program.

    Raises:
        SettingError: It names no model, a flag lacks its value, or a value is none of its flag.
    """
    try:
        words = [] if is_deployment(text) else line_words(text)
        words = [each for word in words for each in (split(word) if _SCRIPT.search(word) else [word])]
    except ValueError:
        return None
    start = sglang_arguments(words)
    if start is None:
        return None
    environment = assigned(words[:start])
    left = [filled(word, environment) for word in until_shell(words[start:])][::-1]
    line = SGLangLine({})
    # ``sglang serve MODEL``.
    if left and not left[-1].startswith("-"):
        line.settings["model"] = left.pop()
    unknown: list[str] = []
    while left:
        word = left.pop()
        flag, joined, value = word.partition("=")
        meant = _meant(flag)
        if len(meant) > 1:
            line.refused.append(f"ambiguous option: {flag} could match {', '.join(meant)}")
        if len(meant) != 1:
            unknown += [word] if not meant else []
            continue
        found = meant[0]
        values = [value] if joined else _following(found, left)
        if (name := _BY_FLAG.get(found)) is not None:
            line.settings[name] = _value(name, found, values)
        elif found in _NOT_SIMULATED:
            line.not_simulated.append(f"{found} ({_NOT_SIMULATED[found]})")
        else:
            line.ignored.append(found)
    if unknown:
        line.refused.append(f"unrecognized arguments: {' '.join(unknown)}")
    if "model" not in line.settings:
        remedy = "names no model; paste a line with python -m sglang.launch_server --model-path NAME"
        raise SettingError("serve", " ".join(text.split())[:60], remedy)
    return line


def _meant(word: str) -> list[str]:
    """The flags that a word may be, shortened or not."""
    if word in _values():
        return [word]
    return sorted(name for name in _values() if name.startswith(word)) if word.startswith("--") else []


def _following(flag: str, left: list[str]) -> list[str]:
    """Take the values of a flag from the words that are left, in reverse.

    Raises:
        SettingError: It lacks its value.
    """
    number = _values()[flag]
    found: list[str] = []
    most = int(number) if number.isdigit() else {"?": 1}.get(number, len(left))
    while left and len(found) < most and (not left[-1].startswith("-") or re.fullmatch(r"-\d[\d.]*", left[-1])):
        found.append(left.pop())
    if len(found) < (int(number) if number.isdigit() else int(number == "+")):
        raise SettingError("serve", flag, "lacks its value")
    return found


def _value(name: str, flag: str, values: list[str]) -> Any:
    """The setting of a flag.

    Raises:
        SettingError: The value is none of the flag, or is not simulated.
    """
    if _values()[flag] == "0":
        return name != "enable_prefix_caching"
    text = values[0]
    if name in _WHOLE:
        number = human_readable_int(text)
        least = 0 if name in ("priority_scheduling_preemption_threshold", "hicache_size") else 1
        if number is None or number < least:
            raise SettingError(flag, text, f"must be a whole number from {least} on to be simulated")
        return number
    if name in ("mem_fraction_static", "swa_full_tokens_ratio", "hicache_ratio"):
        try:
            return float(text)
        except ValueError:
            raise SettingError(flag, text, "must be a number, such as 0.85") from None
    known: Mapping[str, str] = {"quantization": _WEIGHTS, "kv_cache_dtype": _CACHE}.get(name, {text: text})
    if text not in known:
        raise SettingError(flag, text, f"is not simulated; one of {', '.join(known)}")
    return known[text]


@cache
def _facts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FLAGS.read_text("utf-8"))
    return found


@cache
def _values() -> dict[str, str]:
    """How many values follow each flag: a number, or as ``argparse`` writes it."""
    return {name: number for number, names in _facts()["values"].items() for name in names.split()}


def release_of_flags() -> str:
    """The release of which the flags are."""
    return str(_facts()["of"])
