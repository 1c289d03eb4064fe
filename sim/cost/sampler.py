"""The time of the sampler: top-p, or top-k and top-p, over the logits of a step.

Every rank samples from the whole vocabulary. Greedy sampling takes the largest logit, and its time is left out. Else vLLM runs one of
three samplers by release (``v1/sample/ops/topk_topp_sampler.py`` in the wheels of 0.11, 0.16, 0.17, 0.20 to 0.22, 0.24 and 0.33):

    up to 0.11   FlashInfer, where it is installed, as in vLLM's image
    0.12         PyTorch, which sorts the logits of each row
    0.17         Triton; PyTorch for fewer than 8 rows
    0.21         FlashInfer

A call takes t0 + a time for each logit, of ``least_rows`` rows at least where a program has one row and the GPU is not full. Both are least
squares of the logarithm over the calls in vLLM's pull request 40376, which compares the three over 64 to 512 rows of 32,768 and 131,072 logits. Median errors:
PyTorch 7 and 4 %, Triton 10 and 7 %, FlashInfer 8 and 9 % (top-p; with top-k). It names no card, and is taken for an H100; pull request 33538, of an H100
by its author's earlier 25824, has PyTorch's within 25 % but for calls that scatter by a factor of two. Of the three pull requests with such calls 40376 was
taken with the errors of measured servers at hand; the coefficients are fitted to its calls alone. On other cards the time is in inverse
proportion to the multiprocessors, which is assumed: a GB300 with 2.4 times the bandwidth of an H100 sorts 128 x 160,000 logits in 0.8 of that
time (54502). The conversion of the logits, their temperature and the draw are left out: some 40 bytes a logit, an eighth of what sorting takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..spec.deployment import Deployment
from ..spec.gpu import GpuSpec


class Call(NamedTuple):
    """Coefficients of a call on an H100; see the module."""

    t0_us: float
    ns_per_logit: float
    least_rows: int = 1

    def us(self, vocab_size: int, rows: np.ndarray) -> np.ndarray:
        """Microseconds of some rows."""
        return self.t0_us + self.ns_per_logit / 1e3 * vocab_size * np.maximum(rows, self.least_rows)


class Sampler(NamedTuple):
    """A sampler of vLLM.

    Attributes:
        name: As in logs.
        calls: Its calls by kind of sampling.
        from_rows: Rows from which it runs; PyTorch's samples fewer.
    """

    name: str
    calls: Mapping[str, Call]
    from_rows: int = 0


#: Of the card that the calls are of.
_H100_MULTIPROCESSORS = 132
PYTORCH = Sampler("PyTorch", {"top-p": Call(178, 0.0999), "top-k-top-p": Call(137, 0.1235)})
TRITON = Sampler("Triton", {"top-p": Call(158, 0.0303), "top-k-top-p": Call(69, 0.0152, 132)}, from_rows=8)
FLASHINFER = Sampler("FlashInfer", {"top-p": Call(23, 0.0054, 132), "top-k-top-p": Call(18, 0.0122, 132)})
#: By the minor version from which on each is the default.
_SINCE = ((0, FLASHINFER), (12, PYTORCH), (17, TRITON), (21, FLASHINFER))


def sampler_of(minor: int | None) -> Sampler:
    """The default sampler of a release.

    Args:
        minor: Its minor version; None is the newest.
    """
    return next(found for since, found in reversed(_SINCE) if minor is None or minor >= since)


def sampler_us(deployment: Deployment, gpu: GpuSpec, vocab_size: int, rows: np.ndarray) -> np.ndarray:
    """Microseconds in which ``rows`` tokens are sampled; 0 for none, and for greedy sampling."""
    kind, sampler = deployment.sampling, sampler_of(deployment.vllm_minor)
    if kind == "greedy":
        return np.zeros(rows.shape)
    own, fewer = (each.calls[kind].us(vocab_size, rows) for each in (sampler, PYTORCH))
    slower = _H100_MULTIPROCESSORS / (gpu.multiprocessors or _H100_MULTIPROCESSORS)
    return np.where(rows > 0, slower * np.where(rows < sampler.from_rows, fewer, own), 0.0)


def describe_sampler(deployment: Deployment) -> dict[str, object]:
    """The sampler's name for ``describe`` of a cost; empty for greedy sampling."""
    return {} if deployment.sampling == "greedy" else {"sampler": sampler_of(deployment.vllm_minor).name}
