"""Of every setting a value unlike its default, and the flags that give it, from its declaration.

A new option that is a switch or a choice needs no entry here. A number or a text needs one in ``EXAMPLES``: its bounds do
not say which value shows in a small run.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fragmeter.sim.config.settings import SHARED, Settings, default_of
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.policy.registry import declaring, options_by_policy, readers

EXAMPLES: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "data_parallel_size": 2,
    # Of the choices those that most models, and all policies, take.
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "gpu_memory_utilization": 0.5,
    "mem_fraction_static": 0.9,
    "block_size": 8,
    "outside_ms": 53.0,
    "api_server": '{"request": 3000}',
    "api_server_count": 2,
    "page_size": 128,
    "num_gpu_blocks_override": 150,
    "max_model_len": 130,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 100,
    "watermark": 0.5,
    "long_prefill_token_threshold": 32,
    "max_num_active_seqs": 2,
    "prefill_schedule_interval": 4,
    "kv_offloading_size": 0.5,
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",'
    ' "synthetic_acceptance_length": 2}',
    "decode_context_parallel_size": 2,
    "vllm_release": "0.22",
    "attention_backend": "FLASHINFER",
    "moe_backend": "triton",
    "max_num_queued_reqs": 2,
    "max_num_queued_tokens": 100,
    "waiting_served_ratio": 4.0,
    "max_waiting_tokens": 1,
    "output_estimate": 0.2,
    "beam_survival": 0.3,
    "shared_prefix_tokens": 16,
    "swap_space": 0.03,
    "cost": "fitted",
    "step_scale": 2.0,
    "window": (0.1, 0.5),
}
#: Settings, and the options of the package's policies.
NAMES = (*SHARED, *options_by_policy(POLICIES))


def other_values(name: str) -> tuple[Any, ...]:
    """Values unlike the default: both of a switch that has none, one of any other setting."""
    default, kind = default_of(name), _kind(name)
    if name in EXAMPLES:
        return (EXAMPLES[name],)
    if kind is bool:
        return tuple(value for value in (False, True) if value is not default)
    if get_origin(kind) is Literal:
        return next((value,) for value in get_args(kind) if value != default)
    raise LookupError(f"{name}: neither a switch nor a choice; give it a value in EXAMPLES of {__name__}")


def flags_of(name: str, value: Any) -> list[str]:
    """What sets a value on the command line, with a policy that reads it."""
    flag = f"--{name.replace('_', '-')}"
    chosen = [] if name in SHARED or Settings().policy in readers(name) else ["--policy", readers(name)[0]]
    if isinstance(value, bool):
        return [*chosen, flag if value else f"--no-{flag[2:]}"]
    return [*chosen, flag, *map(str, value if isinstance(value, tuple) else [value])]


def _kind(name: str) -> Any:
    """The declared type, without bounds and None."""
    kind = get_type_hints(Settings if name in SHARED else declaring(name))[name]
    while get_origin(kind) is Annotated or get_origin(kind) in (Union, UnionType):
        inner = [each for each in get_args(kind) if each is not NoneType]
        if len(inner) > 1 and get_origin(kind) is not Annotated:
            return kind
        kind = inner[0]
    return kind
