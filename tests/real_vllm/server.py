"""The engine core of the installed vLLM, unmodified, with an executor that computes nothing and writes every step down.

Everything between a request's arrival and the block tables is vLLM's: ``EngineCore.step`` and ``step_with_batch_queue``,
the scheduler, the KV cache manager and its pool, the configuration and its checks. Only three things are ours: the platform,
which has no device but allows what a GPU does; the executor; and the clock, which the executor's steps move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.config import VllmConfig
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import core
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from fragmeter.sim.real_vllm.core import Contents, IdleExecutor, vllm_config
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.workload.workload import Workload
from tools.live.step_log import Served, Step

from .layers import align_block_size, is_packed, spec_of
from .shapes import Layer, drafter_layers
from .workloads import EOS, Case

#: Names of ``SchedulerConfig`` that are not those of the command line.
_CONFIG_NAMES = {"scheduling_policy": "policy"}
#: Names of ``CacheConfig``.
_CACHE_NAMES = ("prefix_cache_retention_interval",)


@dataclass(frozen=True)
class Setup:
    """A server.

    Attributes:
        layers: What the model keeps.
        num_blocks: Blocks of the pool, the null block included; None takes what ``available_bytes`` hold.
        disable_hybrid: Whether every layer keeps all tokens.
        asynchronous: Whether step k + 1 is scheduled while step k runs, as ``vllm serve`` does by default.
        available_bytes: Memory of the pool.
        options: Further options of vLLM's ``SchedulerConfig``, and those of ``_CACHE_NAMES``, by name; it refuses what it does not know.
        parallel: Options of its ``ParallelConfig``.
    """

    layers: tuple[Layer, ...]
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    asynchronous: bool
    num_blocks: int | None = None
    disable_hybrid: bool = False
    available_bytes: int = 1 << 40
    options: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)


def config_of(setup: Setup) -> VllmConfig:
    """vLLM's own configuration of a server, checked by vLLM."""
    return vllm_config(
        setup.max_model_len,
        {
            "block_size": setup.block_size,
            "enable_prefix_caching": setup.prefix_caching,
            "num_gpu_blocks_override": setup.num_blocks,
            **{name: value for name, value in setup.options.items() if name in _CACHE_NAMES},
        },
        {
            "max_num_seqs": setup.max_num_seqs,
            "max_num_batched_tokens": setup.max_num_batched_tokens,
            "async_scheduling": setup.asynchronous,
            "disable_hybrid_kv_cache_manager": setup.disable_hybrid,
            **{name: value for name, value in setup.options.items() if name not in _CACHE_NAMES},
        },
        parallel=setup.parallel,
    )


def start(setup: Setup) -> core.EngineCore:
    """vLLM's engine core, ready for requests.

    Raises:
        ValueError: vLLM refuses the configuration.
    """
    config = config_of(setup)
    align_block_size(config, setup.layers)
    if is_packed(setup.layers):
        config.cache_config.kv_cache_layout = "BLHNC"
    # A server's heap is frozen once for its whole life, which takes longer here than all that follows.
    with mock.patch.object(core, "freeze_gc_heap"):
        return core.EngineCore(config, partial(Recorder, setup), log_stats=False)


def tokens_of(workload: Workload) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and outputs as token ids: equal where the contents are."""
    contents = Contents(workload.token_runs())
    lengths = zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist())
    sequences = [Sequence(index, prompt, output, output) for index, (prompt, output) in enumerate(lengths)]
    return [contents.prompt(each) for each in sequences], [contents.output(each) for each in sequences]


class Recorder(IdleExecutor):
    """Computes nothing: a step's results are there at once, and its time is added to the clock when they are fetched."""

    supports_pp = True

    def __init__(self, setup: Setup, config: VllmConfig) -> None:
        self._layers = setup.layers
        super().__init__(partial(_specs_of, setup), setup.available_bytes, config)

    def _init_executor(self) -> None:
        self.steps: list[Step] = []
        #: Sampled tokens of each request, given as they come.
        self.outputs: list[list[int]] = []
        self._sampled: Future[ModelRunnerOutput] = Future()
        #: Blocks that lost their contents since the last step. One may have several hashes: vLLM then has as many events.
        self._evicted = 0

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Of a worker of each stage; the last one has the drafter."""
        own, stages = self._specs(self.vllm_config), self.vllm_config.parallel_config.pipeline_parallel_size
        target = len(own) - _drafter_layers(self._layers, self.vllm_config)
        # Layers of one stage are known by their number.
        named = (f"{stage}." if stages > 1 else "" for stage in range(stages))
        return [
            {f"{name}{number}": spec for number, spec in enumerate(own[: target if stage < stages - 1 else None])}
            for stage, name in enumerate(named)
        ]

    def determine_available_memory(self) -> list[int]:
        return [self._available_bytes] * self.vllm_config.parallel_config.pipeline_parallel_size

    def attach(self, engine: core.EngineCore, outputs: list[list[int]], clock: Clock) -> None:
        """Take the engine to look at, what requests generate, and the clock to move."""
        self.scheduler, self.outputs, self.clock = engine.scheduler, outputs, clock
        self._count_evicted(engine.scheduler.kv_cache_manager.block_pool)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Future[Any]:
        """A step has been scheduled: write down what it does, and say what it samples."""
        self._sampled = self._run(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            done: Future[Any] = Future()
            done.set_result(None)
            return done
        return self._sampled

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._sampled if non_block else self._sampled.result()

    def _run(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        scheduled = tuple((int(name), tokens) for name, tokens in output.num_scheduled_tokens.items())
        preempted = tuple(sorted(int(name) for name in output.preempted_req_ids or ()))
        names = list(output.num_scheduled_tokens)
        if isinstance(self.clock, StagesClock):
            drafts = output.scheduled_spec_decode_tokens
            unknown = [
                name
                for name in names
                if self.scheduler.requests[name].num_output_placeholders > 1 + len(drafts.get(name, ()))
            ]
            self.clock.batch = names, unknown
        # Empty steps flush what finished; they take no time.
        start = self.clock.reserve(bool(scheduled))
        if scheduled or preempted:
            self.steps.append(self._step(start, scheduled, preempted, output))
        results = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[self._sample(name) for name in names],
        )
        return Result(results, self.clock, bool(scheduled))

    def _sample(self, name: str) -> list[int]:
        """The next token of a request; none before all its known tokens are computed."""
        request = self.scheduler.requests[name]
        # What is known by then: with steps in flight, that they will have sampled, too.
        generated = request.num_output_tokens + max(0, request.num_output_placeholders - 1)
        if request.is_prefill_chunk:
            return []
        return self.outputs[int(name)][generated : generated + 1] or [0]

    def _step(
        self, start: int, scheduled: tuple[tuple[int, int], ...], preempted: tuple[int, ...], output: SchedulerOutput
    ) -> Step:
        scheduler = self.scheduler
        manager = scheduler.kv_cache_manager
        tables = {int(name): manager.get_block_ids(name) for name in scheduler.requests}
        # Those that come back after a preemption are listed last; the schedule has them in order.
        found = {int(new.req_id): new.num_computed_tokens for new in output.scheduled_new_reqs}
        # Blocks that only wait for batches in flight count as free, as no table has them.
        waiting = {block.block_id for _, blocks in scheduler.deferred_frees for block in blocks}
        waiting.difference_update(block for groups in tables.values() for table in groups for block in table)
        return Step(
            now=start,
            scheduled=scheduled,
            preempted=preempted,
            free=manager.block_pool.get_num_free_blocks() + len(waiting),
            cached=tuple(block.block_id for block in manager.block_pool.blocks if block.block_hash is not None),
            hits=tuple((index, found[index]) for index, _ in scheduled if index in found),
            evicted=self._take_evicted(),
            tables=tuple((index, *map(tuple, groups)) for index, groups in sorted(tables.items()) if any(groups)),
        )

    def _take_evicted(self) -> int:
        evicted, self._evicted = self._evicted, 0
        return evicted

    def _count_evicted(self, pool: BlockPool) -> None:
        evict = pool._maybe_evict_cached_block

        def evict_one(block: Any) -> bool:
            evicted = evict(block)
            self._evicted += evicted
            return evicted

        pool._maybe_evict_cached_block = evict_one


def _specs_of(setup: Setup, config: VllmConfig) -> list[KVCacheSpec]:
    specs, drafts = [spec_of(layer, config) for layer in setup.layers], config.speculative_config
    if drafts is not None and drafts.use_eagle():
        # The drafter's layer comes last; vLLM's model runner marks it so.
        last = len(specs) - _drafter_layers(setup.layers, config)
        specs[last:] = (replace(spec, is_draft=True) for spec in specs[last:])
    return specs


def _drafter_layers(layers: Iterable[Layer], config: VllmConfig) -> int:
    drafts = config.speculative_config
    return 0 if drafts is None else len(drafter_layers(layers, drafts.method))


class Clock:
    """Simulated time; steps run one after the other, each as long.

    Attributes:
        now: End of the last step with fetched results, in ticks.
    """

    def __init__(self, step_ticks: int) -> None:
        self.now = 0
        self._step_ticks = step_ticks
        self._durations: deque[int] = deque()

    @property
    def free_at(self) -> int:
        """When the next step may start."""
        return self.now + sum(self._durations)

    def reserve(self, runs: bool, wait: int = 0) -> int:
        """When a step that is scheduled now starts; ``runs`` is False for one that computes nothing, and each waits so long first."""
        start = self.free_at
        if runs or wait:
            self._durations.append(wait + runs * self._step_ticks)
        return start

    def pass_step(self) -> None:
        """The oldest step that runs is over."""
        self.now += self._durations.popleft()

    def wait_until(self, ticks: int) -> None:
        """Nothing runs until then."""
        self.now = max(self.now, ticks)


class StagesClock(Clock):
    """As ``Clock``, of a pipeline: each stage takes the same share of a step, one step after the other.

    Attributes:
        batch: Requests that the next step computes, and those of them whose last token is not known, for which it waits.
    """

    def __init__(self, step_ticks: int, stages: int) -> None:
        super().__init__(step_ticks)
        self.batch: tuple[list[str], list[str]] = [], []
        self._stages = [0] * stages
        self._ends: deque[int] = deque()
        self._end_of: dict[str, int] = {}

    @property
    def free_at(self) -> int:
        """When the first stage is free."""
        return max(self.now, self._stages[0])

    def reserve(self, runs: bool, wait: int = 0) -> int:
        start, (names, unknown) = self.free_at, self.batch
        end = start + wait
        if wait:
            self._stages[0] = end
        if runs:
            end = max([end, *(self._end_of[name] for name in unknown)])
            for stage, free_at in enumerate(self._stages):
                end = self._stages[stage] = max(end, free_at) + self._step_ticks // len(self._stages)
            self._end_of |= dict.fromkeys(names, end)
        if runs or wait:
            self._ends.append(end)
        return start

    def pass_step(self) -> None:
        self.now = max(self.now, self._ends.popleft())


class Result(Future):
    """What a step sampled; to fetch it takes as long as the step."""

    def __init__(self, output: ModelRunnerOutput, clock: Clock, runs: bool) -> None:
        super().__init__()
        self._clock, self._runs = clock, runs
        self.set_result(output)

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if self._runs:
            self._clock.pass_step()
            self._runs = False
        return super().result(timeout)


def started(
    case: Case,
    asynchronous: bool = False,
    options: Mapping[str, Any] | None = None,
    parallel: Mapping[str, Any] | None = None,
) -> core.EngineCore:
    """The engine core for a case; see ``serve``."""
    return start(
        Setup(
            layers=case.layers,
            block_size=case.block_size,
            max_model_len=case.max_model_len,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            prefix_caching=case.prefix_caching,
            asynchronous=asynchronous,
            num_blocks=case.num_blocks,
            options={
                _CONFIG_NAMES.get(name, name): value for name, value in {**case.options, **(options or {})}.items()
            },
            parallel=parallel or case.parallel,
        )
    )


def clock_of(engine: core.EngineCore, step_ticks: int) -> Clock:
    """The clock of an engine, by its pipeline stages."""
    stages = engine.vllm_config.parallel_config.pipeline_parallel_size
    return Clock(step_ticks) if stages == 1 else StagesClock(step_ticks, stages)


class Stuck(Exception):
    """The real scheduler has requests, none of which ever gets another token."""


#: Steps without a token, one after the other, from which on a scheduler is taken to be stuck.
MOST_IDLE = 1000
#: Steps that preempt, with no token between them, from which on sequences are taken to preempt each other for ever.
MOST_PREEMPTING = 100


class Preempting:
    """Counts the steps that preempt since the last token."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps, self._seen, self._count = steps, len(steps), 0

    def is_endless(self, answers: Mapping[int, Any] | None) -> bool:
        """Whether sequences preempt each other for ever, asked after each step."""
        self._count += sum(bool(step.preempted) for step in self._steps[self._seen :])
        self._seen = len(self._steps)
        if any(one.new_token_ids for answer in (answers or {}).values() for one in answer.outputs):
            self._count = 0
        return self._count > MOST_PREEMPTING


def serve(
    case: Case,
    asynchronous: bool = False,
    options: Mapping[str, Any] | None = None,
    parallel: Mapping[str, Any] | None = None,
) -> Served:
    """What the installed vLLM does with a case.

    Args:
        asynchronous: Whether step k + 1 is scheduled while step k runs, as ``vllm serve`` does by default.
        options, parallel: Further options; see ``Setup``.
    """
    engine = started(case, asynchronous, options, parallel)
    clock = clock_of(engine, case.step_ticks)
    recorder = engine.model_executor
    prompts, outputs = tokens_of(case.workload)
    recorder.attach(engine, outputs, clock)
    arrivals, finished = case.workload.arrival_ticks.tolist(), []
    frontend = Frontend(engine, [len(prompt) for prompt in prompts])
    arrived, requests, idle, preempting = 0, {}, 0, Preempting(recorder.steps)
    while True:
        while arrived < len(arrivals) and arrivals[arrived] <= clock.now:
            if frontend.accepts(arrived, arrivals[arrived]):
                requests[arrived] = _request(case, arrived, prompts[arrived], outputs[arrived], engine)
                engine.add_request(requests[arrived])
            arrived += 1
        if engine.scheduler.has_requests() or engine.batch_queue:
            before = clock.now
            answers, _ = engine.step_fn()
            idle = 0 if clock.now > before else idle + 1
            if idle > MOST_IDLE or preempting.is_endless(answers):
                raise Stuck(f"{case.name}: from {clock.now} on no request of the real scheduler gets a token")
            for answer in (answers or {}).values():
                frontend.answer(answer.outputs, clock.now)
                finished += [
                    (clock.now, int(one.request_id)) for one in answer.outputs if one.finish_reason is not None
                ]
        elif arrived < len(arrivals):
            clock.wait_until(arrivals[arrived])
        else:
            counts = (requests[each].num_preemptions if each in requests else 0 for each in range(arrived))
            return Served(recorder.steps, finished, tuple(frontend.rejected), tuple(counts))


class Frontend:
    """What the API server knows of requests, and vLLM's ``check_admission``, which judges by it.

    Attributes:
        rejected: Requests that were rejected so far.
    """

    #: vLLM has these statistics only with several API servers, and logs only where metrics are on.
    admission_stats = logger_manager = None
    _record_admission_rejection = AsyncLLM._record_admission_rejection
    get_num_unfinished_requests = AsyncLLM.get_num_unfinished_requests
    get_num_queued_tokens = AsyncLLM.get_num_queued_tokens

    def __init__(self, engine: core.EngineCore, prompt_tokens: list[int]) -> None:
        self.scheduler_config = engine.vllm_config.scheduler_config
        self.rejected: list[int] = []
        self._prompt_tokens = prompt_tokens
        self._accepted: list[int] = []
        self._first_token_at: dict[int, int] = {}
        self._finished_at: dict[int, int] = {}
        self.output_processor = OutputProcessor.__new__(OutputProcessor)

    def answer(self, outputs: Iterable[Any], now: int) -> None:
        """Note the answers that arrive ``now``."""
        for one in outputs:
            self._first_token_at.setdefault(int(one.request_id), now)
            if one.finish_reason is not None:
                self._finished_at[int(one.request_id)] = now

    def accepts(self, request: int, now: int) -> bool:
        """Whether a request that arrives ``now`` is accepted, by the answers up to then."""
        self.output_processor.request_states = {
            str(index): SimpleNamespace(
                prompt_len=self._prompt_tokens[index], is_prefilling=self._first_token_at.get(index, now + 1) > now
            )
            for index in self._accepted
            if self._finished_at.get(index, now + 1) > now
        }
        try:
            AsyncLLM.check_admission(self, 1, str(request))
        except (QueueOverflowError, MaxQueuedTokensError):
            self.rejected.append(request)
            return False
        self._accepted.append(request)
        return True


def _request(case: Case, index: int, prompt: list[int], output: list[int], engine: core.EngineCore) -> Request:
    limits = SamplingParams(max_tokens=int(case.workload.max_tokens[index]))
    if case.ends[index] == EOS:
        limits.update_from_generation_config({}, eos_token_id=output[-1])
    return Request(
        request_id=str(index),
        prompt_token_ids=prompt,
        sampling_params=limits,
        pooling_params=None,
        # Ticks are nanoseconds. As of a server's clock, no two arrivals are equal.
        arrival_time=int(case.workload.arrival_ticks[index]) / 1e9 + index * 1e-12,
        priority=0 if case.workload.priority is None else int(case.workload.priority[index]),
        block_hasher=engine.request_block_hasher,
    )


@contextmanager
def older_free_queue() -> Iterator[None]:
    """The rule of vLLM before its pull request 42656: every freed block goes to the tail, whether hashed or not."""

    def free_blocks(pool: BlockPool, ordered_blocks: Any) -> None:
        blocks = list(ordered_blocks)
        for block in blocks:
            block.ref_cnt -= 1
        pool.free_block_queue.append_n([block for block in blocks if block.ref_cnt == 0 and not block.is_null])

    with mock.patch.object(BlockPool, "free_blocks", free_blocks):
        yield
