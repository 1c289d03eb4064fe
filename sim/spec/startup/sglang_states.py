"""SGLang's pool of states, for models with layers that keep a state of fixed size: how many it has and what a request takes of them.
``server_args`` (``_mamba_radix_cache_resolution``) and ``mem_cache/kv_cache_configurator.py`` (``_handle_max_mamba_cache``) of 0.5.23.

    rest        memory for KV cache and states
    states      rest x ratio / (1 + ratio) for ``--mamba-full-memory-ratio`` (0.9), in whole states, less one that pads batches
    KV cache    the rest less these states and the one

A state is one of all layers of a stage. Matrices are kept in fp32 unless the checkpoint or ``--mamba-ssm-dtype`` names another format, the
inputs of convolutions in bf16.
"""

from __future__ import annotations

from math import lcm
from typing import Literal, NamedTuple

from ...types.errors import NotSimulated, SettingError
from ..deployment import stages
from ..shape import ModelSpec
from ..states import Mamba2
from .sglang_unified import SharedBuffer

#: ``--mamba-radix-cache-strategy``; ``extra_buffer_lazy`` is not simulated.
Strategy = Literal["auto", "no_buffer", "extra_buffer"]
#: States for each request of the pool: its own, one that it has locked, and the one that replaces a state that joins the tree.
_OF_REQUEST = 3
#: Models that SGLang serves and that are simulated, by ``model_type``: those with ``extra_buffer``, and the others.
_COPIED = frozenset(
    """
    qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text nemotron_h granitemoehybrid kimi_linear
    """.split()
)
_NOT_COPIED = frozenset({"lfm2"})


class StateRules(NamedTuple):
    """How states are kept.

    Attributes:
        tracked: Copies of its state that a request has.
        grid: Tokens of a prefill from one state that can be copied to the next.
        interval: Tokens of a request that decodes from one to the next.
        of_request: States of the pool for each request that may run.
    """

    tracked: int
    grid: int
    interval: int
    of_request: int


class StatePool(NamedTuple):
    """States of the pool, their rules, the bytes of a slot of the KV cache and of a state, and the buffer that both share, if they do."""

    slots: int
    rules: StateRules
    slot_bytes: tuple[int, int]
    buffer: SharedBuffer | None = None

    @property
    def most_requests(self) -> int:
        """Requests that may run."""
        return self.slots // self.rules.of_request


def copies_states(model: ModelSpec) -> bool:
    """Whether SGLang supports ``extra_buffer`` for a model."""
    return model.model_type in _COPIED


def serves_states(model: ModelSpec) -> bool:
    """Whether the states of a model are simulated as SGLang keeps them."""
    return model.model_type in _COPIED | _NOT_COPIED


def turns_overlap_off(model: ModelSpec, strategy: Strategy) -> bool:
    """Whether SGLang turns the overlap schedule off beside a radix cache: for states that it cannot copy, where the strategy is its choice."""
    return strategy == "auto" and model.model_type in _NOT_COPIED


def state_rules(
    model: ModelSpec, page: int, strategy: Strategy = "auto", track_interval: int = 256, *, keeps: bool, overlaps: bool
) -> StateRules:
    """The rules by the flags.

    Args:
        page: Tokens of a page.
        track_interval: ``--mamba-track-interval``.
        keeps: Whether there is a radix cache.
        overlaps: Whether there is the overlap schedule.

    Raises:
        NotSimulated: The model's states are not simulated.
        SettingError: SGLang refuses the flags, or would change another one.
    """
    if not serves_states(model):
        served = ", ".join(sorted(_COPIED | _NOT_COPIED))
        reason = f"has layers with a fixed-size state, which policy sglang simulates for {served}"
        raise NotSimulated("model", model.name, reason, "use --policy vllm-v1")
    assert model.mixer is not None
    if not keeps:
        return StateRules(0, 1, 1, 1)
    copied = copies_states(model)
    if strategy == "extra_buffer" and not copied:
        raise SettingError(
            "mamba_radix_cache_strategy", strategy, f"SGLang does not support it for {model.name}; leave it out"
        )
    if strategy == "no_buffer" or not copied or (strategy == "auto" and not overlaps and page == 1):
        if page > 1:
            raise SettingError("block_size", page, "must be 1 with mamba_radix_cache_strategy = 'no_buffer'")
        if overlaps and strategy == "no_buffer":
            remedy = "keeps states without the overlap schedule; give disable_overlap_schedule, too"
            raise SettingError("mamba_radix_cache_strategy", strategy, remedy)
        return StateRules(0, 1, 1, _OF_REQUEST)
    chunk = model.mixer.chunk_tokens
    if max(chunk, page) % min(chunk, page):
        raise SettingError("block_size", page, f"must divide the {chunk} tokens of a kernel's chunk, or be a multiple")
    if isinstance(model.mixer, Mamba2) and track_interval < chunk:
        # ``Mamba2AttnBackend``.
        remedy = f"must be at least the {chunk} tokens of a kernel's chunk"
        raise SettingError("mamba_track_interval", track_interval, remedy)
    if track_interval % page:
        raise SettingError("mamba_track_interval", track_interval, f"must be a multiple of block_size = {page}")
    tracked, grid = 1 + overlaps, max(chunk, page)
    return StateRules(tracked, grid, lcm(grid, track_interval), _OF_REQUEST + tracked)


def state_bytes(model: ModelSpec, tensor_parallel: int, pipeline_parallel: int, dtype: str | None) -> int:
    """Bytes of a state on each rank, of the stage with most of its layers.

    Args:
        dtype: ``--mamba-ssm-dtype`` by fragmeter's name; None is that of the checkpoint.
    """
    mixer = model.state_mixer(tensor_parallel)
    assert mixer is not None
    held = dtype or ("fp32" if mixer.state_dtype == "auto" else mixer.state_dtype)
    layers = set(model.state_layers)
    most = max(len(layers.intersection(stage)) for stage in stages(model.num_layers, pipeline_parallel))
    return most * mixer.state_bytes(tensor_parallel, conv_dtype="bf16", state_dtype=held)


def num_states(rest: float, bytes_of_state: int, ratio: float) -> int:
    """States of the pool, of so many bytes for these and the KV cache; 0 or less where none fits."""
    return int((rest * ratio / (1 + ratio) - bytes_of_state) // bytes_of_state)
