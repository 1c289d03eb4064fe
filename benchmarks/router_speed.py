"""CPU time of a choice, by router and size of the fleet.

    python benchmarks/router_speed.py                               1,000 replicas, 20,000 requests
    python benchmarks/router_speed.py --replicas 100 --count 5000   others
    python benchmarks/router_speed.py --before FOLDER               and another version of the code, in FOLDER/fragmeter

ShareGPT-like requests (embedded set), ``RATE`` a second for each replica, of 2,000 users with a prefix of their own; Llama 3.1 8B on
H100s under ``vllm-v1``. Each line is a process of its own: CPU seconds in the router's choices, and of the whole run. With
``--before`` both versions serve the same requests, and must send each to the same replica.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time

import numpy as np

from fragmeter.sim import settings
from fragmeter.sim.cluster import cluster, simulate_cluster
from fragmeter.sim.cluster import run as cluster_run
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import synthetic_pairs, workload

DATASET = "vllm_sosp23_sharegpt_opt"
ROUTERS = ("least-outstanding-tokens", "kv-aware", "prefix-affine")
#: Requests a second that a replica serves easily.
RATE = 10.0
USERS = 2000


def requests(count: int, replicas: int) -> Workload:
    """The load of a fleet."""
    plain = workload(synthetic_pairs(DATASET, count, 0, 2048), RATE * replicas, 0, "true")
    users = np.random.default_rng(0).integers(0, USERS, count)
    return Workload(
        plain.name,
        plain.arrival_ticks,
        plain.prompt_tokens,
        plain.output_tokens,
        content=PromptContent.of_sessions(users),
    )


def measure(router: str, replicas: int, count: int) -> dict[str, object]:
    """CPU seconds of a run in this process, and where its requests went."""
    spent, make = [0.0], cluster_run.router

    def timed(*parts: object) -> object:
        made = make(*parts)
        choose = made.choose

        def clocked(*arguments: object) -> int:
            start = time.process_time()
            place = choose(*arguments)
            spent[0] += time.process_time() - start
            return place

        made.choose = clocked
        return made

    cluster_run.router = timed
    work, chosen = requests(count, replicas), settings(policy="vllm-v1", model="llama-3.1-8b", gpu="h100-80gb")
    start = time.process_time()
    run = simulate_cluster(chosen, work, cluster(num_replicas=replicas, router=router))
    whole = time.process_time() - start
    places = np.empty(count, dtype=np.int64)
    for number, rows in enumerate(run.rows):
        places[rows] = number
    return {"choices_s": spent[0], "run_s": whole, "places": hashlib.sha256(places.tobytes()).hexdigest()}


def elsewhere(router: str, replicas: int, count: int, before: str | None) -> dict[str, object]:
    """``measure`` in a process of its own, of this version or of the one before."""
    environment = os.environ | ({"PYTHONPATH": before} if before else {})
    arguments = [sys.executable, __file__, "--one", router, "--replicas", str(replicas), "--count", str(count)]
    done = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--before")
    parser.add_argument("--one", choices=ROUTERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.replicas, given.count)))
        return
    for router in ROUTERS:
        found = {
            name: elsewhere(router, given.replicas, given.count, before) for name, before in versions(given.before)
        }
        for name, each in found.items():
            choice_us = each["choices_s"] / given.count * 1e6
            print(f"{router:26} {name:7} {choice_us:9.1f} us a choice {each['run_s']:8.2f} s a run")
        if len({each["places"] for each in found.values()}) > 1:
            raise SystemExit(f"{router}: the versions send requests to different replicas")


def versions(before: str | None) -> list[tuple[str, str | None]]:
    """Names and folders of the versions to measure."""
    return [("now", None), *([("before", before)] if before else [])]


if __name__ == "__main__":
    main()
