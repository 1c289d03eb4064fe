"""The time of the sampler, by release and kind of sampling."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.cost import cost
from fragmeter.sim.cost.sampler import sampler_of, sampler_us
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.types.errors import SettingError

H100 = gpu("h100-80gb")
QWEN = model("qwen3-14b")


def ms(kind: str, minor: int, rows: int, vocab: int, card: str = "h100-80gb") -> float:
    """Milliseconds of a call."""
    deployment = Deployment(sampling=kind, vllm_minor=minor)
    return float(sampler_us(deployment, gpu(card), vocab, np.array([rows]))[0]) / 1e3


@pytest.mark.parametrize(
    ("minor", "kind", "rows", "vocab", "published"),
    [
        (16, "top-p", 64, 131_072, 1.005),
        (12, "top-k-top-p", 128, 131_072, 2.375),
        (17, "top-p", 512, 131_072, 2.013),
        (20, "top-k-top-p", 64, 32_768, 0.126),
        (21, "top-p", 128, 131_072, 0.138),
        (33, "top-k-top-p", 64, 131_072, 0.199),
    ],
)
def test_published_calls_are_reproduced(minor, kind, rows, vocab, published):
    """vLLM's pull request 40376; each of another sampler or kind, which differ by a factor of two or more."""
    assert ms(kind, minor, rows, vocab) == pytest.approx(published, rel=0.2)


def test_each_release_has_its_sampler():
    names = [sampler_of(minor).name for minor in (8, 11, 12, 16, 17, 20, 21, 33)]
    assert names == ["FlashInfer"] * 2 + ["PyTorch"] * 2 + ["Triton"] * 2 + ["FlashInfer"] * 2
    assert sampler_of(None).name == "FlashInfer"


def test_triton_leaves_fewer_than_eight_rows_to_pytorch():
    assert ms("top-p", 17, 7, 151_936) == ms("top-p", 16, 7, 151_936)
    assert ms("top-p", 17, 8, 151_936) != ms("top-p", 16, 8, 151_936)


def test_nothing_is_sampled_without_rows_nor_greedily():
    assert ms("top-p", 16, 0, 151_936) == ms("greedy", 16, 64, 151_936) == 0


@pytest.mark.parametrize("name", ["fitted", "roofline"])
def test_a_step_takes_the_sampler_of_its_sequences(name):
    """All ranks sample from the whole vocabulary."""
    for ranks in (1, 2):
        plain, longer = (
            cost(name, QWEN, H100, ranks, deployment=Deployment(sampling=kind, vllm_minor=16))
            for kind in ("greedy", "top-k-top-p")
        )
        more = longer.step_ticks(64, 64_000, 0, 0) - plain.step_ticks(64, 64_000, 0, 0)
        assert more / 1e9 == pytest.approx(ms("top-k-top-p", 16, 64, QWEN.vocab_size), rel=0.01)
        assert longer.describe()["sampler"] == "PyTorch"
        assert "sampler" not in plain.describe()


def tpot(**options: object) -> float:
    """Mean TPOT of 64 requests that decode together."""
    work = Workload("together", np.zeros(64, np.int64), np.full(64, 100), np.full(64, 50))
    chosen = settings(policy="vllm-v1", model="qwen3-14b", gpu="h100-80gb", **options)
    return summary(simulate(chosen, work))["mean_tpot_ms"]


def test_tpot_grows_by_the_sampler():
    greedy = tpot(vllm_release="0.15")
    assert tpot(vllm_release="0.15", sampling="top-k-top-p") - greedy == pytest.approx(1.34, abs=0.1)
    assert tpot(vllm_release="0.33", sampling="top-k-top-p") - greedy < 0.3


def test_the_paper_cost_has_no_sampler():
    work = Workload("one", np.zeros(1, np.int64), np.full(1, 100), np.full(1, 5))
    with pytest.raises(SettingError, match="^sampling = .top-p.: --cost paper has no sampler"):
        simulate(settings(policy="vllm-v1", model="opt-13b", gpu="a100-40gb", cost="paper", sampling="top-p"), work)
