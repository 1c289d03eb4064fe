"""The engine core of the installed vLLM, unmodified, without a device. Importing this module imports vLLM.

Everything between a request's arrival and its block tables is vLLM's: the configuration and its checks, the scheduler, the
KV cache manager and the block pool. Two things are not: the platform, which has no device but allows what a GPU does, and
the executor, which computes nothing.
"""

from __future__ import annotations

import os

# Before the first import of vLLM.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import platforms
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import BlockRemoved
from vllm.platforms.interface import UnspecifiedPlatform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from ..memory.accounting.kv_groups import FULL, RING, SLIDING, PageGroups
from ..types.sequence import Sequence
from ..workload.content import Tokens

#: Positions of the model; requests are shorter.
_POSITIONS = 1 << 20
#: Tokens of one stream of contents, at most: a token's id is its stream's number times this, and its place.
_STREAM_TOKENS = 1 << 24
#: Bytes of memory that ``num_blocks`` never fills: the pool's size is given in blocks.
_AMPLE_BYTES = 1 << 50


class BarePlatform(UnspecifiedPlatform):  # type: ignore[misc]  # vLLM has no types here
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
        # With one KV head up to four ranks may divide the tokens of a sequence.
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 1000,
        "max_position_embeddings": _POSITIONS,
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def vllm_config(
    max_model_len: int,
    cache: Mapping[str, Any],
    scheduler: Mapping[str, Any],
    speculative: SpeculativeConfig | None = None,
    parallel: Mapping[str, Any] | None = None,
) -> VllmConfig:
    """vLLM's own configuration of a server, checked by vLLM, which refuses what it does not know.

    Args:
        cache, scheduler, parallel: Fields of vLLM's ``CacheConfig``, ``SchedulerConfig`` and ``ParallelConfig``.
        speculative: Drafter, if any.

    Raises:
        ValueError: vLLM refuses the configuration.
    """
    return VllmConfig(
        speculative_config=speculative,
        model_config=model_config(max_model_len),
        cache_config=CacheConfig(**cache),
        scheduler_config=SchedulerConfig(max_model_len=max_model_len, is_encoder_decoder=False, **scheduler),
        parallel_config=ParallelConfig(**(parallel or {})),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=cache["enable_prefix_caching"], publisher="null"),
    )


class IdleExecutor(Executor):  # type: ignore[misc]
    """Answers what the engine asks of its workers when it starts, and computes nothing.

    Args:
        specs: The KV cache specs of the model's layers, from the configuration.
        available_bytes: Memory of the pool.
    """

    supports_pp = False

    def __init__(
        self, specs: Callable[[VllmConfig], list[KVCacheSpec]], available_bytes: int, config: VllmConfig
    ) -> None:
        self._specs, self._available_bytes = specs, available_bytes
        super().__init__(config)

    def _init_executor(self) -> None:
        pass

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [{str(number): spec for number, spec in enumerate(self._specs(self.vllm_config))}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        # The order in which vLLM tries them where no attention backend asks for one.
        return [["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]]

    def set_kv_cache_layout(self, layout_name: str, cp_kv_cache_interleave_size: int) -> None:
        pass

    def determine_available_memory(self) -> list[int]:
        return [self._available_bytes]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the engine asks its workers for {method}")

    def check_health(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Future[Any]:
        raise NotImplementedError("the engine asks its workers for a step")


class Contents:
    """Token ids of prompts and outputs: equal where the contents are.

    Args:
        tokens: Contents of the workload; None takes any ids.
    """

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens
        self._streams: dict[int, int] = {}

    def prompt(self, sequence: Sequence) -> list[int]:
        """Ids of its prompt."""
        if self._tokens is None:
            return [0] * sequence.prompt_tokens
        return self._ids(self._tokens.runs(sequence.index))

    def output(self, sequence: Sequence) -> list[int]:
        """Ids of its output; no two of them are equal."""
        if self._tokens is None:
            return list(range(1, 1 + sequence.output_tokens))
        return self._ids(self._tokens.output_runs(sequence.index))

    def _ids(self, pieces: tuple[tuple[int, int, int], ...]) -> list[int]:
        found: list[int] = []
        for stream, start, length in pieces:
            base = self._streams.setdefault(stream, len(self._streams)) * _STREAM_TOKENS
            found += range(base + start, base + start + length)
        return found


class Scheduled(NamedTuple):
    """What a call of ``schedule`` decided; requests by the index of their sequence.

    Attributes:
        tokens: (request, tokens that it computes, tokens computed before them), in vLLM's order.
        preempted: Requests that gave up their blocks.
    """

    tokens: list[tuple[int, int, int]]
    preempted: set[int]


class Core:
    """vLLM's engine core, called step by step.

    Args:
        max_model_len: Longest prompt + output in tokens.
        cache, scheduler: See ``vllm_config``; ``num_gpu_blocks_override`` includes vLLM's null block.
        groups: KV groups of the model.
        tokens: Contents of the prompts; None where no prefixes are cached.

    Raises:
        ValueError: vLLM refuses the configuration.
    """

    def __init__(
        self,
        max_model_len: int,
        cache: Mapping[str, Any],
        scheduler: Mapping[str, Any],
        groups: PageGroups,
        tokens: Tokens | None,
    ) -> None:
        config = vllm_config(max_model_len, cache, scheduler)
        executor = partial(IdleExecutor, partial(_specs_of, groups), _AMPLE_BYTES)
        self._engine = EngineCore(config, executor, log_stats=False)
        self.scheduler = self._engine.scheduler
        self._contents = Contents(tokens)
        self._outputs: dict[str, list[int]] = {}
        #: What was scheduled and is not over yet, with the tokens that it samples.
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        #: Blocks that lost their contents so far, because blocks ran out.
        self.evicted_blocks = 0

    @property
    def pool(self) -> BlockPool:
        """The block pool; its block 0 is the null block."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def group_specs(self) -> list[KVCacheSpec]:
        """The spec of each KV group, as vLLM formed them."""
        return [group.kv_cache_spec for group in self.scheduler.kv_cache_config.kv_cache_groups]

    def add(self, sequence: Sequence) -> None:
        """A request arrives. It ends at its ``max_tokens``, or earlier at an EOS token."""
        output = self._contents.output(sequence)
        limits = SamplingParams(max_tokens=sequence.max_tokens)
        if sequence.output_tokens < sequence.max_tokens:
            limits.update_from_generation_config({}, eos_token_id=output[-1])
        name = str(sequence.index)
        self._outputs[name] = output
        self._engine.add_request(
            Request(
                request_id=name,
                prompt_token_ids=self._contents.prompt(sequence),
                sampling_params=limits,
                pooling_params=None,
                arrival_time=float(sequence.order),
                block_hasher=self._engine.request_block_hasher,
            )
        )

    def schedule(self) -> Scheduled:
        """Schedule a step. Nothing happens if no request runs or waits."""
        if not self._outputs:
            return Scheduled([], set())
        output = self.scheduler.schedule()
        self._count_evictions()
        names = list(output.num_scheduled_tokens)
        results = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[self._sample(name) for name in names],
        )
        self._in_flight.append((output, results))
        requests = self.scheduler.requests
        tokens = output.num_scheduled_tokens.items()
        return Scheduled(
            [(int(name), number, requests[name].num_computed_tokens - number) for name, number in tokens],
            {int(name) for name in output.preempted_req_ids or ()},
        )

    def end_steps(self, in_flight: int) -> set[int]:
        """The oldest scheduled steps are over, all but ``in_flight``: vLLM gets their tokens. Returns the finished requests."""
        finished: set[str] = set()
        while len(self._in_flight) > in_flight:
            self._count_evictions()
            self.scheduler.update_from_output(*self._in_flight.popleft())
            finished |= self._outputs.keys() - self.scheduler.requests.keys()
        for name in finished:
            del self._outputs[name]
        return set(map(int, finished))

    def waiting(self) -> list[int]:
        """The queue, as the scheduler has it."""
        return [int(request.request_id) for request in self.scheduler.waiting]

    def computed_tokens(self) -> dict[int, int]:
        """Tokens that each running request has computed, those of the scheduled step included."""
        return {int(request.request_id): request.num_computed_tokens for request in self.scheduler.running}

    def tables(self) -> dict[int, tuple[list[int], ...]]:
        """Block ids of each running request in each KV group; 0 where a group keeps nothing any more."""
        manager = self.scheduler.kv_cache_manager
        return {int(each.request_id): manager.get_block_ids(each.request_id) for each in self.scheduler.running}

    def table_lengths(self, group: int) -> dict[int, int]:
        """Entries of the block table of each running request in a KV group."""
        manager = self.scheduler.kv_cache_manager
        running = self.scheduler.running
        return {int(each.request_id): len(manager.get_blocks(each.request_id).blocks[group]) for each in running}

    def cached_free_blocks(self) -> int:
        """Blocks in no table that a look-up can find."""
        return sum(block.ref_cnt == 0 and block.block_hash is not None for block in self.pool.blocks)

    def _sample(self, name: str) -> list[int]:
        """The token that the step just scheduled samples for a request; none before all its known tokens are computed."""
        request = self.scheduler.requests[name]
        if request.is_prefill_chunk:
            return []
        # Steps in flight sample a token each; that of this step is the last one.
        place = request.num_output_tokens + max(0, request.num_output_placeholders - 1)
        # vLLM discards what is computed after an EOS.
        return self._outputs[name][place : place + 1] or [0]

    def _count_evictions(self) -> None:
        """Count the evictions that the pool noted since the last call; vLLM takes its notes in ``update_from_output``."""
        events = self.pool.take_events()
        self.evicted_blocks += sum(len(event.block_hashes) for event in events if isinstance(event, BlockRemoved))


def _specs_of(groups: PageGroups, config: VllmConfig) -> list[KVCacheSpec]:
    """A layer for each KV group, from which vLLM forms the same groups: one kind has one group."""
    cache = config.cache_config
    shape = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float16}
    full = FullAttentionSpec(block_size=cache.block_size, **shape)
    specs = {
        FULL: full,
        SLIDING: SlidingWindowSpec(block_size=cache.block_size, sliding_window=groups.window_tokens or 1, **shape),
        # A buffer of one token, in a page of the size of the others'.
        RING: CircularBufferSpec(block_size=1, page_size_padded=full.page_size_bytes, **shape),
    }
    # A state of four bytes, in a page of the size of the others'.
    state = MambaSpec(
        shapes=((1,),),
        dtypes=(torch.float32,),
        block_size=cache.block_size if groups.states_by_block else config.model_config.max_model_len,
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_prefill_checkpoint_blocks=int(groups.exports_states),
        prefill_checkpoint_alignment=1 if groups.exports_states else None,
    )
    return [specs.get(kind, state) for kind in groups.kinds]
