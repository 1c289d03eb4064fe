"""Small runs that show what a setting changes: pools that run out, several sequences, windows, parents, users."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from expanded import expand
from fragmeter.sim import Settings, Workload, settings, simulate, summary
from fragmeter.sim.metrics.result import preemptions_table, requests_table, steps_table
from fragmeter.sim.types.errors import UserError
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.dialogue import NO_PARENT, Dialogue
from fragmeter.sim.workload.users import Users

NUMBER = 24
ROWS = np.arange(NUMBER)
#: The tables with rows that are not leaps: how far a run leaps is no result.
TABLES = (requests_table, preemptions_table, lambda run: expand(steps_table(run)))
#: 1,600 slots; sglang and lightllm have blocks of one token, and vattention pages of 2 MiB.
TIGHT = {"sglang": 1600, "lightllm": 1600, "vattention": 8}


def load(**columns: Any) -> Workload:
    """A request every 2 ms, of up to 190 prompt tokens; a longer output is declared."""
    lengths = {"prompt_tokens": 40 + 30 * (ROWS // 4), "output_tokens": 30 + 7 * (ROWS % 5)}
    defaults = {"arrival_ticks": ROWS * 2 * 10**9, "max_tokens": np.full(NUMBER, 300)}
    return Workload("load", **defaults | lengths | columns)


def _parents() -> Workload:
    """Every second request goes on from the one before."""
    plain = load()
    child = ROWS % 2 == 1
    parent = np.where(child, ROWS - 1, NO_PARENT)
    before = np.where(child, (plain.prompt_tokens + plain.output_tokens)[parent] - 1, 0)
    tree = Dialogue(parent, before, np.zeros(NUMBER, dtype=bool))
    return load(prompt_tokens=plain.prompt_tokens + before, arrival_ticks=ROWS * 10**11, dialogue=tree)


def _grown() -> Workload:
    """Outputs that are much longer than prompts, and declared: the pool runs out on the way."""
    outputs = 150 + 71 * ROWS % 300
    return load(prompt_tokens=5 + 13 * ROWS % 50, output_tokens=outputs, max_tokens=outputs)


@dataclass(frozen=True)
class Scene:
    """A load and the settings that it is served with.

    Attributes:
        loose: Whether the pool is as large as the GPU has it, else 1,600 slots.
        more: Settings.
    """

    name: str
    work: Workload
    loose: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def settings(self, policy: str) -> Settings:
        """What a policy serves the load with."""
        blocks = None if self.loose else TIGHT.get(policy, 100)
        plain = {"policy": policy, "cost": "roofline", "max_model_len": 600, "max_num_seqs": 64}
        return settings(**plain | {"num_gpu_blocks_override": blocks} | self.more)


_SESSIONS = PromptContent.of_sessions(ROWS % 4)
_WINDOWS = {"model": "gpt-oss-120b", "gpu": "h200"}
_STATES = {"model": "nemotron-3-nano-30b-a3b", "gpu": "h100-80gb"}
#: The first one shows most settings.
SCENES = (
    Scene("sessions", load(content=_SESSIONS)),
    Scene("some of several", load(n=1 + ROWS % 3)),
    Scene("some of several, swapping", load(n=1 + ROWS % 3), more={"preemption_mode": "swap"}),
    Scene("grown", _grown()),
    Scene("nothing declared, in a large pool", load(max_tokens=None), loose=True),
    Scene("some of several, in a large pool", load(n=1 + ROWS % 3), loose=True),
    Scene("all of several", load(n=np.full(NUMBER, 2))),
    Scene("all of several, swapping", load(n=np.full(NUMBER, 2)), more={"preemption_mode": "swap"}),
    Scene("beams", load(n=1 + ROWS % 3), loose=True, more={"use_beam_search": True}),
    Scene("beams of one", load(), more={"use_beam_search": True}),
    Scene("parents", _parents()),
    Scene("parents, swapping", _parents(), more={"preemption_mode": "swap"}),
    Scene("a prefix", load(), more={"shared_prefix_tokens": 32}),
    Scene("grown, swapping", _grown(), more={"preemption_mode": "swap"}),
    Scene("windows", _grown(), more=_WINDOWS),
    Scene("windows, several", replace(_grown(), n=1 + ROWS % 3), more=_WINDOWS),
    Scene(
        "windows in sessions", load(prompt_tokens=300 + 40 * (ROWS // 4), content=_SESSIONS), loose=True, more=_WINDOWS
    ),
    Scene("windows, none is left", load(), more=_WINDOWS | {"max_model_len": 100}),
    Scene(
        "states in sessions", load(prompt_tokens=300 + 40 * (ROWS // 4), content=_SESSIONS), loose=True, more=_STATES
    ),
    Scene("users", load(users=Users(6, np.full(NUMBER, 10**10)))),
    Scene("large batches", load(), more={"waiting_served_ratio": 9.0}),
    Scene("batches at once", load(), more={"waiting_served_ratio": 0.0}),
    Scene("blocks of 32", load(), more={"block_size": 32}),
    Scene("sessions without a cache", load(content=_SESSIONS), more={"enable_prefix_caching": False}),
    Scene("small max_num_seqs", load(), more={"max_num_seqs": 3}),
    Scene("chunks of 8", load(), loose=True, more={"long_prefill_token_threshold": 8, "max_num_batched_tokens": 300}),
    Scene("priorities", load(priority=ROWS * 7 % 5)),
    Scene("chunks of 70, at once", load(arrival_ticks=ROWS * 0), more={"max_num_batched_tokens": 70}),
    Scene("outside of the paper's cost", load(), more={"cost": None}),
    Scene("an API server", load(), more={"api_server": '{"request": 9000, "chunk": 400}'}),
    Scene("sessions with a host", load(content=_SESSIONS), more={"enable_hierarchical_cache": True}),
    Scene("experts of two engines", load(), more=_WINDOWS | {"cost": None, "data_parallel_size": 2}),
)
#: The scene that shows a setting under policies that read it, where the first one does not under each of them.
SHOWN_IN = {
    "prefix_cache_retention_interval": "windows in sessions",
    "max_num_seqs": "nothing declared, in a large pool",
    "max_num_batched_tokens": "nothing declared, in a large pool",
    "gpu_memory_utilization": "nothing declared, in a large pool",
    "mem_fraction_static": "nothing declared, in a large pool",
    "max_waiting_tokens": "large batches",
    "use_beam_search": "some of several, in a large pool",
    "beam_survival": "beams",
    "swap_space": "grown, swapping",
    "disable_hybrid_kv_cache_manager": "windows",
    "swa_full_tokens_ratio": "windows",
    "disable_hybrid_swa_memory": "windows",
    "mamba_radix_cache_strategy": "states in sessions",
    "mamba_track_interval": "states in sessions",
    "mamba_full_memory_ratio": "states in sessions",
    "max_mamba_cache_size": "states in sessions",
    "mamba_ssm_dtype": "states in sessions",
    "enable_unified_memory": "states in sessions",
    "long_prefill_token_threshold_adaptive": "chunks of 8",
    "scheduling_policy": "priorities",
    "scheduler_reserve_full_isl": "chunks of 70, at once",
    "hicache_ratio": "sessions with a host",
    "hicache_size": "sessions with a host",
    "hicache_write_policy": "sessions with a host",
    "attention_backend": "nothing declared, in a large pool",
    "api_server_count": "an API server",
    "data_parallel_size": "windows",
    "enable_expert_parallel": "experts of two engines",
}
#: What no policy reads in a scene, though some read it in others.
UNREAD_IN = {
    "sessions": (
        "data_parallel_size",
        "enable_expert_parallel",
        "use_beam_search",
        "beam_survival",
        "swap_space",
        "disable_hybrid_kv_cache_manager",
    ),
    "some of several": ("beam_survival", "disable_hybrid_kv_cache_manager"),
    "beams of one": ("beam_survival",),
    "parents": ("use_beam_search", "preemption_mode", "swap_space"),
    "parents, swapping": ("swap_space",),
    "a prefix": ("use_beam_search", "swap_space"),
    "windows": ("swap_space",),
    "windows, none is left": ("disable_hybrid_kv_cache_manager",),
    "batches at once": ("max_waiting_tokens",),
    "blocks of 32": ("page_size",),
}


def outcome(chosen: Settings, work: Workload, tables: bool) -> str:
    """What a run leaves, or why there is none."""
    try:
        run = simulate(chosen, work)
    except UserError as error:
        return str(error)
    return repr(summary(run)) + "".join(table(run).to_csv() for table in TABLES if tables)
