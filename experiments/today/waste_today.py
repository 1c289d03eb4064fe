"""``fragmeter reproduce waste-today``: the waste of today's models on today's cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from ...reports.figures import figures
from ...reports.figures.memory import KV_DEFINITIONS, kv_definitions
from ...reports.page.page import Section
from ...sim import simulate
from ...sim.memory.accounting.kv_groups import STATE
from ...sim.metrics.views import definition_lines
from ...sim.runs.run import Run
from ...sim.spec.gpu import GIB
from ...sim.types.errors import SimulationFault
from ..paper.bench import Bench
from ..paper.comparison import Payload
from ..paper.rows import Row
from ..runs.output import Report, track
from ..runs.parallel import in_parallel
from .cached import DEFINITIONS, RECORD_SERVERS, cached_rows, cached_table, measure_record
from .loads import LOADS, Load
from .replay import BUCKETS, Holdings, measured_steps, replayed, vllm_account
from .servers import SERVERS, Server, hbm_gib
from .tables import HEADINGS, heading, kv_table, of_load

FIGURE = "waste-today"
ALLOCATORS = {
    "vllm": "vLLM 0.33: one pool of equal pages, the default of vllm serve, simulated",
    "jenga": "like Jenga: large pages of the least common multiple, small pages by kind, taken by request; replayed",
    "separate": "a pool for each kind of layer, divided as SGLang's defaults do at the start; replayed",
}
#: Buckets of slots of vLLM's ledger; a slot of a group is a token in its layers.
SLOTS = ("live", STATE, "reserved", "block_tail", "stranded", "cached", "free")
_DECIMALS = 3
_KEPT = (
    "jenga and separate are accounts of the same sequences in the same steps as vLLM's run. The replay keeps its admissions,"
    " preemptions, lengths, step times and prefix hits, so it shows the bytes that these sequences pin; it cannot show the"
    " requests, batches or hits that a server would make of the bytes saved. fits bounds these: the pool over the mean bytes"
    " of a sequence that ran, over the fullest pool for separate. Neither caches prefixes here."
)


def waste_today(bench: Bench) -> Payload:
    """Every server under every load, as means over the source's seeds; servers under the record of ``--trace``."""
    seeds = bench.source.seeds
    jobs = [(server, load, seed) for load in LOADS for server in SERVERS for seed in seeds]
    measured = list(track(in_parallel(measure, jobs), FIGURE, len(jobs)))
    parts = [_mean(measured[at : at + len(seeds)]) for at in range(0, len(jobs), len(seeds))]
    record = bench.source.record
    of_record = [] if record is None else in_parallel(measure_record, [(server, record) for server in RECORD_SERVERS])
    return {
        "figure": FIGURE,
        "workload": f"{len(SERVERS)} models, {len(LOADS)} loads, {len(seeds)} seed{'s' * (len(seeds) > 1)}",
        "rows": [],
        "seeds": list(seeds),
        "kv_bytes": [row for part in parts for row in part["kv_bytes"]],
        "slots": [row for part in parts for row in part["slots"]],
        "hbm": [row for part in parts for row in part["hbm"]],
        "cached": [row for part in parts for row in part["cached"]],
        "cached_of_record": [row for each in of_record for row in each],
        "unserved": [part["unserved"] for part in parts if "unserved" in part],
        "basis": [
            *(f"{load.name}: {load.text}." for load in LOADS),
            *(f"{name}: {text}." for name, text in ALLOCATORS.items()),
            _KEPT,
            "Means are over the steps in which requests wait, and over all where none does; the worth of cached blocks is over the run. No number was measured on a GPU.",
        ],
    }


def measure(server: Server, load: Load, seed: int) -> dict[str, Any]:
    """The rows of one server under one load: bytes by allocator, vLLM's slots, and the memory of a GPU.

    Raises:
        SimulationFault: The pool of the run is not that of the start, which gives the bytes.
    """
    work, chosen = load.workload(seed), server.settings()
    longest = int((work.prompt_tokens + work.output_tokens).max())
    if longest > server.max_model_len:
        text = f"{server.label} serves no {load.name}: {longest:,} tokens, and its longest sequence is {server.max_model_len:,}"
        return {"kv_bytes": [], "slots": [], "hbm": [], "cached": [], "unserved": text}
    holdings = Holdings()
    run = simulate(chosen, work, observers=[holdings])
    memory = server.memory(run)
    if memory.num_blocks != run.replica.num_blocks:
        raise SimulationFault(
            f"{server.name} starts with {memory.num_blocks} blocks, and ran with {run.replica.num_blocks}"
        )
    pool_bytes = run.log.capacity_slots // run.log.block_size * memory.block_bytes
    accounts = [vllm_account(run, pool_bytes)]
    if kinds := server.kinds():
        accounts += replayed(run, holdings, kinds, pool_bytes)
    named = {"server": server.name, "load": load.name}
    return {
        "kv_bytes": [
            named
            | {"allocator": account.allocator, "fits": round(account.fits, 1)}
            | {bucket: _pct(account.buckets[bucket], pool_bytes) for bucket in BUCKETS}
            | {"short": _pct(account.short, pool_bytes)}
            for account in accounts
        ],
        "slots": [named | _slots(run)],
        "cached": cached_rows(server, load.name, run),
        "hbm": [named | {"memory_gib": memory.total_bytes / GIB} | _rounded(hbm_gib(memory, accounts[0].buckets))],
    }


def _mean(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows of one server under one load as means over seeds; what one seed cannot serve, none can in this document."""
    refused = next((each for each in measured if "unserved" in each), None)
    if refused is not None:
        return refused
    names = ("kv_bytes", "slots", "hbm", "cached")
    return {name: [_mean_row(same) for same in zip(*(each[name] for each in measured), strict=True)] for name in names}


def _mean_row(same: Sequence[Row]) -> Row:
    """One row for several seeds; what is alike for all, as names and block sizes are, is no mean."""
    return {
        key: value if all(row[key] == value for row in same) else round(fmean(row[key] for row in same), _DECIMALS)
        for key, value in same[0].items()
    }


def _slots(run: Run) -> dict[str, Any]:
    """vLLM's slots by bucket, in percent of the pool."""
    steps, chosen = run.log.rows["ticks"] > 0, measured_steps(run)
    shares = {name: values[steps][chosen] for name, values in run.accounts.at_rows().items()}
    found = {bucket: _pct(float(np.mean(shares.get(bucket, 0))), run.log.capacity_slots) for bucket in SLOTS}
    mean_batch = float(run.log.rows["batch_size"][steps][chosen].mean())
    return {"block_size": run.log.block_size, "batch": round(mean_batch, 1)} | found


def _pct(value: float, whole: float) -> float:
    return round(100 * value / whole, _DECIMALS) + 0.0


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, _DECIMALS) + 0.0 for name, value in values.items()}


def print_waste_today(payload: Payload, report: Report) -> None:
    """Print a table for each load, and the basis."""
    report.print_line(f"{FIGURE}: % of the bytes of the KV cache, by allocator", style="bold")
    report.print_line(payload["workload"])
    for load in dict.fromkeys(row["load"] for row in payload["kv_bytes"]):
        report.print_line()
        report.console.print(kv_table(load, of_load(payload["kv_bytes"], load), whole=False))
    for text in definition_lines(
        (HEADINGS.get(name := heading(bucket), name), KV_DEFINITIONS[bucket][1]) for bucket in BUCKETS
    ):
        report.print_line(text)
    if cached := payload["cached"] + payload["cached_of_record"]:
        report.print_line()
        report.console.print(cached_table(cached))
        for text in DEFINITIONS.values():
            report.print_line(f"{text}.")
    report.print_line()
    for text in (*payload["unserved"], *payload["basis"]):
        report.print_line(text)
    report.print_line()


def show_waste_today(payload: Payload, _: Bench) -> list[Section]:
    """The pictures by load and of a GPU's memory, vLLM's slots, and the worth of cached blocks."""
    return [*_pictures(payload), *_cached(payload)]


def _pictures(payload: Payload) -> Iterator[Section]:
    loads = list(dict.fromkeys(row["load"] for row in payload["kv_bytes"]))
    yield Section(
        "The KV cache by allocator",
        "Bytes of the KV cache of one GPU by what they hold. A model in which all layers keep the same has one bar: its pages are"
        " alike under each allocator.",
        [figures.kv_bytes(of_load(payload["kv_bytes"], load), load) for load in loads],
        finding="\n\n".join([_KEPT, *(f"{text}." for text in payload["unserved"])]),
        details="\n\n".join([f"{payload['workload']}.", *payload["basis"]]),
    )
    chosen = [row for row in payload["hbm"] if row["load"] == loads[0]]
    yield Section(
        "Every byte of a GPU",
        f"Under vLLM's defaults and the load {loads[0]}: what the engine takes beside the KV cache, the KV cache by bucket, and"
        " the share of the card that --gpu-memory-utilization leaves out.",
        [figures.hbm(chosen)],
    )
    yield Section(
        "vLLM's slots",
        "Percent of the slots of the pool by bucket. A slot of a KV group is a token in its layers; page padding is bytes within"
        " slots, so only the bytes above show it.",
        rows=[dict(row) for row in payload["slots"]],
        definitions=kv_definitions(SLOTS),
    )


def _cached(payload: Payload) -> Iterator[Section]:
    if cached := payload["cached"] + payload["cached_of_record"]:
        text = f"First {DEFINITIONS['blocks']}. Then {DEFINITIONS['rates']}."
        yield Section("Worth of the cached blocks", text, rows=cached_table(cached).records())
