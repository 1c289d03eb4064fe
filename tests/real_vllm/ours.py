"""Our engine with policy ``vllm-v1`` over a case, written down step by step through the public observer."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from fragmeter.sim import Settings, Workload, settings, simulate
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.memory import PagedMemory
from fragmeter.sim.memory.accounting.ledger import LEAP, Leap
from fragmeter.sim.metrics.summary import summary as summary_of
from fragmeter.sim.types.sequence import Sequence, StepPlan

from .shapes import Layer
from .steps import Served, Step
from .workloads import Case

_STEPS = LEAP.index("steps")


@dataclass(frozen=True)
class ConstantCost:
    """Every step takes as long."""

    ticks: int
    name: str = "constant"

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return self.ticks

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        return self.ticks, 0, None

    def swap_out_ticks(self, blocks: int) -> int:
        return 0

    def swap_in_ticks(self, blocks: int) -> int:
        return 0

    def copy_ticks(self, slots: int) -> int:
        return 0

    def describe(self) -> dict[str, object]:
        return {}


class Log(Observer):
    """Writes every step down.

    Attributes:
        steps: What happened so far.
        finished: (ticks, request) of those that are done, ascending within a step.
    """

    every_step = True

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.finished: list[tuple[int, int]] = []
        self._evicted = self._looked_up = 0
        #: Requests of the last step, and when it ends.
        self._known: set[Sequence] = set()
        self._end = 0
        #: What finished requests held when the plan was carried out: block tables, hashed blocks, and one token each.
        self._before: tuple[tuple[tuple[Any, ...], ...], tuple[int, ...], list[tuple[Sequence, int]]] | None = None

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        if refused.any():
            raise ValueError(f"the pool cannot hold request {int(refused.argmax())}; vLLM would wait for ever")
        self._engine = engine

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        state, memory = self._engine.state, self._engine.memory
        memory.settle(state, min(1, leap[_STEPS]))
        tables, cached, in_vain = self._before or (self._tables(), self._cached(), [])
        self._before = None
        new = {sequence: sequence.start_tokens - sequence.computed_tokens for sequence in plan.admitted}
        computed = [*((sequence, new.get(sequence, 1)) for sequence in state.running), *plan.chunks]
        self._note_finished(now)
        self._known, self._end = {sequence for sequence, _ in computed}, now + ticks
        # vLLM goes through them in order of admission.
        scheduled = [
            (each.index, tokens) for each, tokens in sorted([*computed, *in_vain], key=lambda chunk: chunk[0].order)
        ]
        used = {block for _, *groups in tables for table in groups for block in table if block}
        evicted = memory.evicted_blocks
        self.steps.append(
            Step(
                now=now,
                scheduled=tuple(scheduled),
                preempted=tuple(sorted(sequence.index for sequence in plan.preempted)),
                free=memory.num_blocks - len(used),
                cached=cached,
                hits=self._hits(plan),
                evicted=evicted - self._evicted,
                tables=tables,
            )
        )
        self._evicted = evicted

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        # A step that computes nothing is no step here.
        self._before = None

    def requests_finished(self, now: int, finished: Iterable[Sequence], in_vain: Iterable[Sequence]) -> None:
        self._engine.memory.settle(self._engine.state, 1)
        self._before = self._tables(), self._cached(), [(sequence, 1) for sequence in in_vain]

    def idle_started(self, now: int, ticks: int) -> None:
        self._note_finished(now)

    def _cached(self) -> tuple[int, ...]:
        """Ids of blocks that look-ups can find."""
        return tuple(sorted({int(block) + 1 for block in self._engine.memory.cached_block_ids()}))

    def _tables(self) -> tuple[tuple[Any, ...], ...]:
        """Block tables of every request that holds blocks, one a KV group."""
        memory = self._engine.memory
        if isinstance(memory, PagedMemory) and memory.group_tables:
            by_group = memory.group_tables.tables.items()
            tables = {sequence.index: tuple(map(_ids, groups)) for sequence, groups in by_group}
        else:
            tables = {sequence.index: (_ids(table),) for sequence, table in memory.tables.tables.items()}
        return tuple((index, *groups) for index, groups in sorted(tables.items()))

    def _hits(self, plan: StepPlan) -> tuple[tuple[int, int], ...]:
        log = self._engine.memory.cache_log
        if log is None:
            begun = [sequence for sequence in plan.admitted if not sequence.computed_tokens]
            begun += [sequence for sequence, tokens in plan.chunks if sequence.computed_tokens == tokens]
            return tuple((sequence.index, 0) for sequence in sorted(begun, key=attrgetter("order")))
        columns = log.look_up_columns()
        new = slice(self._looked_up, None)
        hits = tuple(zip(columns["index"][new].tolist(), columns["hit_tokens"][new].tolist(), strict=True))
        self._looked_up = len(columns["index"])
        return hits

    def _note_finished(self, now: int) -> None:
        """Those of the last step that neither run nor wait now are done."""
        state = self._engine.state
        queues = (state.running, state.prefilling, state.stalled, state.waiting)
        done = self._known.difference(*queues)
        self.finished += [(self._end, one.index) for one in sorted(done, key=attrgetter("order"))]
        self._known = set()


def _ids(table: Iterable[int | None]) -> tuple[int, ...]:
    """Block ids as vLLM has them: from 1, and 0 where a group keeps nothing any more."""
    return tuple(0 if block is None else block + 1 for block in table)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="models-")


@cache
def _model_of(layers: tuple[Layer, ...]) -> str:
    """Path of a ``config.json`` with such layers."""
    windows = {layer.tokens for layer in layers if layer.kind == "sliding"}
    config = {
        "model_type": "llama",
        "num_hidden_layers": len(layers),
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 1 << 20,
    }
    if windows:
        (config["sliding_window"],) = windows
        config["layer_types"] = [f"{layer.kind}_attention" for layer in layers]
    states = [layer for layer in layers if layer.kind == "state"]
    if states:
        _, (_, values, keys) = states[0].state_shapes
        config |= {
            "model_type": "qwen3_5_text",
            "head_dim": 16,
            "layer_types": ["linear_attention" if layer in states else "full_attention" for layer in layers],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "linear_key_head_dim": keys,
            "linear_value_head_dim": values,
            "linear_conv_kernel_dim": 4,
            "mamba_ssm_dtype": "float32",
        }
    path = Path(_folder().name) / str(len(list(Path(_folder().name).iterdir()))) / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    return str(path)


def serve(case: Case, asynchronous: bool = False) -> Served:
    """What our engine does with a case; see ``server.serve``."""
    log = Log()
    run = simulate(
        settings_of(case, asynchronous, ids=True), case.workload, ConstantCost(case.step_ticks), observers=[log]
    )
    log.idle_started(run.log.end_ticks, 0)
    rejected = () if run.rejected is None else tuple(np.flatnonzero(run.rejected).tolist())
    return Served(log.steps, log.finished, rejected)


def summary(case: Case, asynchronous: bool, leap: bool, ids: bool) -> dict[str, Any]:
    """Summary of a run without observers."""
    chosen = settings_of(case, asynchronous, leap=leap, ids=ids)
    return summary_of(simulate(chosen, case.workload, ConstantCost(case.step_ticks)))


def settings_of(case: Case, asynchronous: bool = False, **others: Any) -> Settings:
    """The settings that serve a case.

    Args:
        asynchronous: See ``server.serve``.
        others: Further settings, and other values of these.
    """
    chosen = (
        dict(
            policy="vllm-v1",
            model=_model_of(case.layers),
            block_size=case.block_size,
            num_gpu_blocks_override=case.num_blocks,
            max_model_len=case.max_model_len,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            enable_prefix_caching=case.prefix_caching,
            async_scheduling=asynchronous,
        )
        | dict(case.options)
        | others
    )
    return settings(**chosen)


def scaled(work: Workload, ticks: int) -> Workload:
    """The same requests on a clock of so many ticks."""
    return replace(work, arrival_ticks=work.arrival_ticks * ticks)
