"""Cards and lines of servers whose defaults are compared: what SGLang's ``server_args`` and ours make of them."""

from __future__ import annotations

from typing import Any

from fragmeter.sim.spec import gpu, model
from fragmeter.sim.spec.model import model_names
from fragmeter.sim.spec.startup.sglang import page_size, prefill_graphs, server_defaults, vision_share

#: MiB of cards, as ``nvidia-smi`` shows them.
CARDS = {
    "T4": 15360,
    "RTX 4080": 16376,
    "L4": 23034,
    "RTX 4090": 24564,
    "RTX 5090": 32607,
    "V100 32GB": 32768,
    "A100 40GB": 40960,
    "L40S": 46068,
    "RTX 6000 Ada": 49140,
    "H100": 81559,
    "A100 80GB": 81920,
    "H100 NVL": 95830,
    "RTX PRO 6000": 97887,
    "H200": 143771,
    "B200": 183359,
    "GB300": 284208,
}
#: What lines say, by the keywords of ``server_defaults``.
LINES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "two ranks": {"tensor_parallel": 2},
    "four ranks": {"tensor_parallel": 4},
    "eight ranks, latent": {"tensor_parallel": 8, "latent": True},
    "latent": {"latent": True},
    "two stages": {"pipeline_parallel": 2},
    "eager": {"cuda_graphs": False},
    "short chunks": {"chunked_prefill_size": 1024},
    "long chunks": {"chunked_prefill_size": 32768},
    "few requests": {"max_running_requests": 20},
}
#: One card of each generation, by our name and by the name above.
GENERATIONS = {
    "a100-80gb": "A100 80GB",
    "h100-80gb": "H100",
    "h200": "H200",
    "b200": "B200",
    "rtx-5090": "RTX 5090",
}
#: Presets without those that the wheel does not load from what is stored of their configuration.
MODELS = [
    name for name in model_names() if name not in ("nemotron-super-49b", "mimo-7b", "glm-5.3-flash", "step-3.7-flash")
]
#: What lines say of a model with states, by the keywords of SGLang's ``ServerArgs``; and by ours of ``page_size``.
STATE_LINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no radix cache": ({"disable_radix_cache": True}, {"keeps": False}),
    "copies": ({"mamba_radix_cache_strategy": "extra_buffer"}, {"strategy": "extra_buffer"}),
    "no copies": (
        {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
        {"strategy": "no_buffer"},
    ),
}
STATE_MODELS = ["qwen3-next-80b-a3b", "qwen3.5-27b", "nemotron-3-nano-30b-a3b", "granite-4.0-h-small"]
#: Backends of a line, and models of which it may say them.
BACKENDS = (
    ["triton", "fa3", "fa4", "flashinfer", "trtllm_mha", "hpc_ops"],
    ["llama-3.1-8b", "gemma-3-27b", "minimax-m3"],
)
LATENT_BACKENDS = ["triton", "fa3", "flashinfer", "flashmla", "trtllm_mla", "cutedsl_mla"], ["deepseek-v3"]
#: Models of which a line says the page.
PAGED = [
    "llama-3.1-8b",
    "deepseek-v3",
    "deepseek-v3.2",
    "qwen3.5-27b",
    "mimo-v2-flash",
    "minimax-m3",
    "kimi-linear-48b-a3b",
]
#: Slots, tokens of the longest sequence, and ``--max-running-requests``.
POOLS = [
    (slots, length, given)
    for slots in (3, 900, 40_000, 2_000_000)
    for length in (2048, 131_072)
    for given in (None, 64)
]


def ours() -> dict[str, list[float]]:
    """Chunk, largest batch of a decode graph, and share of the memory, by card and line."""
    return {
        f"{card}, {said}": [*server_defaults(mib, **line)]
        for card, mib in CARDS.items()
        for said, line in LINES.items()
    }


def ours_of_models() -> dict[str, list[float]]:
    """Tokens of a page and of a chunk, largest batch of a decode graph, and share of the memory, by card and model."""
    return {f"{card}, {name}": of_model(name, card) for name in MODELS for card in GENERATIONS}


def of_model(name: str, card: str) -> list[float]:
    """What a line says that names a model only."""
    shape = model(name)
    found = server_defaults(
        CARDS[GENERATIONS[card]],
        latent=shape.latent is not None,
        prefill_graphs=prefill_graphs(shape),
        vision=vision_share(shape),
    )
    return [page_size(gpu(card), shape), *found]
