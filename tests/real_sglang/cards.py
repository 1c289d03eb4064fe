"""Cards and lines of servers whose defaults are compared: what SGLang's ``server_args`` and ours make of them."""

from __future__ import annotations

from typing import Any

from fragmeter.sim.spec.startup.sglang import server_defaults

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
