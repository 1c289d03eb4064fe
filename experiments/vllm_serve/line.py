"""Parser of a pasted ``vllm serve`` command line: find it in the surrounding text, split it into flags, read the values.

The parser accepts ``vllm serve MODEL ...``, ``python -m vllm.entrypoints.openai.api_server ...`` and ``docker run ...
vllm/vllm-openai:TAG ...``, with environment assignments in front, line continuations, dashes or underscores, ``--flag
value`` or ``--flag=value``, and flags shortened as far as they stay unique.

Flags are classified by their effect on memory and scheduling. The list is as of vLLM 0.33, with names removed since
0.8.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import overload

from ...sim.spec.speculative import ACCEPTANCE_KEYS, parse_speculative
from ...sim.types.bounds import human_readable_int
from ...sim.types.errors import SettingError, UserError
from ...sim.types.user_files import json_value, text_of

#: Flags that are read, and whether they take a value.
READ = {
    "model": True,
    "hf-config-path": True,
    "max-model-len": True,
    "tensor-parallel-size": True,
    "pipeline-parallel-size": True,
    "data-parallel-size": True,
    "decode-context-parallel-size": True,
    "enable-expert-parallel": False,
    "dtype": True,
    "quantization": True,
    "kv-cache-dtype": True,
    "gpu-memory-utilization": True,
    "kv-cache-memory-bytes": True,
    "num-gpu-blocks-override": True,
    "block-size": True,
    "max-num-seqs": True,
    "max-num-batched-tokens": True,
    "enforce-eager": False,
    "enable-prefix-caching": False,
    "async-scheduling": False,
    "watermark": True,
    "enable-chunked-prefill": False,
    "long-prefill-token-threshold": True,
    "long-prefill-token-threshold-adaptive": False,
    "max-num-active-seqs": True,
    "prefill-schedule-interval": True,
    "scheduler-reserve-full-isl": False,
    "kv-offloading-size": True,
    "speculative-config": True,
    "kv-offloading-backend": True,
    "disable-hybrid-kv-cache-manager": False,
    "language-model-only": False,
}

SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "q": "quantization",
    "kv-cache-memory": "kv-cache-memory-bytes",
    "O": "optimization-level",
    "cc": "compilation-config",
    "sc": "speculative-config",
    "dcp": "decode-context-parallel-size",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "r": "node-rank",
}

#: Flags without a simulated effect: name, whether a value follows, description.
NOT_SIMULATED = {
    "speculative-model": (True, "a draft model takes memory and slots"),
    "num-speculative-tokens": (True, "a draft model takes memory and slots"),
    "enable-lora": (False, "adapters take memory"),
    "max-loras": (True, "adapters take memory"),
    "max-lora-rank": (True, "adapters take memory"),
    "max-cpu-loras": (True, "adapters take memory"),
    "lora-modules": (True, "adapters take memory"),
    "cpu-offload-gb": (True, "weights on the host leave more for the KV cache"),
    "kv-transfer-config": (True, "a KV cache that is moved or kept elsewhere"),
    "prefill-context-parallel-size": (True, "ranks that divide the tokens of a prompt"),
    "dcp-comm-backend": (True, "ranks that divide a sequence gather queries and add up outputs, as by default"),
    "dcp-q-replicate": (False, "ranks that divide a sequence gather queries and add up outputs, as by default"),
    "hf-overrides": (True, "changes to the model's configuration"),
    "limit-mm-per-prompt": (True, "an encoder takes memory"),
    "mm-processor-kwargs": (True, "an encoder takes memory"),
    "mm-encoder-tp-mode": (True, "an encoder takes memory"),
    "mm-processor-cache-gb": (True, "an encoder takes memory"),
    "rope-scaling": (True, "longer positions; give --max-model-len"),
    "kv-cache-dtype-skip-layers": (True, "layers with a KV cache of 16 bit"),
    "mamba-cache-dtype": (True, "states in other number formats than the model's own"),
    "mamba-ssm-cache-dtype": (True, "states in other number formats than the model's own"),
    "runner": (True, "pooling models"),
    "task": (True, "pooling models"),
    "convert": (True, "pooling models"),
    "compilation-config": (True, "other CUDA graphs"),
    "cudagraph-capture-sizes": (True, "other CUDA graphs"),
    "max-cudagraph-capture-size": (True, "other CUDA graphs"),
    "optimization-level": (True, "other CUDA graphs"),
    "performance-mode": (True, "other defaults of --max-num-seqs and --max-num-batched-tokens"),
    "enable-dbo": (False, "two batches at once"),
    "enable-eplb": (False, "copies of experts take memory"),
    "num-redundant-experts": (True, "copies of experts take memory"),
    "enable-sleep-mode": (False, "an allocator of its own"),
    "revision": (True, "the facts are those of the preset, or of the repository's main branch"),
    "attention-backend": (True, "kernels are those that vLLM chooses"),
    "attention-config": (True, "kernels are those that vLLM chooses"),
    "kernel-config": (True, "kernels are those that vLLM chooses"),
    "moe-backend": (True, "kernels are those that vLLM chooses"),
    "all2all-backend": (True, "kernels are those that vLLM chooses"),
    "model-impl": (True, "kernels are those that vLLM chooses"),
    "override-attention-dtype": (True, "kernels are those that vLLM chooses"),
    "flashinfer-autotune": (False, "kernels are those that vLLM chooses"),
    "enable-flashinfer-autotune": (False, "kernels are those that vLLM chooses"),
    "disable-custom-all-reduce": (False, "all-reduces are vLLM's own"),
    "disable-nccl-for-dp-synchronization": (False, "engines that wait for each other"),
    "nnodes": (True, "more than 8 GPUs are several nodes, fewer are one"),
    "distributed-executor-backend": (True, "the host's time is that of vLLM's default"),
    "api-server-count": (True, "time outside of the engine"),
    "stream-interval": (True, "every token is sent by itself"),
    "disable-sliding-window": (False, "sequences of up to the window alone"),
    "mamba-block-size": (True, "states kept at other ends of blocks"),
    "mamba-cache-mode": (True, "states kept at other ends of blocks"),
    "prefix-match-unit": (True, "hits of the prefix cache in other units"),
    "scheduler-cls": (True, "a scheduler of its own"),
    "skip-mm-profiling": (False, "an encoder takes memory"),
    "ngram-prompt-lookup-max": (True, "speculative decoding"),
    "scheduling-policy": (True, "priorities of requests"),
    "max-num-queued-reqs": (True, "requests that the API server rejects"),
    "max-num-queued-tokens": (True, "requests that the API server rejects"),
}

#: Flags with a value and no effect on memory, scheduling or step times.
IGNORED = set(
    """
    additional-config allowed-headers allowed-local-media-path allowed-media-domains allowed-methods allowed-origins
    api-key block-log-stats-interval chat-template chat-template-content-format code-revision
    collect-detailed-traces config-format cp-kv-cache-interleave-size data-parallel-address data-parallel-backend data-parallel-rank
    data-parallel-rpc-port data-parallel-size-local data-parallel-start-rank dcp-kv-cache-interleave-size
    default-chat-template-kwargs default-mm-loras device download-dir expert-placement-strategy generation-config grace-period
    guided-decoding-backend hf-token host ignore-patterns kv-events-config load-format log-config-file
    logits-processor-pattern logits-processors logprobs-mode master-addr master-port max-log-len max-logprobs
    max-long-partial-prefills max-num-partial-prefills max-parallel-loading-workers max-seq-len-to-capture
    middleware model-loader-extra-config node-rank num-scheduler-steps observability-config otlp-traces-endpoint
    override-generation-config port preemption-mode prefix-caching-hash-algo pt-load-map-location
    ray-workers-use-nsight reasoning-config reasoning-parser reasoning-parser-plugin response-role root-path
    safetensors-load-strategy seed served-model-name show-hidden-metrics-for-version shutdown-timeout ssl-ca-certs
    ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile structured-outputs-config swap-space tokenizer tokenizer-mode
    tokenizer-revision tool-call-parser tool-parser-plugin tool-server uds uvicorn-log-level v1-scheduler worker-cls
    worker-extension-cls
    """.split()
)

#: Flags without a value and without an effect on any of them.
IGNORED_SWITCHES = set(
    """
    allow-credentials allow-deprecated-quantization calculate-kv-scales data-parallel-external-lb
    data-parallel-hybrid-lb disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input
    disable-fastapi-docs disable-frontend-multiprocessing disable-log-requests disable-log-stats
    disable-uvicorn-access-log enable-auto-tool-choice enable-force-include-usage enable-log-outputs
    enable-log-requests enable-logging-iteration-details enable-mfu-metrics enable-offline-docs enable-prompt-embeds
    enable-prompt-tokens-details enable-request-id-headers enable-response-messages enable-return-routed-experts
    enable-server-load-tracking enable-ssl-refresh enable-tokenizer-info-endpoint
    exclude-tools-when-tool-choice-none headless interleave-mm-strings kv-cache-metrics log-error-stack
    return-tokens-as-token-ids skip-tokenizer-init trust-remote-code trust-request-chat-template use-tqdm-on-load
    use-v2-block-manager
    """.split()
)

#: Flags with an object, as JSON or key by key; the second is read for its graphs alone.
_OBJECTS = ("speculative-config", "compilation-config")
#: Flags without a simulated effect that decide whether a server starts (``graphs``).
_DECIDE = ("compilation-config", "optimization-level")

#: Flags that take every word up to the next flag.
MANY = {
    "allowed-headers",
    "api-key",
    "cudagraph-capture-sizes",
    "default-mm-loras",
    "disable-access-log-for-endpoints",
    "kv-cache-dtype-skip-layers",
    "logits-processors",
    "lora-modules",
    "middleware",
    "served-model-name",
}

VALUED = IGNORED | {name for name, takes in READ.items() if takes}
VALUED |= {name for name, (takes, _) in NOT_SIMULATED.items() if takes}
SWITCHES = {name for name in READ if name not in VALUED} | IGNORED_SWITCHES | (NOT_SIMULATED.keys() - VALUED)
KNOWN = sorted(VALUED | SWITCHES | {"config"})


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_TAG = re.compile(r"vllm-openai:(v?\d{1,4}\.\d{1,4})")
_NUMBER = re.compile(r"-?[\d.]+[kKmMgGtT]?")
_OPTIMIZATION = re.compile(r"^-O(\d)$")
#: Tokens at which a shell starts another command; redirections too.
_SHELL_ENDS = re.compile(r"[|;&].*|\d?>.*|<")
_MODULE = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class ServeLine:
    """A parsed command line.

    Attributes:
        model: As written, a repository or a path.
        flags: Values of the flags that are read, by name; switches are booleans.
        ignored: Flags that change neither memory, nor scheduling, nor step times.
        not_simulated: Flags without an effect in the simulation.
        environment: Variables assigned in front of the program, or passed to the container.
        version: Major and minor number of vLLM, from a container's tag.
    """

    model: str
    flags: dict[str, str | bool]
    ignored: list[str] = field(default_factory=list)
    not_simulated: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    version: tuple[int, int] | None = None

    def text(self, name: str, default: str) -> str:
        """The value of a flag as written."""
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


def parse_serve(text: str) -> ServeLine:
    """Read a pasted command line.

    Raises:
        SettingError: The line starts no server, has a flag that vLLM does not have, or lacks a value or the model.
    """
    words = _words(text)
    start = _start(words)
    environment = dict(word.split("=", 1) for word in words[:start] if _ASSIGNMENT.fullmatch(word))
    line = _Reader(_until_shell(words[start:])).line(environment, text)
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
    """Index of the first argument of the server."""
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
    """Reads the arguments in one pass."""

    def __init__(self, words: list[str]) -> None:
        self._left = words[::-1]
        self._model: str | None = None
        self._flags: dict[str, str | bool] = {}
        self._ignored: list[str] = []
        self._not_simulated: list[str] = []

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
        if "speculative-config" in self._flags:
            self._check_drafts(str(self._flags["speculative-config"]))
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
        if name in _OBJECTS:
            self._flags[name] = self._object(name, written, str(found))
        elif name in READ or name in _DECIDE:
            self._flags[name] = found
            if name == "kv-offloading-backend" and found != "native":
                self._not_simulated.append(f"--{name} {found} (a KV cache that is kept elsewhere)")
        elif name not in NOT_SIMULATED:
            self._ignored.append(f"--{name}")

    def _object(self, name: str, written: str, value: str) -> str:
        """A flag's JSON object, or that of all its keys up to this one (``--speculative-config.method eagle3``)."""
        _, _, key = written.partition(".")
        if not key:
            return value
        known = _json_or_text(str(self._flags.get(name, "{}")))
        if not isinstance(known, dict):
            raise SettingError(f"--{name}", known, "is no JSON object, so that no key can be added to it")
        return json.dumps(known | {key: _json_or_text(value)})

    def _check_drafts(self, text: str) -> None:
        """Name drafts of methods that are not simulated; with rates that vLLM refuses no server starts."""
        try:
            parse_speculative(text, needs_rates=False)
        except SettingError as error:
            _, _, key = error.field.partition(".")
            if not key or key in ACCEPTANCE_KEYS:
                raise
            del self._flags["speculative-config"]
            self._not_simulated.append(f"--speculative-config ({key} {error.value!r} {error.remedy})")

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


def _json_or_text(value: str) -> object:
    try:
        return json_value(value)
    except ValueError:
        return value


def _resolved(written: str) -> tuple[str, bool]:
    """The flag's full name, and whether ``--no-`` turns it off; raises SettingError for a flag that vLLM does not have."""
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
    raise UserError(f"{written}: is not a known flag of vllm serve{meant}")
