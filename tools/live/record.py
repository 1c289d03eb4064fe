"""Serves the loads of a session with a real server and records what happened.

FOLDER/probe.jsonl.gz     every scheduled step (fragmeter.probe)
FOLDER/LOAD.json          result of vllm bench serve, without texts
FOLDER/LOAD.metrics.txt   /metrics of the server, a scrape a second
FOLDER/session.json       flags, versions and durations
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import fsum
from pathlib import Path
from urllib.request import urlopen

from fragmeter.experiments.measured.scrapes import READ
from fragmeter.sim.output.files import as_json, write_whole
from fragmeter.sim.types.errors import UserError

from .loads import Load, Session, write_data
from .server import Server, environment, leave_first_core, write_model

#: Seconds that a load may take.
LOAD_S = 300
_SCRAPE_S = 1.0
_PERCENTILES = ("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99")
#: Lists of a result that nothing reads.
_LARGE = ("generated_texts", "tokenizer_id", "errors", "queue_times", "latencies")


def record(session: Session, python: Path, folder: Path) -> None:
    """Start the session's server, serve its loads, and stop it.

    Args:
        python: Interpreter of the environment with vLLM.
        folder: Gets the results; made if missing.

    Raises:
        UserError: The server or a load failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    write_model(model)
    with Server(python, model, session.flags, folder) as server:
        serve_all(session, server.url, python, model, folder, server.start_s)


def serve_all(
    session: Session, url: str, python: Path, model: Path, folder: Path, start_s: float | None = None
) -> None:
    """Send the loads of a session to a server, and write ``session.json`` when all are served.

    Args:
        folder: Gets the results; made if missing, once the server has answered.

    Raises:
        UserError: A load failed, or the server does not answer.
    """
    served = _served_model(url)
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, session.times)
    durations = {load.name: _serve(load, url, served, python, model, folder) for load in session.loads}
    about = {"session": session.name, "flags": session.flags, "start_s": start_s, "loads_s": durations}
    write_whole(folder / "session.json", as_json(about))


def _serve(load: Load, url: str, served: str, python: Path, model: Path, folder: Path) -> float:
    """Send a load with ``vllm bench serve``. Returns the seconds that it took.

    Args:
        served: Name of the model in requests.

    Raises:
        UserError: The client failed, or a request did.
    """
    began, result, log = time.monotonic(), f"{load.name}.json", folder / f"{load.name}.log"
    line = [str(python.parent / "vllm"), "bench", "serve", "--backend", "vllm", "--base-url", url]
    line += [
        "--model",
        served,
        "--tokenizer",
        str(model.absolute()),
        "--ignore-eos",
        "--disable-tqdm",
        "--save-result",
        "--save-detailed",
    ]
    line += ["--result-filename", result, "--ready-check-timeout-sec", "0", *_PERCENTILES]
    line += ["--num-prompts", str(load.requests), *load.arguments]
    with scraped(url, folder / f"{load.name}.metrics.txt"), log.open("w") as output:
        try:
            subprocess.run(
                line,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(),
                timeout=LOAD_S,
                preexec_fn=leave_first_core,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{log}: the load took more than {LOAD_S} s") from None
    path = folder / result
    found = json.loads(path.read_text()) if path.exists() else {}
    if found.get("completed") != load.requests:
        raise UserError(f"{log}: {found.get('completed', 0)} of {load.requests} requests were answered")
    kept = {name: value for name, value in found.items() if name not in _LARGE}
    # The time of an answer after its first token: one gap instead of one a token.
    path.write_text(json.dumps(kept | {"itls": [[round(fsum(gaps), 6)] for gaps in found["itls"]]}))
    return round(time.monotonic() - began, 1)


def _served_model(url: str) -> str:
    """The name of a server's model in requests.

    Raises:
        UserError: The server does not answer.
    """
    try:
        with urlopen(f"{url}/v1/models", timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"{url}: does not answer as a vLLM server ({error}); start it, or correct --url") from None


@contextmanager
def scraped(url: str, path: Path) -> Iterator[None]:
    """Write the metrics of a server to a file once a second, each scrape after a line with the Unix time.

    A scrape without an answer is left out: the server is busy, or has ended, and then the load fails.
    """
    ended = threading.Event()

    def scrape() -> None:
        with path.open("w") as file:
            while True:
                try:
                    with urlopen(f"{url}/metrics", timeout=5) as answer:
                        lines = answer.read().decode().splitlines()
                except OSError:
                    lines = []
                if lines:
                    file.write(f"{time.time():.3f}\n")
                    file.writelines(f"{line}\n" for line in lines if line.startswith(READ))
                if ended.is_set():
                    return
                ended.wait(_SCRAPE_S)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
