"""The results of a live server, from the file of ``fragmeter.probe``: the tables and the summary of a run.

A row of ``steps`` and ``memory`` is a step of the server, and lasts until the next one begins. A call of the scheduler that
leaves nothing running stands for the idle time after it. Requests that have not finished by the end of the file are in the ledger
and in no table.
"""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from ...sim.memory.accounting.buckets import BUCKETS
from ...sim.memory.accounting.kv_groups import STATE
from ...sim.metrics.gaps import Gaps
from ...sim.metrics.requests import RequestTimes
from ...sim.metrics.residencies import BEGINS, ENDS, KINDS
from ...sim.metrics.result import requested_and_served
from ...sim.metrics.summary import serving, waste
from ...sim.metrics.views import nine_buckets
from ...sim.output import frames as pd
from ...sim.output.files import as_utf8
from ...sim.recording.probe import ProbedRequest, ProbedRun, read_probe
from ...sim.runs.integrals import Window
from ...sim.types.errors import UserError
from ...sim.workload.workload import Workload
from .results import Result

_TICKS_PER_NS = 1000


def read_probed(path: str | PathLike[str], name: str = "") -> Result:
    """Read the file of a probe.

    Args:
        name: Label of the run; by default the server's release.

    Raises:
        UserError: It cannot be read, is damaged, or no request finished in it.
    """
    run = read_probe(path)
    served = [(number, each) for number, each in enumerate(run.requests) if each.output_tokens and each.token_ns]
    if not served:
        raise UserError(
            f"{fspath(path)}: no request has finished in it; let the server finish some, and record it anew"
        )
    return _Tables(run, Path(path), served).result(name)


class _Tables:
    """The tables of a recorded server, in ticks from the first arrival."""

    def __init__(self, run: ProbedRun, path: Path, served: list[tuple[int, ProbedRequest]]) -> None:
        self._run, self._path = run, path
        self._row = {number: row for row, (number, _) in enumerate(served)}
        self._served = [each for _, each in served]
        self._zero_ns = min(self._served[0].arrival_ns, run.steps[0].start_ns)
        starts = np.array([step.begin_ns for step in run.steps])
        last = max(run.steps[-1].end_ns, *(each.finish_ns or 0 for each in self._served))
        self._starts = self._ticks(starts)
        self._durations = np.diff(self._ticks(np.append(starts, last)))
        self._computes = np.array([bool(step.tokens) for step in run.steps])
        self._levels = run.buckets()

    def result(self, name: str) -> Result:
        """The result of the server."""
        run, times, gaps = self._run, self._times(), self._gaps()
        header, release = run.header, f"vLLM {run.header['vllm']}"
        sampled = np.array([step.sampled for step in run.steps])
        window = self._window(sampled)
        work = self._workload()
        summary = {
            **serving(work, times, gaps, int(times.finish_ticks.max(initial=0))),
            "refused": 0,
            "num_gpu_blocks": header["num_gpu_blocks"],
            "block_size": run.block_size,
            "num_steps": window.num_steps,
            "mean_batch": window.mean_batch,
            "waste": waste(window),
        }
        for mean in ("mean_over_time_pct", "mean_over_iterations_pct"):
            summary["waste"][mean]["buckets"] = nine_buckets(summary["waste"][mean]["buckets"])
        limits = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "async_scheduling")
        about: dict[str, Any] = {
            "settings": {"policy": release, "model": header["model"], "gpu": "a live server"},
            "replica": {
                "block_size": run.block_size,
                "num_gpu_blocks": header["num_gpu_blocks"],
                "enable_prefix_caching": header["prefix_caching"],
                **{limit: header[limit] for limit in limits},
            },
            "workload": {"name": work.name, "requests": len(work), "sha256": work.sha256()},
            "probe": {"unfinished": len(run.requests) - len(self._served), "cut": run.cut},
        }
        memory = {bucket: self._levels[bucket] for bucket in BUCKETS}
        if STATE in self._levels:
            # Pages draw nine buckets: states of fixed size are live, too.
            memory["live"] = memory["live"] + self._levels[STATE]
        return Result(
            name=as_utf8(name or release),
            summary=summary,
            about=about,
            requests=requested_and_served(work, np.zeros(len(work), dtype=bool), times),
            residencies=self._residencies(),
            steps=self._steps(sampled),
            memory=pd.DataFrame({"start_ticks": self._starts, **memory}),
            preemptions=self._preemptions(),
            gaps=gaps.as_table(),
        )

    def _ticks(self, ns: np.ndarray) -> np.ndarray:
        return (ns - self._zero_ns) * _TICKS_PER_NS

    def _workload(self) -> Workload:
        return Workload(
            as_utf8(self._path.name),
            arrival_ticks=self._column("arrival_ns"),
            prompt_tokens=np.array([each.prompt_tokens for each in self._served]),
            output_tokens=np.array([each.output_tokens for each in self._served]),
        )

    def _column(self, name: str) -> np.ndarray:
        return self._ticks(np.array([getattr(each, name) for each in self._served]))

    def _times(self) -> RequestTimes:
        preempted = np.array([sum(each[3] for each in one.residencies) for one in self._served])
        return RequestTimes(
            index=np.arange(len(self._served)),
            arrival_ticks=self._column("arrival_ns"),
            first_scheduled_ticks=self._ticks(np.array([each.residencies[0][0] for each in self._served])),
            first_token_ticks=self._ticks(np.array([each.token_ns[0] for each in self._served])),
            finish_ticks=self._column("finish_ns"),
            output_tokens=np.array([each.output_tokens for each in self._served]),
            recomputed=preempted,
            swapped=np.zeros_like(preempted),
        )

    def _gaps(self) -> Gaps:
        gaps = [np.diff(each.token_ns) * _TICKS_PER_NS for each in self._served]
        return Gaps.single(np.concatenate(gaps).astype(np.int64))

    def _window(self, sampled: np.ndarray) -> Window:
        ticks, computes = self._durations.astype(object), self._computes
        return Window(
            start_ticks=0,
            end_ticks=int(self._starts[-1] + self._durations[-1]),
            num_steps=int(computes.sum()),
            batch_steps=int(sampled.sum()),
            slot_steps={name: int(slots[computes].sum()) for name, slots in self._levels.items()},
            # Before the first step the pool is free.
            slot_ticks={
                name: int(slots @ ticks) + (name == "free") * int(self._starts[0]) * self._slots
                for name, slots in self._levels.items()
            },
        )

    @property
    def _slots(self) -> int:
        return (self._run.header["num_gpu_blocks"] - 1) * self._run.block_size

    def _steps(self, sampled: np.ndarray) -> pd.DataFrame:
        prefill = np.array([step.prefill_tokens for step in self._run.steps])
        nothing = np.zeros_like(sampled)
        columns = {
            "start_ticks": self._starts,
            "steps": (sampled > 0).astype(np.int64),
            "ticks": self._durations,
            "first_ticks": self._durations,
            **dict.fromkeys(("next_ticks", "slope_ticks", "swap_ticks"), nothing),
            "batch_size": np.array([len(step.tokens) for step in self._run.steps]),
            "decodes": sampled,
            "prefill_tokens": prefill,
            "waiting": np.array([step.waiting for step in self._run.steps]),
            "growing": sampled,
            "iterations": self._computes.astype(np.int64),
        }
        return pd.DataFrame(columns)

    def _residencies(self) -> pd.DataFrame:
        rows = [
            (row, *residency, place > 0, each.is_complete and place + 1 == len(each.residencies))
            for row, each in enumerate(self._served)
            for place, residency in enumerate(each.residencies)
        ]
        rows.sort(key=lambda row: row[1])
        request, start, first, end, preempted, again, last = (np.array(column) for column in zip(*rows, strict=True))
        # A request that is preempted while its last token is computed finishes with that token.
        ended = np.where(preempted & ~last, ENDS.index("preempted"), ENDS.index("finished"))
        return pd.DataFrame(
            {
                "request": request,
                "sequence": request,
                "start_ticks": self._ticks(start),
                "first_token_ticks": self._ticks(first),
                "end_ticks": self._ticks(end),
                "begun": pd.Categorical.from_codes(again.astype(int), BEGINS),
                "ended": pd.Categorical.from_codes(ended, ENDS),
            }
        )

    def _preemptions(self) -> pd.DataFrame:
        known = [(self._row[request], ns) for ns, request in self._run.preemptions if request in self._row]
        request, ns = np.array(known, dtype=np.int64).reshape(-1, 2).T
        kind = pd.Categorical.from_codes(np.zeros(len(known), dtype=int), KINDS)
        return pd.DataFrame({"request": request, "ticks": self._ticks(ns), "kind": kind})
