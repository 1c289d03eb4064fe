"""The installed vLLM's own scheduler as a policy: slow, and exact by construction."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from ..memory.accounting.kv_groups import FULL, RING, SLIDING, PageGroups
from ..types.errors import MissingExtra, SettingError, SimulationFault
from ..types.sequence import Sequence, StepPlan
from ..types.state import State
from .base import Source
from .options import Options, VllmServeOptions, VllmV1Options
from .server import Limits, Pool
from .vllm_v1 import VllmV1

if TYPE_CHECKING:
    from ..real_vllm.core import Core, Scheduled
    from ..real_vllm.memory import RealMemory, RealTransaction

#: The release that is compared with ``vllm-v1``.
RELEASE = "0.33.0"
_INSTALL = f"pip install vllm=={RELEASE}"


class VllmReal(VllmV1):
    """The scheduler, the KV cache manager and the block pool of the installed vLLM (``sim.real_vllm.core``).

    Every step is vLLM's decision. This class passes requests on to vLLM as they arrive, and turns what vLLM scheduled into
    a plan. Limits and their defaults are those of ``vllm-v1``; none of its rules is used.
    """

    name = "vllm-real"
    source = Source("installed vLLM (0.33.0)", "wheel")
    system = "the installed vLLM"
    options_type: ClassVar[type[Options]] = VllmServeOptions
    disaggregates = serves_block_sizes = False

    def __init__(self, limits: Limits, options: Options | None = None, groups: PageGroups | None = None) -> None:
        if limits.stages > 1:
            raise SettingError(
                "pipeline_parallel_size", limits.stages, f"{self.name} has one stage; use --policy vllm-v1"
            )
        given = self.options_type() if options is None else options
        super().__init__(limits, VllmV1Options(**asdict(given)), groups)

    def memory(self, pool: Pool) -> RealMemory:
        """See ``Policy``; starts vLLM's engine core.

        Raises:
            MissingExtra: vLLM is not installed, or cannot be imported.
            SettingError: vLLM refuses the settings, or forms other KV groups.
        """
        if pool.ids:
            raise SettingError("policy", self.name, "records no blocks and no plans; use --policy vllm-v1")
        core = self._core(pool)
        self._check_groups(core)
        from ..real_vllm.memory import RealMemory

        usable, caches = pool.num_blocks - self.null_blocks, pool.token_runs is not None
        return RealMemory(core, usable, pool.block_size, self.groups, caches, self.schedules_ahead)

    def _core(self, pool: Pool) -> Core:
        if find_spec("vllm") is None:
            raise MissingExtra(f"policy = {self.name!r}: the package vllm is not installed; {_INSTALL}")
        try:
            from ..real_vllm.core import Core
        except ImportError as error:
            text = " ".join(str(error).split())
            raise MissingExtra(f"policy = {self.name!r}: vllm cannot be imported ({text}); {_INSTALL}") from None
        states = (
            {"mamba_cache_mode": "align", "mamba_block_size": pool.block_size} if self.groups.states_by_block else {}
        )
        try:
            return Core(
                self.limits.max_model_len,
                {
                    "block_size": pool.block_size,
                    "enable_prefix_caching": pool.token_runs is not None,
                    "num_gpu_blocks_override": pool.num_blocks,
                    **states,
                },
                {
                    "max_num_seqs": self.limits.max_num_seqs,
                    "max_num_batched_tokens": self.limits.max_num_batched_tokens,
                    "watermark": self.options.watermark,
                    "async_scheduling": self.schedules_ahead,
                },
                self.groups,
                pool.token_runs,
            )
        except ValueError as error:
            text = " ".join(str(error).split())
            raise SettingError("policy", self.name, f"vLLM refuses the settings: {text}") from None

    def _check_groups(self, core: Core) -> None:
        classes = {FULL: "FullAttentionSpec", SLIDING: "SlidingWindowSpec", RING: "CircularBufferSpec"}
        wanted = [classes.get(kind, "MambaSpec") for kind in self.groups.kinds]
        formed = [type(spec).__name__ for spec in core.group_specs]
        if wanted != formed:
            raise SettingError("model", ", ".join(wanted), f"vLLM forms other KV groups ({', '.join(formed)})")

    def schedule(self, state: State, transaction: RealTransaction) -> StepPlan:  # type: ignore[override]
        """vLLM's decision."""
        memory = transaction.memory
        for sequence in reversed(_arrived(state, memory)):
            memory.sequences[sequence.index] = sequence
            memory.core.add(sequence)
        return self._plan_of(memory.schedule(), state, memory)

    def _plan_of(self, scheduled: Scheduled, state: State, memory: RealMemory) -> StepPlan:
        """The plan that stands for what vLLM has scheduled."""
        sequences, running, stalled = memory.sequences, state.running, state.stalled
        admitted: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        begun: list[Sequence] = []
        computing: set[Sequence] = set()
        prefill_tokens = 0
        for index, tokens, computed in scheduled.tokens:
            sequence = sequences[index]
            computing.add(sequence)
            if sequence in running or sequence in stalled:
                if tokens != 1:
                    raise SimulationFault(f"vLLM computes {tokens} tokens of request {index}, which decodes")
                continue
            if sequence not in state.prefilling:
                begun.append(sequence)
                sequence.computed_tokens = computed
                if memory.cache_log is not None:
                    memory.cache_log.look_up(index, sequence.start_tokens, computed)
            prefill_tokens += tokens
            if computed + tokens == sequence.start_tokens:
                admitted.append(sequence)
            else:
                chunks.append((sequence, tokens))
        held = (*running, *state.prefilling, *stalled, *state.finished)
        preempted = tuple(each for each in held if each.index in scheduled.preempted)
        gone = {*computing, *preempted}
        stalls = tuple(each for each in running if each not in gone)
        resumes = tuple(each for each in stalled if each in computing)
        return StepPlan(
            admitted=tuple(admitted),
            prefill_tokens=prefill_tokens,
            preempted=preempted,
            valid_until_horizon=False,
            stops_at_arrival=False,
            chunks=tuple(chunks),
            stalls=(stalls, resumes) if stalls or resumes else (),
            order=(*begun, *(sequences[index] for index in memory.core.waiting())) if preempted or begun else (),
        )


def _arrived(state: State, memory: RealMemory) -> list[Sequence]:
    """Requests that vLLM does not know yet, the last one first: they are at the end of the queue."""
    found: list[Sequence] = []
    for sequence in reversed(state.waiting):
        if sequence.index in memory.sequences:
            break
        found.append(sequence)
    return found
