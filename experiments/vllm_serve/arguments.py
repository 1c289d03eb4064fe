"""Values of a line that vLLM's parser and configuration refuse, whatever the memory.

    LoRA        ranks of ``MaxLoRARanks``, and at least as many adapters on the host as on a GPU (``LoRAConfig``)
    blocks      the sizes of ``BlockSize`` up to 0.17; then, and of these, multiples of 16, which all backends of softmax attention ask for on NVIDIA's
                cards (``supports_block_size``)
    graphs      sizes of CUDA graphs that do not end at their given maximum (``_set_cudagraph_sizes``)
    scheduler   ``SchedulerConfig.verify_max_model_len``: a token budget below the longest sequence without chunked prefill, or below
                max_num_seqs, active sequences since 0.31, the threshold of long prompts since 0.27 (before, only beside partial prefills)

in the wheels of 0.10 to 0.33.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...sim.spec.startup.launch import BLOCK_SIZE, Launch
from ...sim.spec.startup.launched_graphs import captures_of
from ...sim.types.errors import SettingError

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: First releases with a rank of 1, with blocks of 256 tokens, and without a list of blocks.
_FIRST_OF_ONE, _FIRST_OF_256, _FIRST_UNLISTED = 12, 12, 18
_BLOCKS = (1, 8, 16, 32, 64, 128, 256)
_MULTIPLE = 16
_FIRST_THRESHOLD = 27


def refused_argument(launch: Launch) -> str | None:
    """The message of vLLM's parser, or of the configuration of adapters; None if it takes all values."""
    minor, lora = launch.release.since[1], launch.lora
    if lora is not None:
        ranks = _RANKS if minor >= _FIRST_OF_ONE else _RANKS[1:]
        if lora.max_lora_rank not in ranks:
            return f"argument --max-lora-rank: invalid choice: {lora.max_lora_rank} (choose from {_listed(ranks)})"
        if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
            return f"max_cpu_loras ({lora.max_cpu_loras}) must be >= max_loras ({lora.max_loras})."
    size = launch.block_size
    blocks = _BLOCKS if minor >= _FIRST_OF_256 else _BLOCKS[:-1]
    if minor < _FIRST_UNLISTED and size not in blocks:
        return f"argument --block-size: invalid choice: {size} (choose from {_listed(blocks)})"
    try:
        captures_of(launch)
    except SettingError as error:
        return error.remedy
    is_softmax = launch.model.latent is None and launch.model.attention_layers and launch.gpu.compute_capability
    if is_softmax and size % _MULTIPLE:
        return f"No valid attention backend found for cuda with block_size={size}. Reasons: block_size not supported."
    return None


def refused_scheduling(launch: Launch, longest: int) -> str | None:
    """The message of ``verify_max_model_len``; ``longest`` is the length that it gets."""
    tokens, seqs, active = launch.max_num_batched_tokens, launch.max_num_seqs, launch.max_num_active_seqs
    if tokens < longest and not launch.chunked_prefill:
        return (
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({longest}). This effectively limits the maximum sequence length to"
            " max_num_batched_tokens and makes vLLM reject longer sequences. Please increase max_num_batched_tokens or decrease max_model_len."
        )
    if tokens < seqs:
        return f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})."
    if active is not None and active > seqs:
        return f"max_num_active_seqs ({active}) cannot be greater than max_num_seqs ({seqs})."
    threshold = launch.long_prefill_token_threshold
    if threshold > longest and launch.release.since[1] >= _FIRST_THRESHOLD:
        return f"long_prefill_token_threshold ({threshold}) cannot be greater than the max_model_len ({longest})."
    return None


def corrections(launch: Launch) -> Iterator[tuple[str, object, Launch]]:
    """For each value that may be refused the flag, the nearest value that is taken, and the launch with it."""
    lora, minor = launch.lora, launch.release.since[1]
    needed = launch.max_num_seqs if launch.chunked_prefill else max(launch.max_num_seqs, launch.max_model_len)
    if launch.max_num_batched_tokens < needed:
        yield "--max-num-batched-tokens", needed, replace(launch, max_num_batched_tokens=needed)
    if not launch.chunked_prefill:
        yield "--enable-chunked-prefill", "", replace(launch, chunked_prefill=True)
    if launch.max_num_active_seqs is not None and launch.max_num_active_seqs > launch.max_num_seqs:
        yield "--max-num-active-seqs", launch.max_num_seqs, replace(launch, max_num_active_seqs=launch.max_num_seqs)
    if launch.long_prefill_token_threshold > launch.max_model_len:
        length = launch.max_model_len
        yield "--long-prefill-token-threshold", length, replace(launch, long_prefill_token_threshold=length)
    graphs, tokens = launch.graphs, launch.max_num_batched_tokens
    end = max((size for size in graphs.sizes or () if size <= tokens), default=None)
    if end is not None and graphs.largest not in (None, end):
        yield "--max-cudagraph-capture-size", end, replace(launch, graphs=replace(graphs, largest=end))
    if lora is not None:
        rank = next((rank for rank in _RANKS[minor < _FIRST_OF_ONE :] if rank >= lora.max_lora_rank), _RANKS[-1])
        if rank != lora.max_lora_rank:
            yield "--max-lora-rank", rank, replace(launch, lora=lora._replace(max_lora_rank=rank))
        if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
            yield "--max-cpu-loras", lora.max_loras, replace(launch, lora=lora._replace(max_cpu_loras=lora.max_loras))
    if refused_argument(replace(launch, lora=None)) is not None:
        yield "--block-size", BLOCK_SIZE, replace(launch, block_size=BLOCK_SIZE)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
