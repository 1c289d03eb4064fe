"""The engine core of the installed vLLM, unmodified, with an executor that computes nothing and writes every step down.

Everything between a request's arrival and the block tables is vLLM's: ``EngineCore.step`` and ``step_with_batch_queue``,
the scheduler, the KV cache manager and its pool, the configuration and its checks. Only three things are ours: the platform,
which has no device but allows what a GPU does; the executor; and the clock, which the executor's steps move.
"""

from __future__ import annotations

import os

# Before the first import of vLLM.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from vllm import platforms
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import BlockRemoved
from vllm.platforms.interface import UnspecifiedPlatform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import core
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from fragmeter.sim.workload.workload import Workload

from .layers import align_block_size, spec_of
from .shapes import Layer
from .steps import Served, Step
from .workloads import EOS, Case

#: Names of ``SchedulerConfig`` that are not those of the command line.
_CONFIG_NAMES = {"scheduling_policy": "policy"}
#: Positions of the model; cases are shorter.
_POSITIONS = 1 << 20
#: Tokens of one stream of contents, at most: a token's id is its stream's number times this, and its place.
_STREAM_TOKENS = 1 << 24


class BarePlatform(UnspecifiedPlatform):
    """No device, and the KV cache of a GPU."""

    device_type = "cpu"

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True


platforms.current_platform = BarePlatform()


@cache
def model_config(max_model_len: int) -> ModelConfig:
    """The configuration of a small Llama; its shape decides nothing here, as the pool's size is given in blocks."""
    return ModelConfig(model=_checkpoint(), skip_tokenizer_init=True, dtype="float16", max_model_len=max_model_len)


@cache
def _checkpoint() -> str:
    folder = tempfile.mkdtemp(prefix="model-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 1000,
        "max_position_embeddings": _POSITIONS,
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Setup:
    """A server.

    Attributes:
        layers: What the model keeps.
        num_blocks: Blocks of the pool, the null block included; None takes what ``available_bytes`` hold.
        disable_hybrid: Whether every layer keeps all tokens.
        asynchronous: Whether step k + 1 is scheduled while step k runs, as ``vllm serve`` does by default.
        available_bytes: Memory of the pool.
        options: Further options of vLLM's ``SchedulerConfig``, by name; it refuses what it does not know.
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


def vllm_config(setup: Setup) -> VllmConfig:
    """vLLM's own configuration of a server, checked by vLLM."""
    return VllmConfig(
        model_config=model_config(setup.max_model_len),
        cache_config=CacheConfig(
            block_size=setup.block_size,
            enable_prefix_caching=setup.prefix_caching,
            num_gpu_blocks_override=setup.num_blocks,
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=setup.max_model_len,
            is_encoder_decoder=False,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            async_scheduling=setup.asynchronous,
            disable_hybrid_kv_cache_manager=setup.disable_hybrid,
            **setup.options,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )


def start(setup: Setup) -> core.EngineCore:
    """vLLM's engine core, ready for requests.

    Raises:
        ValueError: vLLM refuses the configuration.
    """
    config = vllm_config(setup)
    align_block_size(config, setup.layers)
    # A server's heap is frozen once for its whole life, which takes longer here than all that follows.
    with mock.patch.object(core, "freeze_gc_heap"):
        return core.EngineCore(config, partial(Recorder, setup), log_stats=False)


def tokens_of(workload: Workload) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and outputs as token ids: equal where the contents are."""
    streams: dict[int, int] = {}
    runs = workload.token_runs()

    def ids(pieces: tuple[tuple[int, int, int], ...]) -> list[int]:
        found: list[int] = []
        for stream, start, length in pieces:
            base = streams.setdefault(stream, len(streams)) * _STREAM_TOKENS
            found += range(base + start, base + start + length)
        return found

    requests = range(len(workload))
    return [ids(runs.runs(i)) for i in requests], [ids(runs.output_runs(i)) for i in requests]


class Recorder(Executor):
    """Computes nothing: a step's results are there at once, and its time is added to the clock when they are fetched."""

    supports_pp = False

    def __init__(self, setup: Setup, config: VllmConfig) -> None:
        self._setup = setup
        super().__init__(config)

    def _init_executor(self) -> None:
        self.steps: list[Step] = []
        #: Sampled tokens of each request, given as they come.
        self.outputs: list[list[int]] = []
        self._sampled: Future[ModelRunnerOutput] = Future()
        self._events: list[Any] = []
        self._events_seen = 0

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def attach(self, engine: core.EngineCore, outputs: list[list[int]], clock: Clock) -> None:
        """Take the engine to look at, what requests generate, and the clock to move."""
        self.scheduler, self.outputs, self.clock = engine.scheduler, outputs, clock

    # What the engine asks of its workers when it starts.

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        layers = enumerate(self._setup.layers)
        return [{str(number): spec_of(layer, self.vllm_config) for number, layer in layers}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        # The order in which vLLM tries them where no attention backend asks for one.
        return [["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]]

    def set_kv_cache_layout(self, layout_name: str, cp_kv_cache_interleave_size: int) -> None:
        pass

    def determine_available_memory(self) -> list[int]:
        return [self._setup.available_bytes]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the engine asks its workers for {method}")

    def check_health(self) -> None:
        pass

    # Steps.

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
        # Empty steps flush what finished; they take no time.
        start = self.clock.reserve(bool(scheduled))
        if scheduled or preempted:
            self.steps.append(self._step(start, scheduled, preempted, output))
        names = list(output.num_scheduled_tokens)
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
        return Step(
            now=start,
            scheduled=scheduled,
            preempted=preempted,
            free=manager.block_pool.get_num_free_blocks(),
            cached=tuple(block.block_id for block in manager.block_pool.blocks if block.block_hash is not None),
            hits=tuple((index, found[index]) for index, _ in scheduled if index in found),
            evicted=self._evicted(manager.block_pool),
            tables=tuple((index, *map(tuple, groups)) for index, groups in sorted(tables.items()) if any(groups)),
        )

    def _evicted(self, pool: BlockPool) -> int:
        """Blocks that lost their contents since this was asked last."""
        if pool.kv_event_queue is not self._events:
            self._events, self._events_seen = pool.kv_event_queue, 0
        new = self._events[self._events_seen :]
        self._events_seen = len(self._events)
        return sum(len(event.block_hashes) for event in new if isinstance(event, BlockRemoved))


class Clock:
    """Simulated time; steps run one after the other, each as long.

    Attributes:
        now: End of the last step with fetched results, in ticks.
    """

    def __init__(self, step_ticks: int) -> None:
        self.now = self._free_at = 0
        self._step_ticks = step_ticks

    def reserve(self, runs: bool) -> int:
        """When a step that is scheduled now starts; ``runs`` is False for one that computes nothing."""
        start = max(self.now, self._free_at)
        if runs:
            self._free_at = start + self._step_ticks
        return start

    def pass_step(self) -> None:
        """The oldest step that runs is over."""
        self.now += self._step_ticks

    def wait_until(self, ticks: int) -> None:
        """Nothing runs until then."""
        self.now = max(self.now, ticks)


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


def serve(case: Case, asynchronous: bool = False) -> Served:
    """What the installed vLLM does with a case.

    Args:
        asynchronous: Whether step k + 1 is scheduled while step k runs, as ``vllm serve`` does by default.
    """
    engine = start(
        Setup(
            layers=case.layers,
            block_size=case.block_size,
            max_model_len=case.max_model_len,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            prefix_caching=case.prefix_caching,
            asynchronous=asynchronous,
            num_blocks=case.num_blocks,
            options={_CONFIG_NAMES.get(name, name): value for name, value in case.options.items()},
        )
    )
    clock, recorder = Clock(case.step_ticks), engine.model_executor
    prompts, outputs = tokens_of(case.workload)
    recorder.attach(engine, outputs, clock)
    arrivals, finished = case.workload.arrival_ticks.tolist(), []
    arrived = 0
    while True:
        while arrived < len(arrivals) and arrivals[arrived] <= clock.now:
            engine.add_request(_request(case, arrived, prompts[arrived], outputs[arrived], engine))
            arrived += 1
        if engine.scheduler.has_requests() or engine.batch_queue:
            answers, _ = engine.step_fn()
            for answer in (answers or {}).values():
                finished += [
                    (clock.now, int(one.request_id)) for one in answer.outputs if one.finish_reason is not None
                ]
        elif arrived < len(arrivals):
            clock.wait_until(arrivals[arrived])
        else:
            return Served(recorder.steps, finished)


def _request(case: Case, index: int, prompt: list[int], output: list[int], engine: core.EngineCore) -> Request:
    limits = SamplingParams(max_tokens=int(case.workload.max_tokens[index]))
    if case.ends[index] == EOS:
        limits.update_from_generation_config({}, eos_token_id=output[-1])
    return Request(
        request_id=str(index),
        prompt_token_ids=prompt,
        sampling_params=limits,
        pooling_params=None,
        # As of a server's clock, none of them are equal.
        arrival_time=float(case.workload.arrival_ticks[index]) + index * 1e-6,
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
