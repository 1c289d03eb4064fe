"""An unmodified llama-server over a case: it waits before each batch until the requests of that step have been sent.

``steps.c`` holds the batches. While one is held, the requests that arrive during its step are posted one by one, each when the
server's log has the one before. So nothing depends on how fast anything runs.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import socket
import subprocess
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from .served import Answer, Served
from .workloads import FIRST, STEP_TICKS, TOKENS, Case

#: Where ``make test-llama-cpp`` puts llama-server, the library of ``steps.c`` and the model.
FOLDER = Path(os.environ.get("FRAGMETER_LLAMA_CPP", ""))
_SECONDS = 60
_POSTED = re.compile(r"new task, id = (\d+)/1,")
_PURGED = re.compile(r"purging slot \d+ with (\d+) tokens")


def serve(case: Case, host_cache: bool = False) -> Served:
    """What llama-server does with a case, up to the step in which a batch lacks cells though no idle slot keeps any.

    Args:
        host_cache: Whether it has the prompt cache in host memory, of the default size, also where prompts begin alike.
    """
    with _Process(case, host_cache or not case.caching) as process:
        return process.serve()


class _Process:
    """A llama-server that holds its batches."""

    def __init__(self, case: Case, host_cache: bool) -> None:
        self._case, self._host_cache = case, host_cache
        self._runs = case.workload.token_runs() if case.caching else None
        self._words: dict[int, int] = {}
        self._lines: queue.Queue[str] = queue.Queue()
        self._posted: queue.Queue[int] = queue.Queue()
        self._retried: queue.Queue[str] = queue.Queue()
        self._purged = 0
        self._answers: list[Future[dict[str, Any]]] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self._socket = f"{self._folder.name}/server.sock"
        steps, out = os.pipe()
        go, self._go = os.pipe()
        case = self._case
        # fmt: off
        command = [
            str(FOLDER / "bin/llama-server"), "--model", str(FOLDER / "tiny.gguf"), "--host", self._socket,
            "--parallel", str(case.slots), "--ctx-size", str(case.cells),
            "--batch-size", str(case.max_num_batched_tokens), "--ubatch-size", str(case.max_num_batched_tokens),
            "--kv-unified" if case.unified else "--no-kv-unified", "--no-context-shift", "--cache-prompt",
            "--no-warmup", "--fit", "off", "--threads", "1", "--threads-batch", "1", "--threads-http", "256",
            "--offline", "--verbosity", "5", "--log-colors", "off",
        ]
        # fmt: on
        if not self._host_cache:
            command += ["--cache-ram", "0"]
        environment = os.environ | {
            "LD_PRELOAD": str(FOLDER / "steps.so"),
            "FRAGMETER_STEPS_OUT": str(out),
            "FRAGMETER_STEPS_IN": str(go),
        }
        self._server = subprocess.Popen(
            command,
            env=environment,
            pass_fds=(out, go),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        os.close(out)
        os.close(go)
        self._ready = threading.Event()
        self._threads = [
            threading.Thread(target=self._read_steps, args=(steps,), daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._clients = ThreadPoolExecutor(256)
        if not self._ready.wait(_SECONDS) or self._server.poll() is not None:
            raise RuntimeError("llama-server does not start")
        return self

    def __exit__(self, *error: object) -> None:
        self._server.kill()
        self._server.wait()
        os.close(self._go)
        for thread in self._threads:
            thread.join()
        self._clients.shutdown(wait=True, cancel_futures=True)
        self._folder.cleanup()

    def _read_steps(self, steps: int) -> None:
        starting = True
        with open(steps) as lines:
            for line in lines:
                if not line.startswith("="):
                    starting = not self._ready.is_set()
                # The server computes batches when it starts.
                if not starting:
                    self._lines.put(line.strip())
                elif not line.startswith("="):
                    os.write(self._go, b"\n")

    def _read_log(self) -> None:
        assert self._server.stderr
        for line in self._server.stderr:
            if found := _POSTED.search(line):
                self._posted.put(int(found[1]))
            elif found := _PURGED.search(line):
                self._purged += int(found[1])
            elif "retrying with smaller batch size" in line:
                self._retried.put(line)
            elif "waiting for new tasks" in line:
                self._ready.set()
        # It ended.
        self._ready.set()

    def serve(self) -> Served:
        arrivals = self._case.workload.arrival_ticks.tolist()
        steps: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        now = sent = 0
        exceeded = False
        while not exceeded:
            if self._is_idle():
                if sent == len(arrivals):
                    break
                now = arrivals[sent]
                sent = self._send(sent)
            line = self._next_line()
            if not line:
                continue
            # The requests of this step; the decision at its end knows those of that tick, too.
            while sent < len(arrivals) and arrivals[sent] <= now + STEP_TICKS:
                sent = self._send(sent)
            steps.append((now, _pairs(line)))
            while not self._compute():
                # After a purge the server tries the same batch again, without one a smaller batch.
                self._retried.get(timeout=_SECONDS)
                if _pairs(self._next_line()) != steps[-1][1]:
                    exceeded = True
                    steps.pop()
                    break
            now += STEP_TICKS
        answers = [] if exceeded else [_answer(one.result()) for one in self._answers]
        return Served(steps, answers, self._purged, exceeded)

    def _compute(self) -> bool:
        """Let the server compute the batch that it holds; whether it found cells for it."""
        os.write(self._go, b"\n")
        return self._lines.get(timeout=_SECONDS) == "= 0"

    def _next_line(self) -> str:
        """The next batch, or nothing once all requests are answered."""
        while True:
            try:
                return self._lines.get(timeout=0.002)
            except queue.Empty:
                if self._is_idle():
                    return ""

    def _is_idle(self) -> bool:
        """Whether all requests are answered."""
        if self._server.poll() is not None:
            raise RuntimeError("llama-server ended")
        return all(answer.done() and answer.result() for answer in self._answers)

    def _send(self, index: int) -> int:
        """Post a request and wait until the server has it. Returns the next one's index."""
        workload = self._case.workload
        body = {
            "prompt": self._prompt(index),
            "n_predict": int(workload.output_tokens[index]),
            "temperature": 0,
            # Its output is a word of its own, the one of the part of the prompt that is its own.
            "logit_bias": [[self._word(-1 - index), 1e6]],
        }
        self._answers.append(self._clients.submit(_post, self._socket, body))
        self._posted.get(timeout=_SECONDS)
        return index + 1

    def _prompt(self, index: int) -> list[int]:
        """Equal tokens where the simulator's are equal: a word for each stream."""
        if self._runs is None:
            return [self._word(-1 - index)] * int(self._case.workload.prompt_tokens[index])
        own = 1 << 63
        runs = self._runs.runs(index)
        return [
            self._word(own - 1 - stream if stream >= own else stream)
            for stream, _, tokens in runs
            for _ in range(tokens)
        ]

    def _word(self, stream: int) -> int:
        word = self._words.setdefault(stream, FIRST + len(self._words))
        assert word < TOKENS
        return word


class _Connection(http.client.HTTPConnection):
    """A connection over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def _post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = _Connection(path)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    answer: dict[str, Any] = json.load(connection.getresponse())
    connection.close()
    return answer


def _answer(answer: dict[str, Any]) -> Answer:
    if "error" in answer:
        return Answer(error=answer["error"]["type"])
    timings = answer["timings"]
    return Answer(
        slot=answer["id_slot"],
        found=timings["cache_n"],
        computed=timings["prompt_n"],
        generated=answer["tokens_predicted"],
        kept=answer["tokens_cached"],
    )


def _pairs(line: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(slot), int(tokens)) for slot, _, tokens in (part.partition(":") for part in line.split()))
