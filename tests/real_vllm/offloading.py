"""vLLM's engine core with its native KV offloading: scheduler, connector and manager are vLLM's, copies take a stated time.

In place of a worker, ``OffloadingRecorder`` carries out the copies that the connector's scheduler asks for, as vLLM's worker
orders them: stores begin with the step after the one that asks, a step waits for the stores to flush, and then loads begin.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from fragmeter.sim import simulate
from fragmeter.sim.engine.replica import build
from fragmeter.sim.real_vllm.core import vllm_config
from fragmeter.sim.spec import Deployment, model
from fragmeter.sim.spec import stages as deployment_stages
from fragmeter.sim.spec.pool import _stage_page_bytes, block_bytes
from fragmeter.sim.spec.speculative import parse_speculative
from fragmeter.sim.types.optional import not_none
from tools.live.step_log import Served, StepLog

from . import ours, server, speculation, tiering
from .drafts import beside_drafts
from .workloads import Case

#: Bytes of a page of the host.
_PAGE = 4096


@dataclass(frozen=True)
class Copies:
    """Chunks of the host, ticks to load and to store a block, blocks of a chunk, and the tiers behind the host."""

    host_blocks: int
    load_ticks: int
    store_ticks: int
    chunk_blocks: int = 1
    tiers: tuple[tiering.Tier, ...] = ()

    def extra_config(self, chunk_bytes: int) -> dict[str, Any]:
        """Of the connector, for both."""
        found: dict[str, Any] = {"blocks_per_chunk": self.chunk_blocks} if self.chunk_blocks > 1 else {}
        if self.tiers:
            tiers = [each.config(chunk_bytes) for each in self.tiers]
            found |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": tiers}
        return found


class _Result(server.Result):
    """What a step sampled, with the copies that have ended when it is fetched."""

    recorder: OffloadingRecorder

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        output = super().result(timeout)
        if output.kv_connector_output is None:
            output.kv_connector_output = self.recorder.completed()
        return output


class OffloadingRecorder(server.Recorder):
    """As ``Recorder``, with a link in each direction."""

    def __init__(self, copies: Copies, *given: Any) -> None:
        self.copies = copies
        super().__init__(*given)

    def _init_executor(self) -> None:
        super()._init_executor()
        self._unsubmitted: dict[int, int] = {}
        self._link_free = {True: 0, False: 0}
        #: Ends of jobs, and the requests that load.
        self.ends: dict[int, int] = {}
        self.loads: dict[int, str] = {}
        self.flushes = self.loaded = 0
        self.idle = False

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        return [None]

    def _submit(self, job: int, blocks: int, store: bool, now: int) -> None:
        each = self.copies.store_ticks if store else self.copies.load_ticks
        self._link_free[store] = self.ends[job] = max(now, self._link_free[store]) + blocks * each

    def _run(self, output: SchedulerOutput) -> Any:
        meta, clock = output.kv_connector_metadata, self.clock
        now = clock.free_at
        asked = {job: len(each.src_spec.block_ids) for job, each in meta.store_jobs.items()}
        flushed = meta.jobs_to_flush or set()
        for job, blocks in (*self._unsubmitted.items(), *((job, asked[job]) for job in asked if job in flushed)):
            self._submit(job, blocks, True, now)
        self._unsubmitted = {job: blocks for job, blocks in asked.items() if job not in flushed}
        wait = max((max(0, self.ends.get(job, 0) - now) for job in flushed), default=0)
        self.flushes += wait > 0
        for job, each in meta.load_jobs.items():
            self._submit(job, len(each.dst_spec.block_ids), False, now + wait)
            self.loads[job] = each.req_id
            self.loaded += len(each.dst_spec.block_ids)
        asks = output.total_num_scheduled_tokens or output.preempted_req_ids or meta.load_jobs or self._unsubmitted
        self.idle = not asks
        with (
            mock.patch.object(clock, "reserve", partial(clock.reserve, wait=wait)),
            mock.patch.object(server, "Result", _Result),
        ):
            result = super()._run(output)
        result.recorder = self
        result._runs |= wait > 0
        return result

    def completed(self) -> KVConnectorOutput:
        """The copies that have ended by now."""
        done = [job for job, end in self.ends.items() if end <= self.clock.now]
        for job in done:
            del self.ends[job]
        # What the scheduler hears may let it do more at once.
        self.idle = self.idle and not done
        received = {self.loads.pop(job) for job in done if job in self.loads}
        workers = self.scheduler.connector.connector_scheduler.config.num_workers
        meta = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(done, workers))
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=meta)


class DraftingRecorder(OffloadingRecorder, speculation.SpeculativeRecorder):
    """As ``OffloadingRecorder``, with drafts."""


def serve(case: Case, copies: Copies, asynchronous: bool = False) -> tuple[Served, OffloadingRecorder]:
    """What the installed vLLM does with a case, with or without drafts."""
    options, layers = dict(case.options), case.layers
    drafts = options.pop("speculative_config", None)
    recorder_of, config_from, start = partial(OffloadingRecorder, copies), vllm_config, server.start
    if drafts is not None:
        config = parse_speculative(drafts)
        layers = beside_drafts(layers, config.method, config.num_speculative_tokens)
        recorder_of, config_from = partial(DraftingRecorder, copies, case), speculation.config_with(config)
        start = speculation.starting(start)
    setup = server.Setup(
        layers=layers,
        block_size=case.block_size,
        max_model_len=case.max_model_len,
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=case.max_num_batched_tokens,
        prefix_caching=True,
        asynchronous=asynchronous,
        num_blocks=case.num_blocks,
        options={server._CONFIG_NAMES.get(name, name): value for name, value in options.items()},
        parallel=case.parallel,
    )
    gib = copies.host_blocks * _host_bytes(case, copies) / (1 << 30)
    offloading = {"kv_offloading_size": gib}

    def config_of(max_model_len: int, cache: dict[str, Any], scheduler: dict[str, Any], **others: Any) -> VllmConfig:
        return config_from(max_model_len, cache | offloading, scheduler, **others)

    with (
        mock.patch.object(server, "vllm_config", config_of),
        mock.patch.object(server, "Recorder", recorder_of),
        tiering.behind(copies.extra_config(1), copies.tiers),
    ):
        engine = start(setup)
    connector = engine.scheduler.connector.connector_scheduler
    manager = connector.manager
    assert getattr(manager, "primary_tier", manager)._num_chunks == copies.host_blocks
    behind = getattr(manager, "secondary_tiers", [])
    build = connector._build_connector_meta

    def in_order(output: SchedulerOutput) -> Any:
        # A set: its order differs from process to process.
        ended = {str(index): place for place, (_, index) in enumerate(finished)}
        output.finished_req_ids = dict.fromkeys(sorted(output.finished_req_ids, key=lambda name: ended.get(name, -1)))
        return build(output)

    connector._build_connector_meta = in_order
    clock, recorder = server.clock_of(engine, case.step_ticks), engine.model_executor
    for tier in behind:
        tier.clock, tier.copies = clock, recorder.ends
    prompts, outputs = server.tokens_of(case.workload)
    recorder.attach(engine, outputs, clock)
    arrivals, requests, finished, arrived, idle = case.workload.arrival_ticks.tolist(), [], [], 0, 0
    preempting = server.Preempting(recorder.steps)
    while True:
        # Of a copy that ends as a request arrives the scheduler hears first; vLLM has no order for them.
        known = not (
            recorder.idle and engine.scheduler.requests and any(end <= clock.now for end in recorder.ends.values())
        )
        while known and arrived < len(arrivals) and arrivals[arrived] <= clock.now:
            request = server._request(case, arrived, prompts[arrived], outputs[arrived], engine)
            requests.append(request)
            engine.add_request(request)
            arrived += 1
        events = [*recorder.ends.values(), *arrivals[arrived : arrived + 1]]
        if not (engine.scheduler.requests or arrived < len(arrivals)):
            counts = tuple(request.num_preemptions for request in requests)
            return Served(recorder.steps, finished, preemptions=counts), recorder
        if engine.scheduler.has_requests() or engine.batch_queue:
            recorder.idle, before, promotions = False, clock.now, sum(tier.promotions for tier in behind)
            answers, _ = engine.step_fn()
            for answer in (answers or {}).values():
                finished += [
                    (clock.now, int(one.request_id)) for one in answer.outputs if one.finish_reason is not None
                ]
            runs = any(future._runs for future, *_ in engine.batch_queue or ())
            idle = idle + 1 if recorder.idle and not runs and clock.now == before else 0
            events += [end for tier in behind for end in tier.ends()]
            if idle > server.MOST_IDLE or preempting.is_endless(answers):
                raise server.Stuck(case.name)
            if idle and events and promotions == sum(tier.promotions for tier in behind):
                # No step runs, the scheduler knows all that has ended by now, and its next turn at once would find what this one did.
                clock.wait_until(min(events))
        else:
            clock.wait_until(min(events))


def _host_bytes(case: Case, copies: Copies) -> int:
    """Bytes of a chunk on the host, of all workers; of the real ones each has such layers."""
    chosen = ours.settings_of(case, True, enable_prefix_caching=True)
    replica, ranks = build(chosen), chosen.tensor_parallel_size
    size = replica.block_size // chosen.value("decode_context_parallel_size")
    shape, stages = model(chosen.model), chosen.pipeline_parallel_size
    if replica.layout is None:
        own = block_bytes(shape, ranks, size, pipeline_parallel=stages)
    else:
        # Of the first stage, without the layers of a drafter.
        deployment = Deployment(pipeline_parallel=stages)
        first = deployment_stages(shape.num_layers, stages)[0]
        own = _stage_page_bytes(shape, replica.layout, ranks, size, deployment, first)
    drafts = chosen.policy_options.speculative
    if drafts is not None and not replica.page_bytes and stages == 1:
        own += (
            block_bytes(not_none(drafts.drafter(model(chosen.model))), 1, replica.block_size)
            if drafts.has_layers
            else 0
        )
    workers = stages * max(ranks, case.parallel.get("tensor_parallel_size", 1))
    return -(-own * workers * copies.chunk_blocks // _PAGE) * _PAGE


@dataclass(frozen=True)
class _Cost(ours.ConstantCost):
    """Every step takes as long, and every block."""

    copies: Copies = Copies(1, 0, 0)

    def swap_out_ticks(self, blocks: int) -> int:
        return self.copies.store_ticks * blocks

    def swap_in_ticks(self, blocks: int) -> int:
        return self.copies.load_ticks * blocks


def serve_ours(
    case: Case, copies: Copies, asynchronous: bool = False, log: StepLog | None = None, **others: Any
) -> Served:
    """What our engine does with a case, with ``others`` of the settings; ``log`` has the steps of a run that ends with an error."""
    log = log or StepLog()
    chunk_bytes = _host_bytes(case, copies)
    gib = copies.host_blocks * chunk_bytes / (1 << 30)
    if extra := copies.extra_config(chunk_bytes):
        others["kv_transfer_config"] = json.dumps({"kv_connector_extra_config": extra})
    chosen = ours.settings_of(case, asynchronous, enable_prefix_caching=True, kv_offloading_size=gib, **others)
    with tiering.timed(chunk_bytes, copies.tiers):
        run = simulate(chosen, case.workload, _Cost(case.step_ticks, copies=copies), observers=[log])
    return log.served(run)


def comparable(served: Served) -> Served:
    """The steps without what both logs note at another time: hits, evictions by loads, and steps that only wait for stores.

    Block tables, cached blocks and times show all of them.
    """
    steps = [step._replace(hits=(), evicted=0) for step in served.steps if step.scheduled or step.preempted]
    return served._replace(steps=steps)
