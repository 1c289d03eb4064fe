"""What SGLang and vAttention say of their throughput, put to the test; ratios as in ``systems_throughput``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fragmeter.experiments.paper.paper import SYNTHETIC_SET
from fragmeter.sim.spec import gpu, model, paper_num_blocks
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload

from .claim import Code, Judged, Part, Values
from .runs import Trial, at_once
from .systems_throughput import REQUESTS, published, tokens_per_s
from .throughput import ROUNDED

_SHARING_REQUESTS = 300


def _prefixes(trial: Trial) -> Values:
    return {
        "most_shared": _sglang_over_vllm(shared=1400, own=40, output=16),
        "half_shared": _sglang_over_vllm(shared=720, own=720, output=128),
        "nothing_shared": _sglang_over_vllm(shared=0, own=1440, output=128),
    }


def _sglang_over_vllm(shared: int, own: int, output: int) -> float:
    """Throughput of a radix tree over that of a vLLM that computes every prompt; all prompts begin alike."""
    n = _SHARING_REQUESTS
    columns = np.zeros(n, dtype=np.int64), np.full(n, shared + own), np.full(n, output), np.full(n, output)
    content = PromptContent(np.arange(n + 1), np.zeros(n, dtype=np.int64), np.full(n, shared)) if shared else None
    # Beside the tree and the order nothing differs: the pool and the steps are those of the other side.
    slots = paper_num_blocks(model("llama-2-7b"), gpu("a100-80gb"), 1, block_size=1)
    alike: dict[str, dict[str, Any]] = {"vllm-v0": {}}
    alike["sglang"] = {"schedule_policy": "lpm", "max_num_batched_tokens": 8192, "enforce_eager": True}
    alike["sglang"] |= {"num_gpu_blocks_override": slots, "disable_overlap_schedule": True}
    runs = ("sglang", Workload("shared", *columns, content)), ("vllm-v0", Workload("shared", *columns))
    card = {"model": "llama-2-7b", "gpu": "a100-80gb"}
    tree, paged = (tokens_per_s(policy, work, **card, **alike[policy]) for policy, work in runs)
    return tree / paged


def judge_prefixes(values: Mapping[str, float]) -> Judged:
    """6.4 times the throughput, from 95 % on."""
    said = published()["sglang"]["throughput_x_up_to"]
    names = {
        "most_shared": "1,400 of 1,440 prompt tokens in common, outputs of 16",
        "half_shared": "half of 1,440 in common, outputs of 128",
        "nothing_shared": "nothing in common",
    }
    return Judged(
        tuple(Part(text, values[name], said * ROUNDED) for name, text in names.items()),
        ", ".join(f"{values[name]:.1f} ({text})" for name, text in names.items()) + f"; said: up to {said:g}",
        "Cached prefixes are not computed: the gain grows with the share of cached prompt tokens, and outputs bound it.",
    )


def _virtual(trial: Trial) -> Values:
    work = at_once(SYNTHETIC_SET, REQUESTS, trial.seed)
    paged = tokens_per_s("vllm-v0", work)
    return {f"pages_of_{kib}_kib": tokens_per_s("vattention", work, page_size=kib) / paged for kib in (64, 2048)}


def judge_virtual(values: Mapping[str, float]) -> Judged:
    """1.23 times, from 95 % on, by memory alone."""
    said = published()["vattention"]["vs_paged_x_up_to"]
    small, large = (values[f"pages_of_{kib}_kib"] for kib in (64, 2048))
    return Judged(
        tuple(
            Part(text, value, said * ROUNDED) for text, value in (("pages of 64 KiB", small), ("pages of 2 MiB", large))
        ),
        f"with equal kernels {small:.2f} times the throughput in pages of 64 KiB, {large:.2f} in pages of 2 MiB;"
        f" said: up to {said:g}",
        "The claimed gain comes from faster kernels over contiguous memory; memory management alone gives none of it.",
    )


PROBES: Code = {
    12: (_prefixes, judge_prefixes),
    13: (_virtual, judge_virtual),
}
