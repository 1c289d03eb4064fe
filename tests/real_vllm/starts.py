"""Lines near the number of sequences for which a pool has blocks, and whether they start; needs no vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import Started, started
from fragmeter.sim.spec.startup.capacity import capacity
from fragmeter.sim.spec.startup.launch import Launch

#: Models with states, one of them with packed groups, and models without; each with its GPU and a pool of a few hundred blocks.
_MODELS = {
    "qwen3.6-27b": "h100-80gb -q fp8 --kv-cache-memory-bytes 20G",
    "nemotron-3-super": "h200 -tp 2 -q fp8 --kv-cache-memory-bytes 10G",
    "glm-5.3-flash": "h200 -tp 4 --kv-cache-memory-bytes 14G",
    "kimi-linear-48b-a3b": "h200 --kv-cache-memory-bytes 20G --max-model-len 65536",
    "jamba-1.5-mini": "h200 -q fp8 --kv-cache-memory-bytes 8G --no-enable-prefix-caching",
    "gemma-3-27b": "h100-80gb --kv-cache-memory-bytes 3G --max-model-len 4096",
    "llama-3.1-8b": "h100-80gb --kv-cache-memory-bytes 1G --max-model-len 512",
}
_GRAPHS = (
    "", "--enforce-eager", "-cc.cudagraph_mode PIECEWISE", "--compilation-config.cudagraph_mode=none", "-O0", "-O1", "-O 3",
    '-cc {"cudagraph_mode":"full_decode_only"}', "-O1 -cc.cudagraph_mode FULL_AND_PIECEWISE", "-cc.mode none",
    "-cc.mode 0 -cc.cudagraph_mode PIECEWISE",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """A line: its model, flags of its graphs, and how many sequences more than its pool has blocks."""

    model: str
    flags: str
    over: int

    @property
    def name(self) -> str:
        return f"{self.model}/{self.flags}/{self.over}"

    @property
    def max_num_seqs(self) -> int:
        """Its sequences."""
        return capacity(self.launch()).num_blocks + self.over

    def launch(self) -> Launch:
        """Its memory, which does not depend on its sequences: it is given."""
        return _launch(self.model)

    def started(self) -> Started:
        """The line as fragmeter reads it."""
        return _started(self.model, f" {self.flags} --max-num-seqs {self.max_num_seqs}")


@cache
def _launch(model: str) -> Launch:
    return _started(model, "").launch


def _started(model: str, flags: str) -> Started:
    gpu, _, own = _MODELS[model].partition(" ")
    quoted = flags.replace("{", "'{").replace("}", "}'")
    return started(parse_serve(f"vllm serve {model} {own}{quoted}"), gpu)


def starts() -> Iterator[Start]:
    """All of them."""
    for model in _MODELS:
        yield from (Start(model, flags, over) for flags in _GRAPHS for over in (0, 1))
