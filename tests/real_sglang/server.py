"""The scheduler of the installed SGLang, unmodified, over a model that computes nothing; every step is written down.

SGLang's own: the queue's order, ``PrefillAdder``, the ratio of new tokens, ``ScheduleBatch``, the allocators, the radix
cache, and what follows a step's results. The module of its scheduler cannot be imported without a GPU: the methods of
``DECISIONS`` are taken out of its file and run on a stand-in. Ours are the loop (``event_loop_normal``: receive, decide,
run, process, else idle; or ``event_loop_overlap``: results are processed when the next step has been decided), the clock, and the
tokens.
"""

from __future__ import annotations

import ast
import hashlib
import re
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from . import stubs
from .steps import Served, Step, tokens_of
from .workloads import LAYERS, Case

stubs.install()

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context, get_memory, get_parallel, get_schedule
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

#: Methods of ``Scheduler`` that decide what a step does.
DECISIONS = (
    "get_next_batch_to_run",
    "get_new_batch_prefill",
    "_get_new_batch_prefill_raw",
    "update_running_batch",
    "get_num_allocatable_reqs",
    "stash_chunked_request",
    "process_pending_chunked_abort",
    "_process_hicache_events",
    "_should_defer_prefill",
    "_arm_prefill_decode_interval",
    "_reqs_finishing_inflight",
    "_add_request_to_queue",
    "_set_or_validate_priority",
    "_abort_on_queued_limit",
    "init_req_max_new_tokens",
)
#: ``--max-prefill-tokens``.
MAX_PREFILL_TOKENS = 16_384
#: No token that a request generates.
EOS_TOKEN = 0
_ABORTS = "SGLang aborts a request"
#: What SGLang says where a step finds no slot or no state.
_OUT_OF_MEMORY = re.compile(
    f"^Out of memory|alloc_req_slots runs out|Not enough space for mamba|Can not alloc mamba|{_ABORTS}"
)


def _decisions() -> dict[str, ast.FunctionDef]:
    spec = find_spec("sglang.srt.managers.scheduler")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    (scheduler,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Scheduler")
    return {node.name: node for node in scheduler.body if isinstance(node, ast.FunctionDef) and node.name in DECISIONS}


def decisions_digest() -> str:
    """Digest of the methods that are taken out of SGLang's file, without their comments."""
    found = _decisions()
    return hashlib.sha256("\n".join(ast.unparse(found[name]) for name in DECISIONS).encode()).hexdigest()[:16]


class _WindowPool(BaseSWAKVPool):
    """Of the KV cache of a model with windows what its allocator asks for."""

    full_kv_pool = swa_kv_pool = None

    def __init__(self) -> None:
        pass

    def register_mapping(self, mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = mapping

    def translate_loc_from_full_to_swa(self, indices: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa_index_mapping[indices]


# The others move data.
_WindowPool.__abstractmethods__ = frozenset()


def window_allocator(slots: int, window_slots: int, page: int, device: str) -> SWATokenToKVPoolAllocator:
    """Of a model with windows, whose KV cache is a stand-in."""
    found = SWATokenToKVPoolAllocator(slots, window_slots, page, torch.float16, device, _WindowPool(), False)
    if page > 1:
        found.full_attn_allocator.use_triton_kernels = found.swa_attn_allocator.use_triton_kernels = False
    return found


def state_rows(
    rows: int, longest: int, states: int, device: str, extra_buffer: bool, overlap: bool
) -> HybridReqToTokenPool:
    """Rows of requests of a model with states, of one layer and few bytes."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=4, n_groups=1, num_heads=1, head_dim=4, state_size=2, conv_kernel=2
    )
    return HybridReqToTokenPool(
        size=rows,
        mamba_size=states,
        mamba_spec_state_size=rows,
        max_context_len=longest,
        device=device,
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=extra_buffer,
        enable_overlap_schedule=overlap,
    )


@contextmanager
def published(chunk: int = 0, **fields: Any) -> Iterator[None]:
    """With these arguments of the server; ``chunk`` is the tokens of a chunk of the kernels of layers with a state."""
    with get_context().override_server_args(**fields) as args:
        if chunk:
            args._mamba_cache_chunk_size = chunk
        yield


class _NoStats:
    """Of a prefill, for the log."""

    @staticmethod
    def from_adder(*args: Any, **kwargs: Any) -> None:
        return None


def _methods() -> dict[str, Any]:
    names = {
        "AddReqResult": AddReqResult,
        "DisaggregationMode": DisaggregationMode,
        "NextBatchPlan": NextBatchPlan,
        "PrefillAdder": PrefillAdder,
        "PrefillStats": _NoStats,
        "SCHEDULER_STAGE_GET_NEXT_BATCH": "",
        "ScheduleBatch": ScheduleBatch,
        "TEST_RETRACT": False,
        "_make_abort_req": lambda *args, **kwargs: None,
        "TEST_RETRACT_NO_PREFILL_BS": 0,
        "TEST_RETRACT_INTERVAL": 1,
        "checkpoint_kv_cache": checkpoint_kv_cache,
        "get_memory": get_memory,
        "get_parallel": get_parallel,
        "get_schedule": get_schedule,
        "logger": MagicMock(),
        "scheduler_stage_method": lambda stage: lambda method: method,
        "set_schedule_time_batch": lambda batch: None,
        "set_time_batch": lambda requests, name: None,
        "sys": __import__("sys"),
        "torch": torch,
    }
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], *_decisions().values()], [])
    exec(compile(module, "sglang/srt/managers/scheduler.py", "exec"), names)
    return {name: names[name] for name in DECISIONS}


class Ordered(dict[Any, None]):
    """A set that knows the order of its members; those of ``schedule_policy`` are sets of objects, in the order of their addresses."""

    def __init__(self, members: Iterable[Any] = ()) -> None:
        super().__init__(dict.fromkeys(members))

    def add(self, member: Any) -> None:
        self[member] = None


schedule_policy.set = Ordered


class Times:
    """The times of a request, of which the scheduler reads one: by a clock that ticks whenever a request joins the queue."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self.wait_queue_entry_time = scheduler, 0

    def set_wait_queue_entry_time(self) -> None:
        self._scheduler.joined += 1
        self.wait_queue_entry_time = self._scheduler.joined

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Scheduler:
    """Of ``Scheduler`` what its decisions read."""

    def __init__(self, case: Case) -> None:
        overlaps = case.overlaps
        self.page_size, device, self.joined = case.page_size, "cpu", 0
        pool = (case.num_slots, torch.float16, device, MagicMock(), False)
        if case.window and case.unified:
            from . import unified

            self.token_to_kv_pool_allocator: Any = unified.window_pool(
                case.num_slots, case.window_slots, case.window_bytes, case.page_size
            )
        elif case.window:
            self.token_to_kv_pool_allocator = window_allocator(
                case.num_slots, case.window_slots, case.page_size, device
            )
        elif case.page_size == 1:
            self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(*pool)
        else:
            self.token_to_kv_pool_allocator = PagedTokenToKVPoolAllocator(case.num_slots, case.page_size, *pool[1:])
            self.token_to_kv_pool_allocator.use_triton_kernels = False
        longest = case.num_slots + case.page_size
        copied = bool(case.state_rules.tracked)
        if case.unified and case.states:
            from . import unified

            pools = unified.state_pools(
                case.max_num_seqs,
                longest,
                case.num_slots,
                case.states,
                case.state_bytes,
                case.page_size,
                copied,
                overlaps,
            )
            self.req_to_token_pool: Any = pools.rows
            self.token_to_kv_pool_allocator = pools.allocator
        elif case.states:
            self.req_to_token_pool = state_rows(case.max_num_seqs, longest, case.states, device, copied, overlaps)
        else:
            self.req_to_token_pool = ReqToTokenPool(case.max_num_seqs, longest, device, False)
        params = CacheInitParams(
            disable=not case.prefix_caching,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            page_size=case.page_size,
            tree_components=(
                ComponentType.FULL,
                *[ComponentType.SWA][: bool(case.window)],
                *[ComponentType.MAMBA][: bool(case.states)],
            ),
            sliding_window_size=case.window or None,
            enable_mamba_extra_buffer=copied,
        )
        self.tree_cache = UnifiedRadixCache(params)
        self.link = self.host = self.beside_host = None
        if case.hicache_ratio:
            from . import hicache

            self.host = hicache.host_pool(case.num_slots, case.page_size, case.hicache_ratio)
            self.host.page_ticks = case.page_ticks
            if case.window or case.states:
                slots, page = (case.window_slots, case.page_size) if case.window else (case.states, 1)
                self.beside_host = hicache.host_pool(slots, page, case.hicache_ratio)
                self.beside_host.page_ticks = case.component_ticks
            self.link = hicache.Link(LAYERS)
            policy = case.hicache_write_policy
            hicache.attach(self.tree_cache, self.host, policy, self.link, LAYERS, self.beside_host)
        by_priority, low_first = case.enable_priority_scheduling, case.schedule_low_priority_values_first
        self.policy = SchedulePolicy(case.schedule_policy, self.tree_cache, False, by_priority, low_first)
        self.new_token_ratio_tracker = NewTokenRatioTracker.from_config()
        self.max_running_requests = case.max_num_seqs
        self.max_prefill_tokens = MAX_PREFILL_TOKENS
        self.chunked_prefill_size = case.max_num_batched_tokens
        most = case.num_slots
        if case.unified and case.window:
            # ``hybrid_swa_token_capacity``.
            most = self.token_to_kv_pool_allocator.size_full
            most = min(most, case.num_slots) if case.is_bounded else most
        self.max_total_num_tokens, self.max_req_len = most, most - 1
        self.model_config = SimpleNamespace(
            is_encoder_decoder=False,
            vocab_size=1 << 40,
            self_opened_think_start_ids=None,
            think_end_ids=None,
            hf_text_config=SimpleNamespace(mamba_chunk_size=case.state_chunk),
        )
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.disaggregation_mode = DisaggregationMode.NULL
        self.waiting_queue: list[Req] = []
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.last_batch: ScheduleBatch | None = None
        self.result_queue: deque[Any] = deque()
        self.chunked_req = self.dllm_config = self.prefill_delayer = self.min_free_slots_delayer = None
        self.dynamic_chunk_sizer = self.truncation_align_size = self._pending_chunked_abort_req = None
        self.decode_offload_manager = self.hisparse_coordinator = None
        self.sliding_window_size = case.window or None
        self.max_new_tokens_limit = self.max_queued_requests = None
        self.enable_hierarchical_cache = bool(case.hicache_ratio)
        self.enable_hicache_storage = self.enable_lmcache = False
        self.enable_unified_cache_external_linker = self.enable_hisparse = self.enable_lora = False
        self.enable_priority_scheduling, self.schedule_low_priority_values_first = by_priority, low_first
        self.enable_priority_preemption = by_priority and not case.disable_priority_preemption
        self.priority_scheduling_preemption_threshold = case.priority_scheduling_preemption_threshold
        self.is_hybrid_swa = bool(case.window)
        self.abort_on_priority_when_disabled = self.is_mixed_chunk = self.require_mlp_sync = False
        self.enable_overlap = self.enable_skip_finishing_decode = overlaps
        self._prefill_decode_interval_remaining = self.prefill_decode_interval = 0
        self.prefill_decode_interval_min_bs = self.processed_tokens_counter = self.forward_ct = 0
        self.max_prefill_bs = 0
        self.kv_shard_widening = 1
        self.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
        self.beam_coordinator = SimpleNamespace(pending_member_rows=lambda batch: 0)
        self.dp_attn_adapter = SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        )
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, chunked_req: batch)
        self.metrics_reporter = MagicMock(enable_metrics=False, num_generated_tokens=0, forward_ct_decode=0)
        self.load_inquirer = MagicMock()
        self.tp_worker = SimpleNamespace(
            model_runner=SimpleNamespace(attn_backend=object(), prefill_aware_swa=False),
        )
        self.results = SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=self.disaggregation_mode,
            enable_overlap=overlaps,
            enable_overlap_mlx=False,
            model_config=self.model_config,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=None,
            req_to_token_pool=self.req_to_token_pool,
            decode_offload_manager=None,
            metrics_collector=MagicMock(),
            metrics_reporter=self.metrics_reporter,
            draft_worker=None,
            model_worker=SimpleNamespace(),
            logprob_result_processor=MagicMock(),
            output_streamer=MagicMock(),
            beam_coordinator=MagicMock(commit_decode=lambda batch: set()),
            abort_request=MagicMock(),
        )
        self.get_prefill_adder_class = lambda: PrefillAdder

    def now_is(self, now: int, forward_end: int) -> None:
        """Set the clock of the copies, and when the forward stream has done all that it has."""
        if self.link is not None:
            self.link.now, self.link.forward_end = now, forward_end

    def send_abort_output(self, *args: Any) -> None:
        raise RuntimeError(_ABORTS)

    def _prefetch_kvcache(self, request: Req) -> None:
        """From a storage that there is not."""


for _name, _method in _methods().items():
    setattr(Scheduler, _name, _method)


def serve(case: Case) -> Served:
    """What the installed SGLang does with a case.

    Raises:
        RuntimeError: SGLang aborts a request.
    """
    fields = {
        "schedule_policy": case.schedule_policy,
        "page_size": case.page_size,
        "chunked_prefill_size": case.max_num_batched_tokens,
        "attention_backend": "torch_native",
        "pp_max_micro_batch_size": case.max_num_seqs,
        "disable_radix_cache": not case.prefix_caching,
        "schedule_low_priority_values_first": case.schedule_low_priority_values_first,
        "retraction_policy": case.retraction_policy,
        "disable_overlap_schedule": not case.overlaps,
        "mamba_radix_cache_strategy": "extra_buffer" if case.states and case.state_rules.tracked else "no_buffer",
        "mamba_track_interval": case.track_interval,
    }
    steps: list[Step] = []
    with published(max(case.state_chunk, case.page_size), **fields):
        try:
            return _serve(case, steps)
        except (RuntimeError, AssertionError) as error:
            if not (case.unified and _OUT_OF_MEMORY.search(str(error))):
                raise
            return Served(steps, [], is_out_of_memory=True)


def _serve(case: Case, steps: list[Step]) -> Served:
    # Until when arrivals are known, when the last step ends.
    scheduler, known, end, arrived = Scheduler(case), 0, 0, 0
    prompts, outputs = tokens_of(case.workload)
    arrivals = case.workload.arrival_ticks.tolist()
    finished: dict[int, int] = {}
    requests: list[Req] = []
    while True:
        while arrived < len(arrivals) and arrivals[arrived] <= known:
            requests.append(_request(case, arrived, prompts[arrived], scheduler))
            scheduler._add_request_to_queue(requests[-1])
            arrived += 1
        retracted = [request.retraction_count for request in requests]
        scheduler.now_is(known, end)
        try:
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
        except AssertionError as error:
            if scheduler.chunked_req is None or str(error) or not case.unified:
                raise
            # A prefill in progress waits, and another one begins, which SGLang holds to be impossible.
            return Served(steps, [], is_cut=True)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        _uncount_waiting_chunk(scheduler, batch)
        lost = [i for i, request in enumerate(requests) if request.retraction_count > retracted[i]]
        if any(request.to_finish for request in requests):
            raise RuntimeError(f"{case.name}: {_ABORTS}")
        if batch:
            start = max(known, end)
            steps.append(_step(start, batch, lost, scheduler))
            end = start + case.step_ticks
            if getattr(batch, "hicache_consumer_index", -1) >= 0:
                end = scheduler.link.step_end(start, case.step_ticks)
            scheduler.result_queue.append((batch.copy(), end))
            known = start
        elif not scheduler.result_queue:
            # As ``on_idle``.
            scheduler.new_token_ratio_tracker.reset()
            if case.unified:
                scheduler.token_to_kv_pool_allocator.flush_opportunistic()
            until = [] if arrived == len(arrivals) else [arrivals[arrived]]
            if scheduler.waiting_queue and scheduler.link and scheduler.link.next_end is not None:
                # The server asks again and again; what it finds changes when a copy ends.
                until.append(scheduler.link.next_end)
            if until:
                known = max(known, min(until))
            else:
                done = sorted((ticks, row) for row, ticks in finished.items())
                return Served(steps, done, is_stuck=bool(scheduler.waiting_queue))
        while len(scheduler.result_queue) > (case.overlaps and batch is not None):
            ran, over = scheduler.result_queue.popleft()
            _finish_step(ran, outputs, scheduler)
            for request in ran.reqs:
                if request.finished():
                    finished.setdefault(int(request.rid), over)
            known = max(known, over)
            scheduler.now_is(known, end)
            scheduler.tree_cache.flush_pending_backups()
        scheduler.last_batch = batch


def _uncount_waiting_chunk(scheduler: Any, batch: ScheduleBatch | None) -> None:
    """Correct SGLang where a prefill in progress waits while others are admitted: it counts one more chunk of it in flight, for ever, so that it
    drops the first token of that request, and decodes without it."""
    waiting = scheduler.chunked_req
    if waiting is not None and batch and batch.forward_mode.is_extend() and waiting not in batch.reqs:
        waiting.inflight_middle_chunks -= 1


def _request(case: Case, index: int, prompt: list[int], scheduler: Any) -> Req:
    declared, ignores = int(case.workload.max_tokens[index]), bool(case.workload.ignore_eos[index])
    params = SamplingParams(max_new_tokens=declared, ignore_eos=ignores, temperature=0.0)
    params.normalize(None)
    priority = None if case.workload.priority is None else int(case.workload.priority[index])
    request = Req(
        str(index), "", array("q", prompt), params, eos_token_ids={EOS_TOKEN}, vocab_size=1 << 40, priority=priority
    )
    request.time_stats = Times(scheduler)
    scheduler.init_req_max_new_tokens(request)
    return request


def _step(now: int, batch: ScheduleBatch, lost: list[int], scheduler: Any) -> Step:
    prefills = batch.forward_mode.is_extend()
    computed = [(int(each.rid), each.extend_len if prefills else 1) for each in batch.reqs]
    return Step(
        now=now,
        prefills=bool(prefills),
        scheduled=tuple(sorted(computed) if prefills else computed),
        retracted=tuple(sorted(lost)),
        **_levels(scheduler),
    )


def _levels(scheduler: Any) -> dict[str, int]:
    """Free and evictable slots, and windows or states."""
    pool, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    on_host = {
        "host_free": 0 if scheduler.host is None else scheduler.host.available_size(),
        "beside_host_free": 0 if scheduler.beside_host is None else scheduler.beside_host.available_size(),
    }
    if scheduler.is_hybrid_swa:
        return on_host | {
            "free": pool.full_available_size(),
            "evictable": tree.full_evictable_size(),
            "beside_free": pool.swa_available_size(),
            "beside_evictable": tree.swa_evictable_size(),
        }
    levels = on_host | {"free": pool.available_size(), "evictable": tree.full_evictable_size()}
    if tree.supports_mamba():
        states = scheduler.req_to_token_pool.mamba_allocator
        levels |= {"beside_free": states.schedulable_available_size(), "beside_evictable": tree.mamba_evictable_size()}
    return levels


def _finish_step(batch: ScheduleBatch, outputs: list[list[int]], scheduler: Any) -> None:
    """The model's tokens, and what SGLang makes of them."""
    sampled = []
    for each in batch.reqs:
        output, known = outputs[int(each.rid)], len(each.output_ids)
        ends = known + 1 == len(output) < each.sampling_params.max_new_tokens
        # What is computed in vain behind the end is dropped.
        sampled.append(EOS_TOKEN if ends else output[min(known, len(output) - 1)])
    result = GenerationBatchResult(logits_output=None, next_token_ids=torch.tensor(sampled), can_run_cuda_graph=False)
    if batch.forward_mode.is_extend():
        scheduler.results.process_batch_result_prefill(batch, result)
    else:
        scheduler.results.process_batch_result_decode(batch, result)
