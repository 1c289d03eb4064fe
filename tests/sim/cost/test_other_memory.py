"""Times of a card from those of another with the same chip and other memory: H100's from H200's, of both of which there are tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from fragmeter.sim.cost import cost, profile
from fragmeter.sim.cost.op_model import OpModel, OtherMemory
from fragmeter.sim.cost.op_work import Work
from fragmeter.sim.cost.operations import OPERATIONS, OpName
from fragmeter.sim.spec import Deployment, gpu, model

FAST, SLOW = (gpu(name).memory_bytes_per_s for name in ("h200", "h100-80gb"))
MEMORY = OtherMemory(0.92 * FAST, 0.92 * SLOW)


def gemms(rows: tuple[int, ...]) -> Iterator[tuple[OpName, Work]]:
    """Weights of 33 MB and more."""
    for m, n, k in product(rows, (4096, 6144, 8192, 16384, 28672), (4096, 8192, 14336)):
        yield "gemm", OPERATIONS["gemm"](m, n, k)


def decodes() -> Iterator[tuple[OpName, Work]]:
    """Of 512 to 8,192 tokens a sequence."""
    for batch, length, (heads, kv_heads) in product(
        (1, 8, 32, 64, 128), (512, 1024, 4096, 8192), ((32, 8), (32, 4), (64, 8))
    ):
        yield (
            "decode_attention",
            OPERATIONS["decode_attention"](batch, np.array(batch * length), heads, kv_heads, 128, 16, 2),
        )


def prefills() -> Iterator[tuple[OpName, Work]]:
    """Whole prompts."""
    for tokens in (512, 1024, 4096, 8192):
        pairs = np.array(tokens * (tokens + 1) / 2)
        yield (
            "prefill_attention",
            OPERATIONS["prefill_attention"](tokens, pairs, np.array(float(tokens)), 32, 8, 128, 2),
        )


def experts() -> Iterator[tuple[OpName, Work]]:
    """Of shapes that have a model of their own, and others."""
    shapes = ((8, 128, 2048, 768), (2, 8, 4096, 14336), (2, 8, 4096, 7168), (8, 128, 4096, 384))
    for rows, (used, count, hidden, width) in product((1, 8, 32, 128, 512, 2048), shapes):
        yield "moe", OPERATIONS["moe"](np.array(float(rows)), used, count, count, hidden, width)


def by_bandwidth(found: OpModel) -> OpModel:
    """The former rule: the rate of the coefficients times the ratio of the data sheets."""
    rate = found.coefficients.bytes_per_s
    assert rate is not None
    return replace(found, coefficients=replace(found.coefficients, bytes_per_s=rate * SLOW / FAST))


def errors(calls: Iterator[tuple[OpName, Work]], rule) -> np.ndarray:
    """Computed over modelled time of the H100's own table, less one."""
    fast, slow = profile("h200").ops, profile("h100-80gb").ops
    return np.array([float(rule(fast[name]).us(work)) / float(slow[name].us(work)) - 1 for name, work in calls])


@pytest.mark.parametrize(
    ("calls", "limit"),
    [(lambda: gemms((1, 4, 8, 16, 32, 64, 128)), 0.03), (lambda: gemms((512, 2048, 8192)), 0.03), (decodes, 0.03), (prefills, 0.01), (experts, 0.07)],
    ids=["small gemms", "large gemms", "decodes", "prefills", "experts"],
)  # fmt: skip
def test_times_of_the_h100_follow_from_those_of_the_h200(calls, limit):
    found = np.median(np.abs(errors(calls(), lambda each: replace(each, memory=MEMORY))))
    unscaled = np.median(np.abs(errors(calls(), lambda each: each)))
    assert found < limit
    # Where the memory does not bind, times are the same, and scaling is no better than none.
    assert found < unscaled / 2 or unscaled < 0.02


def test_the_former_rule_is_worse_over_all():
    kinds = (lambda: gemms((1, 8, 32, 128)), lambda: gemms((512, 2048, 8192)), decodes, prefills)
    new, former = (
        [np.median(np.abs(errors(calls(), rule))) for calls in kinds]
        for rule in (lambda each: replace(each, memory=MEMORY), by_bandwidth)
    )
    assert all(one < other for one, other in zip(new, former, strict=True))


def test_the_40_gb_card_keeps_what_memory_does_not_bind():
    name, graphs = "llama-3.1-8b", Deployment(cuda_graphs=True)
    steps = [cost("fitted", model(name), gpu(card), deployment=graphs) for card in ("a100-40gb", "a100-80gb")]
    few, prompt = ([step.step_ticks(*shape) for step in steps] for shape in ((1, 500, 0, 0), (0, 0, 4096, 4096 * 2048)))
    assert 1.1 < few[0] / few[1] < 1.22 and prompt[0] / prompt[1] < 1.02
