"""vLLM's engine core with speculative decoding: scheduler, configuration and KV cache manager are vLLM's, accepted drafts are drawn.

In place of a model, ``SpeculativeRecorder`` answers each step with the next token of a request and as many drafts as
``sim.memory.accounting.drafts.Speculation`` draws for that place of its output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from vllm.config import ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds

from fragmeter.sim.memory.accounting.drafts import Speculation
from fragmeter.sim.real_vllm.core import _checkpoint, model_config, vllm_config
from fragmeter.sim.spec.speculative import parse_speculative
from fragmeter.sim.types.sequence import Sequence
from tools.live.step_log import Served

from . import server
from .drafts import beside_drafts
from .workloads import Case


class SpeculativeRecorder(server.Recorder):
    """As ``Recorder``, with drafts."""

    def __init__(self, case: Case, setup: server.Setup, config: VllmConfig) -> None:
        self._speculation = Speculation(parse_speculative(case.options["speculative_config"]), seed=0)
        work = case.workload
        lengths = zip(work.prompt_tokens.tolist(), work.output_tokens.tolist())
        self._sequences = [Sequence(index, prompt, output, output) for index, (prompt, output) in enumerate(lengths)]
        # Tokens that each request has generated, also those that the scheduler does not know yet.
        self._generated: Counter[str] = Counter()
        self.drafted = self.accepted = 0
        super().__init__(setup, config)

    def _run(self, output: SchedulerOutput) -> Any:
        self._drafts = output.scheduled_spec_decode_tokens
        entered = {*(new.req_id for new in output.scheduled_new_reqs), *output.scheduled_cached_reqs.resumed_req_ids}
        self._padded = entered & self._drafts.keys()
        self._last = list(output.num_scheduled_tokens)
        return super()._run(output)

    def _sample(self, name: str) -> list[int]:
        sequence, generated = self._sequences[int(name)], self._generated[name]
        if self.scheduler.requests[name].is_prefill_chunk:
            return []
        if generated >= sequence.output_tokens:
            return [0]
        drafts, accepted = len(self._drafts.get(name, ())), 0
        if drafts and name not in self._padded:
            accepted = min(drafts, self._speculation.accepted(sequence, generated))
        self.drafted += drafts
        self.accepted += accepted
        self._generated[name] += 1 + accepted
        known = self.outputs[int(name)][generated : generated + 1 + accepted]
        return known + [0] * (1 + accepted - len(known))

    def take_draft_token_ids(self) -> DraftTokenIds:
        number = self._speculation.config.num_speculative_tokens
        return DraftTokenIds(self._last, [[1] * number for _ in self._last])


def serve(case: Case, asynchronous: bool = False) -> tuple[Served, SpeculativeRecorder]:
    """What the installed vLLM does with a case; see ``server.serve``."""
    ours_config = parse_speculative(case.options["speculative_config"])
    options = {name: value for name, value in case.options.items() if name != "speculative_config"}

    with (
        mock.patch.object(server, "vllm_config", config_with(ours_config)),
        mock.patch.object(server, "Recorder", partial(SpeculativeRecorder, case)),
        mock.patch.object(server, "start", starting(server.start, _STARTED)),
    ):
        layers = beside_drafts(case.layers, ours_config.method, ours_config.num_speculative_tokens)
        served = server.serve(replace(case, options=options, layers=layers), asynchronous)
    return served, _STARTED.pop()


_STARTED: list[SpeculativeRecorder] = []


def config_with(drafts: Any) -> Callable[..., VllmConfig]:
    """``vllm_config`` with drafts as in our configuration."""

    def config_of(max_model_len: int, cache: dict[str, Any], scheduler: dict[str, Any], **others: Any) -> VllmConfig:
        return vllm_config(max_model_len, cache, scheduler, _vllms(drafts, max_model_len), **others)

    return config_of


def starting(start: Any, started_engines: list[Any] | None = None) -> Any:
    """``start`` of an engine that takes drafts after each step, noted in ``started_engines``."""

    def started(setup: server.Setup) -> Any:
        engine = start(setup)
        if started_engines is not None:
            started_engines.append(engine.model_executor)
        step = engine.step_fn

        def step_and_take_drafts() -> Any:
            answers, executed = step()
            engine.post_step(executed)
            return answers, executed

        engine.step_fn = step_and_take_drafts
        return engine

    return started


def _vllms(config: Any, max_model_len: int) -> SpeculativeConfig:
    """vLLM's configuration; EAGLE's and MTP's as one of n-grams with that method, as their checkpoints are not here."""
    own = config.method in ("ngram", "draft_model")
    found = SpeculativeConfig(
        method=config.method if own else "ngram",
        model=_checkpoint() if config.method == "draft_model" else None,
        num_speculative_tokens=config.num_speculative_tokens,
        target_model_config=model_config(max_model_len),
        target_parallel_config=ParallelConfig(),
        **({} if config.method == "draft_model" else {"prompt_lookup_max": 3, "prompt_lookup_min": 1}),
    )
    found.method = config.method
    return found
