"""The page of ``make server-check``: a live server beside the simulator, in tables and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fragmeter.experiments.measured.replay import Replayed, scatter
from fragmeter.experiments.measured.scrapes import KV_USAGE, read_scrapes, total
from fragmeter.experiments.measured.step_fit import step_table
from fragmeter.reports.blockmap.player import PlayedMap, Player
from fragmeter.reports.figures.measured import simulated_against_measured
from fragmeter.reports.page.page import Section, write_page
from fragmeter.reports.style.labels import signed
from fragmeter.sim.cost import StepCost
from fragmeter.sim.cost.base import effective_context
from fragmeter.sim.cost.steps import read_steps
from fragmeter.sim.output import frames as pd
from fragmeter.sim.recording.blocks import BlockMap
from fragmeter.sim.recording.probe import read_probe
from fragmeter.sim.types.ticks import PER_SECOND

from .decisions import compare_blocks
from .figures import kv_use, measured_over_time, queue, simulated_over_time, waste_of_both
from .loads import CALIBRATION, Session
from .prediction import NULL_MODELS, RecordedLoad, predict, recorded
from .results import LIMITS, mean_error, misses

#: Loads with pictures, as SESSION/LOAD: a light one, a saturated one, one that preempts, and one of sessions.
SHOWN = ("ample/random-light", "ample/random-saturated", "tight/random-saturated", "tight/sessions")
#: Sessions with a block map: the first of these that was recorded, and the load with which the map begins.
_BLOCKS_OF = {"tight": "random-saturated", "ample": "ramp"}
#: Steps of a block map.
BLOCK_STEPS = 1500


@dataclass(frozen=True, eq=False)
class LoadPictures:
    """What is drawn of a load.

    Attributes:
        load: The recorded load.
        replayed: The same load, simulated.
        cost: Step times of the simulation.
        gauge: Of each scrape of ``/metrics`` the seconds since 1970, and the share of the pool in use.
    """

    load: RecordedLoad
    replayed: Replayed
    cost: StepCost
    gauge: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, eq=False)
class BlockPictures:
    """Block maps of the first steps of a load: the server's, and the simulator's.

    Attributes:
        load: Its name, as SESSION/LOAD.
        server, simulated: The maps; a tick is a step.
    """

    load: str
    server: BlockMap
    simulated: BlockMap


def load_pictures(out: Path, sessions: Sequence[Session], model: Path | None) -> dict[str, LoadPictures]:
    """The loads in ``SHOWN``, of the first repetition, predicted with ``cost.json``.

    Args:
        out: Folder of ``results``.
        model: ``config.json`` of the model; None if the recordings have it.

    Raises:
        UserError: As ``results``.
    """
    cost = read_steps((out / "cost.json").read_bytes(), "cost.json")
    found = {}
    for session in sessions:
        names = [load.name for load in session.loads if f"{session.name}/{load.name}" in SHOWN]
        if not names:
            continue
        folder = out / "1" / session.name
        probe = read_probe(folder / "probe.jsonl.gz")
        served = recorded(session, folder, model or folder / "model" / "config.json", probe)
        for name in names:
            replayed = predict(served[name], cost)
            scrapes = read_scrapes(folder / f"{name}.metrics.txt").scrapes
            gauge = [(each.at_s, total(each.samples, KV_USAGE) or 0.0) for each in scrapes if each.at_s is not None]
            found[f"{session.name}/{name}"] = LoadPictures(served[name], replayed, cost, gauge)
    return found


def block_pictures(out: Path, sessions: Sequence[Session], model: Path | None) -> BlockPictures | None:
    """Block maps of a session of the first repetition; None if there is none of those that are drawn.

    Raises:
        UserError: As ``compare_blocks``.
    """
    found = {session.name: session for session in sessions}
    name = next((each for each in _BLOCKS_OF if each in found), None)
    if name is None:
        return None
    folder = out / "1" / name
    probe = read_probe(folder / "probe.jsonl.gz")
    load = recorded(found[name], folder, model or folder / "model" / "config.json", probe)[_BLOCKS_OF[name]]
    maps = compare_blocks(folder / "probe.jsonl.gz", load.settings, load.steps[0].start_ns, BLOCK_STEPS)
    return BlockPictures(f"{name}/{load.name}", *maps)


def write_live_page(
    path: str | PathLike[str],
    results: Mapping[str, Any],
    loads: Mapping[str, LoadPictures],
    blocks: BlockPictures | None = None,
) -> Path:
    """Write the page to ``path``, and return the path.

    Args:
        results: What ``results.results`` returns.
        loads: Loads with pictures, by SESSION/LOAD.
        blocks: Block maps; None draws none.

    Raises:
        UserError: It cannot be written.
    """
    sections = [_decisions(results), _time(results), *_over_time(loads), *_scatter(loads, results)]
    if blocks is not None:
        sections.append(_blocks(blocks))
    return write_page(path, "A real vLLM server beside the simulator", _lead(results), sections)


def _lead(results: Mapping[str, Any]) -> str:
    server, decisions = results["server"], results["decisions"]
    steps, requests = (sum(row[name] for row in decisions) for name in ("steps", "requests"))
    about = (
        f"vLLM {server['vllm']} served {requests:,} requests in {steps:,} steps, on {len(decisions)}"
        f" server{'' if len(decisions) == 1 else 's'}. fragmeter.probe recorded every step of its scheduler."
    )
    how = (
        "Decisions are compared step by step, in a replay with the arrivals of the recording. Times are predicted from"
        f" each load alone, with step times that were fitted to {results['calibrated_on']}."
    )
    return f"{about}\n\n{how}"


def _decisions(results: Mapping[str, Any]) -> Section:
    decisions = results["decisions"]
    different = sum(row["difference"] is not None for row in decisions)
    steps = sum(row["steps"] for row in decisions)
    found = (
        f"All decisions of {steps:,} steps are equal."
        if not different
        else f"{different} of {len(decisions)} recordings differ from the replay; the table has the first difference of each."
    )
    text = (
        "Compared are, of each step: the requests that it computes and their tokens, preemptions, prefix cache hits,"
        f" evicted blocks, block tables, cached and free blocks; and when each request finishes. {found}"
    )
    rows = [
        {
            "Session": row["session"],
            "Repetition": row["repetition"],
            "Requests": row["requests"],
            "Steps": row["steps"],
            "Preemptions": row["preemptions"],
            "Evicted blocks": row["evicted_blocks"],
            "Tokens from the prefix cache": row["hit_tokens"],
            "First difference": row["difference"] or "none",
        }
        for row in decisions
    ]
    return Section("Decisions", text, [waste_of_both(decisions)], rows)


def _time(results: Mapping[str, Any]) -> Section:
    judged = {name: load for name, load in results["loads"].items() if name != results["calibrated_on"]}
    rows = [row for name, load in results["loads"].items() for row in _metric_rows(name, load["metrics"])]
    missed = sum(len(misses(load["metrics"])) for load in judged.values())
    count = sum(
        load["metrics"][metric]["simulated_error"] is not None
        for load in judged.values()
        for metric in LIMITS
        if metric in load["metrics"]
    )
    better = sum(
        all(mean_error(load["metrics"], "simulated") < mean_error(load["metrics"], null) for null in NULL_MODELS)
        for load in judged.values()
    )
    text = (
        f"On the loads that nothing was fitted on, {missed} of {count} judged metrics miss their limit: 3 % of throughput,"
        " 5 % of TPOT and of preemptions, 10 % of TTFT, or twice the noise if that is larger. The noise is the range of"
        " the repetitions over their mean.\n\nNull models are fitted to the same steps as the prediction, those of the"
        " calibration: one time, a line in the tokens of a step, and a plane in sequences, context and prompt tokens. The mean"
        f" error of the prediction is smaller than that of all three on {better} of {len(judged)} loads."
    )
    return Section("Time", text, rows=rows)


def _metric_rows(name: str, metrics: Mapping[str, Mapping[str, float | None]]) -> Iterator[dict[str, Any]]:
    """Rows of the table of errors for one load: each metric that has a limit, measured, simulated and by the null models, and their mean error."""
    missed = misses(metrics)
    fitted = name == "/".join(CALIBRATION)
    for metric, limit in LIMITS.items():
        row = metrics.get(metric)
        if row is None:
            continue
        known = row["simulated_error"] is not None
        yield {
            "Load": name,
            "Metric": metric,
            "Measured": row["measured"],
            "Noise": _percent(row["noise"]),
            "Simulated": row["simulated"],
            "Error": _percent(row["simulated_error"], sign=True),
            "Limit": _percent(max(limit, 2 * (row["noise"] or 0.0))),
            **{f"Error, {null}": _percent(row[f"{null}_error"], sign=True) for null in NULL_MODELS},
            "Result": "–" if not known else "fitted" if fitted else "miss" if metric in missed else "pass",
        }
    means = {model: _percent(mean_error(metrics, model)) for model in ("simulated", *NULL_MODELS)}
    yield {
        "Load": name,
        "Metric": "mean error",
        "Measured": None,
        "Noise": None,
        "Simulated": None,
        "Error": means["simulated"],
        "Limit": None,
        **{f"Error, {null}": means[null] for null in NULL_MODELS},
        "Result": "–",
    }


def _percent(share: float | None, sign: bool = False) -> str | None:
    if share is None:
        return None
    return f"{signed(100 * share)}%" if sign else f"{100 * share:.1f}%"


def _over_time(loads: Mapping[str, LoadPictures]) -> Iterator[Section]:
    for name, each in loads.items():
        load = each.load
        sides = measured_over_time(load.steps), simulated_over_time(each.replayed.run)
        # Scrapes have the time of day, the probe a monotonic clock.
        zero_s = (load.steps[0].begin_ns + load.header["unix_ns"] - load.header["monotonic_ns"]) / 1e9
        gauge = [(at - zero_s, 100 * share) for at, share in each.gauge if 0 <= at - zero_s <= sides[0].end_s]
        preempted = [
            sum(residency[3] for request in load.requests for residency in request.residencies),
            int(each.replayed.times.recomputed.sum()),
        ]
        text = (
            f"{len(load.requests):,} requests, {len(load.steps) - 1:,} steps, {preempted[0]:,} preemptions; simulated:"
            f" {preempted[1]:,} preemptions. Time starts with the first step on both sides. Blocks held are the blocks in"
            " tables; cached blocks in no table are not in use. Circles are the server's own gauge. It is of the end of a step, when"
            " finished requests have released their blocks, and keeps that value through the next step."
        )
        yield Section(f"Over time: {name}", text, [kv_use(name, sides, gauge), queue(name, sides)])


def _scatter(loads: Mapping[str, LoadPictures], results: Mapping[str, Any]) -> Iterator[Section]:
    judged = {name: each for name, each in loads.items() if name != results["calibrated_on"]}
    if not judged:
        return
    steps = {name: _step_times(each) for name, each in judged.items()}
    requests = {name: pd.DataFrame(scatter(each.load.benchmark, each.replayed)) for name, each in judged.items()}
    text = (
        "Left: each step, with the step time that was fitted to another load. A step lasts from its beginning to the"
        " beginning of the next one. Right: the time to first token of each request, as the client measured it. Percentages are"
        " those within the band of 10 %."
    )
    figures = [
        simulated_against_measured("step", steps, "Step time, fitted against measured", "Steps"),
        simulated_against_measured("ttft", requests),
    ]
    yield Section("Steps and requests, one by one", text, figures)


def _step_times(pictures: LoadPictures) -> pd.DataFrame:
    table = step_table(pictures.load.steps)
    effective = effective_context(pictures.cost) or (lambda context, _: context)
    read = map(effective, table["decode_context"].tolist(), table["repeated_slots"].tolist())
    rest = (table[name].tolist() for name in ("prefill_tokens", "prefill_pairs"))
    steps = zip(table["decodes"].tolist(), read, *rest, strict=True)
    fitted = np.array([pictures.cost.step_ticks(*step) for step in steps])
    return pd.DataFrame({"simulated_step_ms": fitted / PER_SECOND * 1e3, "measured_step_ms": table["ns"] / 1e6})


def same_blocks(one: BlockMap, other: BlockMap) -> bool:
    """Whether both maps show the same: moments, every block, and preemptions in any order."""
    names = ("at_ticks", "block_ids", "bucket", "sequence", "live_slots", "references", "census_slots")
    preempted = [
        sorted(zip(found.preempted_ticks.tolist(), found.preempted_sequence.tolist(), strict=True))
        for found in (one, other)
    ]
    return preempted[0] == preempted[1] and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in names
    )


def _blocks(blocks: BlockPictures) -> Section:
    steps = blocks.server.num_columns
    if same_blocks(blocks.server, blocks.simulated):
        found = (
            f"Both maps are identical in all {steps:,} steps: contents, request, tokens and references of every block."
        )
    else:
        found = f"The maps differ within these {steps:,} steps."
    text = (
        f"Every physical block in the first {steps:,} steps of {blocks.load}: left from the block tables that the probe"
        f" recorded on the server, right from the replay in the simulator. {found}\n\nBlue holds tokens, pale blocks are"
        " reserved, yellow is the tail of a last block. Each request has a shade of its own where bands are wide enough."
        " Triangles are preemptions. Point at a map to see which request holds a block; drag across it to zoom."
    )
    maps = {"Server": blocks.server, "Simulator": blocks.simulated}
    played = [PlayedMap(name, each, _requests(each), in_steps=True) for name, each in maps.items()]
    return Section("Block maps", text, widgets=[Player(played)])


def _requests(found: BlockMap) -> np.ndarray:
    """The request of each sequence: here every request has one sequence, and they have the same numbers."""
    return np.arange(max(found.sequence.max(initial=-1), found.preempted_sequence.max(initial=-1)) + 1)
