"""Parser of a pasted line of SGLang's server: ``python -m sglang.launch_server``, ``sglang serve``, or a container of its image.

``facts/flags.json`` has all flags of one release by how many values follow them, as ``tests/real_sglang/flags.py`` writes it. Other words
are refused, as by SGLang's ``argparse``, which also takes ``--flag=value`` and flags that are shortened as far as they stay unique; in a
container of another release an unknown flag is named, as in a line of a vLLM that is newer than all that were read.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...sim.policy.options import either
from ...sim.types.bounds import human_readable_int
from ...sim.types.errors import SettingError, UserError
from ..vllm_serve.deployments import is_deployment
from ..vllm_serve.line import ServeLine, until_shell
from ..vllm_serve.shell import assigned, filled, line_words, split

_MODULE = "sglang.launch_server"
#: Of a ``bash -c``.
_SCRIPT = re.compile(r"-m\s+sglang\.launch_server\b|\bsglang\s+serve\b")
#: The flags that are read, by the settings of ``simulate`` that they give; or by ``LINE_ALONE``, what is no setting of a replica.
_READ = {
    "model": "--model-path",
    "tensor_parallel_size": "--tp-size",
    "pipeline_parallel_size": "--pp-size",
    "mem_fraction_static": "--mem-fraction-static",
    "max_num_batched_tokens": "--chunked-prefill-size",
    "max_num_seqs": "--max-running-requests",
    "block_size": "--page-size",
    "max_total_tokens": "--max-total-tokens",
    "max_model_len": "--context-length",
    "schedule_policy": "--schedule-policy",
    "quantization": "--quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "enable_prefix_caching": "--disable-radix-cache",
    "enforce_eager": "--disable-cuda-graph",
    "disable_overlap_schedule": "--disable-overlap-schedule",
    "enable_priority_scheduling": "--enable-priority-scheduling",
    "schedule_low_priority_values_first": "--schedule-low-priority-values-first",
    "disable_priority_preemption": "--disable-priority-preemption",
    "priority_scheduling_preemption_threshold": "--priority-scheduling-preemption-threshold",
    "retraction_policy": "--retraction-policy",
    "swa_full_tokens_ratio": "--swa-full-tokens-ratio",
    "disable_hybrid_swa_memory": "--disable-hybrid-swa-memory",
    "mamba_radix_cache_strategy": "--mamba-radix-cache-strategy",
    "mamba_track_interval": "--mamba-track-interval",
    "mamba_full_memory_ratio": "--mamba-full-memory-ratio",
    "max_mamba_cache_size": "--max-mamba-cache-size",
    "mamba_ssm_dtype": "--mamba-ssm-dtype",
    "enable_unified_memory": "--enable-unified-memory",
    "enable_hierarchical_cache": "--enable-hierarchical-cache",
    "hicache_ratio": "--hicache-ratio",
    "hicache_size": "--hicache-size",
    "hicache_write_policy": "--hicache-write-policy",
    "attention_kernels": "--attention-backend",
    "dp_size": "--dp-size",
}
_BY_FLAG = {flag: name for name, flag in _READ.items()}
_WHOLE = frozenset(
    """
    tensor_parallel_size pipeline_parallel_size max_num_batched_tokens max_num_seqs block_size max_total_tokens max_model_len
    priority_scheduling_preemption_threshold mamba_track_interval max_mamba_cache_size hicache_size dp_size
    """.split()
)
_SHARES = frozenset({"mem_fraction_static", "swa_full_tokens_ratio", "mamba_full_memory_ratio", "hicache_ratio"})
#: Formats by SGLang's names; a name that is missing is not simulated.
_WEIGHTS = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "w8a8_int8": "int8",
    "w8a8_fp8": "fp8",
    "modelopt_fp8": "fp8",
    "modelopt_fp4": "nvfp4",
}
_WEIGHTS |= {name: name for name in ("awq", "gptq", "fp8")}
_STATES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_STRATEGIES = {name: name for name in ("auto", "no_buffer", "extra_buffer")}
_CACHE = {"auto": "auto", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bf16": "bf16", "bfloat16": "bf16"}
_FORMATS: dict[str, dict[str, str]] = {
    "schedule_policy": {name: name for name in ("fcfs", "lpm", "lof")},
    "hicache_write_policy": {name: name for name in ("write_through", "write_through_selective")},
    "quantization": _WEIGHTS,
    "kv_cache_dtype": _CACHE,
    "mamba_ssm_dtype": _STATES,
    "mamba_radix_cache_strategy": _STRATEGIES,
}
#: What changes memory or decisions and is not simulated, by what it is.
_APART = {
    "attention by ranks": "--enable-dp-attention --attn-dp-size --attn-cp-size --dcp-size --enable-prefill-cp --enable-dp-lm-head",
    "experts by ranks": "--ep-size --moe-a2a-backend --moe-dp-size --moe-dense-tp-size --dwdp-size --enable-eplb --ep-num-redundant-experts",
    "several machines": "--nnodes",
    "drafts": "--speculative-algorithm",
    "tokens by diffusion": "--dllm-algorithm",
    "decodes beside prefills": "--enable-mixed-chunk --enable-pdmux",
    "decodes between prefills": "--prefill-decode-interval",
    "prefills that wait": "--enable-prefill-delayer --min-free-slots-delay",
    "a bound on prefills": "--prefill-max-requests",
    "another input of a prefill": "--max-prefill-tokens --enable-dynamic-chunking",
    "prefills elsewhere": "--disaggregation-mode",
    "another pipeline": "--pp-max-micro-batch-size --pp-async-batch-depth --enable-two-batch-overlap",
    "another look at arrivals": "--scheduler-recv-interval --num-continuous-decode-steps",
    "another share of outputs": "--schedule-conservativeness",
    "another order of eviction": "--radix-eviction-policy",
    "another dispatch": "--load-balance-method",
    "rejected requests": "--max-queued-requests",
    "adapters": "--enable-lora --lora-paths",
    "a store behind the host": "--hicache-storage-backend",
    "another use of the host": "--hicache-host-memory-mode --hicache-host-memory-fraction",
    "copies of another speed": "--hicache-io-backend",
    "another cache": "--enable-lmcache --enable-flexkv --enable-hisparse --enable-unified-cache-external-linker --radix-cache-backend"
    " --enable-session-radix-cache --enable-streaming-session --prefill-only-disable-kv-cache --swa-prefix-tails",
    "another layout of the cache": "--enable-page-major-kv-layout --enable-kv-cache-sharding",
    "a bound on states of a path": "--mamba-max-states-per-path",
    "states of the tree in int8": "--enable-int8-mamba-checkpoint",
    "another strategy of states": "--linear-attn-backend --enable-linear-replayssm",
    "weights on the host": "--cpu-offload-gb --offload-group-size --ple-offload-embedding --kt-num-gpu-experts --enable-paged-experts",
    "kernels, and the page size that they need": "--prefill-attention-backend --decode-attention-backend --enable-deterministic-inference",
    "other kernels": "--disable-chunked-prefix-cache",
    "other graphs, and the memory that they take": "--cuda-graph-max-bs-decode --cuda-graph-max-bs-prefill --cuda-graph-bs-decode"
    " --cuda-graph-bs-prefill --disable-decode-cuda-graph --disable-prefill-cuda-graph --cuda-graph-backend-prefill"
    " --cuda-graph-backend-decode --cuda-graph-config",
    "another share of the memory": "--language-only --language-model-only --enable-multimodal --enable-symm-mem",
    "another number format": "--dtype --modelopt-quant --quantize-and-serve",
    "another configuration of the model": "--json-model-override-args --model-impl",
    "a server that generates nothing": "--is-embedding --encoder-only",
    "arguments of a file": "--config",
}
_NOT_SIMULATED = {flag: reason for reason, flags in _APART.items() for flag in flags.split()}
#: The flags that a line is read for.
NAMED = frozenset(_READ.values()) | frozenset(_NOT_SIMULATED)
#: What a line says that no setting of a replica does: slots that its memory may have, kernels by which its pages are, replicas.
LINE_ALONE = ("max-total-tokens", "attention-kernels", "dp-size")
#: A value that ``argparse`` takes, and the scheduler does not know.
_NO_START = {
    "--schedule-policy": (
        "priority",
        "ends SGLang's start (Unknown schedule_policy); give --enable-priority-scheduling",
    )
}
#: Values that change neither memory nor decisions, beside the defaults.
_ALIKE = {
    "--dtype": ("half", "float16", "bfloat16"),
    "--load-balance-method": ("round_robin",),
    "--model-impl": ("sglang",),
}
_FLAGS = Path(__file__).with_name("facts") / "flags.json"
#: Those that are off with a value of ``_OFF``; of others SGLang logs what it resolved as if it were given.
_LOGGED = (
    "--enable-dp-attention", "--ep-size", "--speculative-algorithm", "--enable-mixed-chunk",
    "--disaggregation-mode", "--cpu-offload-gb", "--enable-lora", "--nnodes",
)  # fmt: skip
_OFF = (None, False, 0, 1, "null")
#: A container's tag.
_TAG = re.compile(r"lmsysorg/sglang:v?(\d{1,4}\.\d{1,4}\.\d{1,4}\w*)")
#: Flags of no value by the setting that they turn off.
_TURN_OFF = ("enable_prefix_caching",)


@dataclass(frozen=True)
class SGLangLine(ServeLine):
    """A parsed line. Its ``flags`` have the names of the settings of ``simulate``, as those of vLLM's lines do, with dashes, and those of
    ``LINE_ALONE``."""

    server = "SGLang"
    pool_flag = "max-total-tokens"
    admits = "as soon as their prompts and a share of their outputs fit"

    def words(self) -> str:
        """See ``ServeLine``; a flag without a value is left out where it is off."""
        given = (self.flag_text(name, value) for name, value in self.flags.items())
        return " ".join(each for each in given if each.startswith("--"))

    def as_planned(self) -> SGLangLine:
        """See ``ServeLine``; SGLang starts with a pool that is smaller than its longest sequence."""
        return self

    def flag_name(self, name: str) -> str:
        """See ``ServeLine``."""
        return _READ[name.replace("-", "_")]

    def flag_text(self, name: str, value: str | bool | None) -> str:
        """See ``ServeLine``."""
        setting, flag = name.replace("-", "_"), self.flag_name(name)
        if value is None:
            return f"without {flag}"
        if isinstance(value, bool):
            return flag if value != (setting in _TURN_OFF) else f"without {flag}"
        known = _FORMATS.get(setting, {value: value})
        return f"{flag} {value if value in known else next(name for name, own in known.items() if own == value)}"


def words_of(arguments: Mapping[str, Any]) -> list[str]:
    """The words of the flags that are read, or named as not simulated, from the ``ServerArgs`` that SGLang logs at its start."""
    found = []
    for flag in (*_READ.values(), *_LOGGED):
        value = arguments.get(flag.removeprefix("--").replace("-", "_"))
        if value is True:
            found.append(flag)
        elif flag == "--attention-backend" and str(value) not in _facts()["choices"][flag].split():
            # Of another release.
            continue
        elif value not in _OFF:
            found += [flag, str(value)]
    return found


def settings_of_flags() -> dict[str, str]:
    """The flags that are read, by the setting that each gives."""
    return dict(_READ)


def sglang_arguments(words: list[str]) -> int | None:
    """Index of the first argument of the server; None where the words start none."""
    for place, (word, after) in enumerate(pairwise(words)):
        if word == "-m" and after == _MODULE or word.rsplit("/", 1)[-1] == "sglang" and after == "serve":
            return place + 2
    return None


def read_sglang(text: str) -> SGLangLine | None:
    """A line of SGLang's server; None of any other program.

    Raises:
        UserError: It names no model, has a flag that SGLang does not have, a flag lacks its value, or a value is none of its flag.
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
    # ``sglang serve MODEL``.
    model = left.pop() if left and not left[-1].startswith("-") else None
    line = SGLangLine("", {}, environment=environment)
    tag = next(filter(None, map(_TAG.search, words[:start])), None)
    other_release = None if tag is None or tag[1] == release_of_flags().split()[-1] else tag[1]
    while left:
        word = left.pop()
        if not word.startswith("-"):
            raise SettingError("serve", word, "is neither a flag nor the value of one; one model is served")
        flag, joined, value = word.partition("=")
        found = _meant(flag, other_release)
        if found is None:
            if not joined and left and not left[-1].startswith("-"):
                left.pop()
            line.not_simulated.append(f"{flag} (unknown; the flags of {other_release} were not read)")
            continue
        values = [value] if joined else _following(found, left)
        if (name := _BY_FLAG.get(found)) is not None:
            read = _value(name, found, values)
            line.flags[name.replace("_", "-")] = read if isinstance(read, bool) else str(read)
        elif found in _NOT_SIMULATED and not _is_default(found, values):
            line.not_simulated.append(f"{found} ({_NOT_SIMULATED[found]})")
        elif found == "--served-model-name":
            line.served_model_names.extend(values)
        else:
            line.ignored.append(found)
    model = str(line.flags.pop("model", model or ""))
    if any(each.startswith("--enable-dp-attention ") for each in line.not_simulated):
        # These ranks share the GPUs.
        line.flags.pop("dp-size", None)
    if not model:
        remedy = "names no model; paste a line with python -m sglang.launch_server --model-path NAME"
        raise SettingError("serve", " ".join(text.split())[:60], remedy)
    return replace(line, model=model, uncounted=line.not_simulated)


def setting_value(name: str, value: str | bool) -> Any:
    """The value of a setting in ``SGLangLine.flags``, numbers as such; text that should be one stays."""
    kind = int if name in _WHOLE else float if name in _SHARES else str
    try:
        return value if isinstance(value, bool) else kind(value)
    except ValueError:
        return value


def _meant(word: str, other_release: str | None) -> str | None:
    """The flag of a word, which may be shortened; None for one of a release of which the flags were not read.

    Raises:
        UserError: It is no flag, or may be several.
    """
    known, also = _values(), _facts()["also"]
    if word in known:
        return str(also.get(word, word))
    longer = sorted(name for name in known if name.startswith(word)) if word.startswith("--") else []
    if len(longer) == 1:
        return str(also.get(longer[0], longer[0]))
    if other_release is not None and not longer:
        return None
    if longer:
        raise UserError(f"{word}: may be {either(longer)} in {release_of_flags()}; write it out")
    near = difflib.get_close_matches(word, known, n=1)
    meant = f"; did you mean {near[0]}?" if near else "; leave it out"
    raise UserError(f"{word}: {release_of_flags()}, the release that was read, does not have it{meant}")


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


def _is_default(flag: str, values: list[str]) -> bool:
    """Whether a flag changes nothing, as its value is SGLang's default or one that makes no difference.

    Raises:
        SettingError: The value is none of the flag.
    """
    for value in values:
        _require_choice(flag, value)
    return values in ([_facts()["defaults"].get(flag)], *([each] for each in _ALIKE.get(flag, ())))


def _require_choice(flag: str, value: str) -> None:
    refused, reason = _NO_START.get(flag, ("", ""))
    if value == refused:
        raise SettingError(flag, value, reason)
    choices = _facts()["choices"].get(flag)
    if choices is not None and value not in choices.split():
        raise SettingError(flag, value, f"{release_of_flags()} has no such value; one of {choices.replace(' ', ', ')}")


def _value(name: str, flag: str, values: list[str]) -> Any:
    """The setting of a flag.

    Raises:
        SettingError: The value is none of the flag, or is not simulated.
    """
    if _values()[flag] == "0":
        return name not in _TURN_OFF
    text = values[0]
    if name in _WHOLE:
        number = human_readable_int(text)
        least = 0 if name in ("priority_scheduling_preemption_threshold", "hicache_size") else 1
        if number is None or number < least:
            raise SettingError(flag, text, f"must be a whole number from {least} on to be simulated")
        return number
    if name in _SHARES:
        try:
            return float(text)
        except ValueError:
            raise SettingError(flag, text, "must be a number, such as 0.85") from None
    _require_choice(flag, text)
    known = _FORMATS.get(name, {text: text})
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
