"""Requests of given lengths, drawn as by the data set ``random`` of ``vllm bench serve``, or lognormal.

    fixed       a range ratio of 0: every length is the mean
    uniform     whole numbers from floor(mean * (1 - ratio)) to ceil(mean * (1 + ratio)), both included, and at least 1 for
                outputs: first all prompts, then all outputs, from numpy's default generator of the seed. Lengths equal those of
                vllm bench serve with the same seed and number of prompts, for a tokenizer that adds no special tokens
                (vllm-project/vllm, ``vllm/benchmarks/datasets/utils.py``, 0.33)
    lognormal   by mean and coefficient of variation: exp(mu + sigma z), where sigma^2 = ln(1 + cv^2) and mu = ln(mean) -
                sigma^2 / 2; requests longer than the model are drawn again

A common prefix comes before each prompt, in addition to its length, as vLLM's ``--random-prefix-len``. Every request declares its
output as ``max_tokens`` and ignores the end of the sequence: ``vllm/benchmarks/serve.py`` (0.33, line 2187) sets ``ignore_eos`` for
``random`` and ``random-mm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, log1p, sqrt

import numpy as np

from ...sim.types.errors import SettingError
from ...sim.workload.content import PromptContent
from ..arrivals.streams import stream
from ..types.trace import Trace
from .summaries import drawn_within

#: Relative difference of the mean of drawn lengths from the given one, from which on both are named.
_SAME_MEAN = 0.05


@dataclass(frozen=True)
class RandomLoad:
    """Distributions of the lengths of requests, in tokens.

    Attributes:
        input_len, output_len: Means of the prompt without the common prefix, and of the output.
        range_ratios: Half the width of each uniform range relative to its mean, in [0, 1): of prompts, of outputs.
        cvs: Coefficients of variation of lognormal lengths, in place of ``range_ratios``; None for uniform ones.
        prefix_len: Tokens that all prompts begin with.
    """

    input_len: int
    output_len: int
    range_ratios: tuple[float, float] = (0.0, 0.0)
    cvs: tuple[float, float] | None = None
    prefix_len: int = 0

    @property
    def name(self) -> str:
        """The load in words."""
        cvs, ratios = self.cvs or (None, None), self.range_ratios
        prompts = _in_words(self.input_len, ratios[0], cvs[0], least=0)
        prefix = f"{self.prefix_len:,} common tokens, then " if self.prefix_len else ""
        return f"prompts of {prefix}{prompts}, outputs of {_in_words(self.output_len, ratios[1], cvs[1], least=1)}"

    def draw(self, n: int, seed: int, max_model_len: int) -> Trace:
        """``n`` requests without arrivals, none longer than the model; each generates all of its ``max_tokens``.

        Raises:
            SettingError: A request may be empty, or longer than the model; with a lognormal, nearly all are longer.
        """
        prompts, outputs = (
            self._uniform(n, seed, max_model_len) if self.cvs is None else self._lognormal(n, seed, max_model_len)
        )
        content = None
        if self.prefix_len:
            pieces = np.full(n, self.prefix_len)
            content = PromptContent(np.arange(n + 1), np.zeros(n, dtype=np.int64), pieces)
        name, sent = self._name_as_drawn(prompts, outputs, max_model_len), prompts + self.prefix_len
        return Trace(name, sent, outputs, max_tokens=outputs, content=content, ignore_eos=np.ones_like(outputs))

    def _name_as_drawn(self, prompts: np.ndarray, outputs: np.ndarray, max_model_len: int) -> str:
        """The name, with the means of the requests where those of a lognormal are others, as longer ones than the model are left out."""
        drawn, given = (prompts.mean(), outputs.mean()), (self.input_len, self.output_len)
        if self.cvs is None or all(abs(mean / of - 1) <= _SAME_MEAN for mean, of in zip(drawn, given, strict=True)):
            return self.name
        return f"{self.name}; drawn within {max_model_len:,} tokens they are {drawn[0]:,.0f} and {drawn[1]:,.0f} on average"

    @property
    def _longest_part(self) -> tuple[str, int]:
        """The longest part of a request: its setting, and its tokens."""
        parts = {"input_len": self.input_len, "output_len": self.output_len, "random_prefix_len": self.prefix_len}
        return max(parts.items(), key=lambda part: part[1])

    def _uniform(self, n: int, seed: int, max_model_len: int) -> tuple[np.ndarray, np.ndarray]:
        (least, most), (fewest, longest) = (
            _range(self.input_len, self.range_ratios[0], 0),
            _range(self.output_len, self.range_ratios[1], 1),
        )
        if self.prefix_len + least < 1:
            raise SettingError(
                "input_len", self.input_len, "lets a prompt have no token; raise it, or lower the range ratio"
            )
        if self.prefix_len + most + longest > max_model_len:
            field, value = self._longest_part
            parts = f"{self.prefix_len:,} in common, {most:,} of a prompt and {longest:,} of an output"
            total = self.prefix_len + most + longest
            remedy = f"requests have up to {total:,} tokens ({parts}), and the model takes {max_model_len:,}; lower it"
            raise SettingError(field, value, remedy)
        rng = np.random.default_rng(seed)
        prompts = rng.integers(least, most + 1, size=n)
        return prompts, rng.integers(fewest, longest + 1, size=n)

    def _lognormal(self, n: int, seed: int, max_model_len: int) -> tuple[np.ndarray, np.ndarray]:
        rng, cvs = stream(seed, "lognormal lengths"), self.cvs or (0.0, 0.0)

        def drawn(count: int) -> np.ndarray:
            means = (self.input_len, self.output_len)
            return np.array([_lognormal_lengths(mean, cv, count, rng) for mean, cv in zip(means, cvs, strict=True)])

        try:
            prompts, outputs = drawn_within(drawn, n, max_model_len - self.prefix_len, "requests")
        except SettingError:
            remedy = f"fewer than 1 request in 1,000 is within the model's {max_model_len:,} tokens; lower it"
            raise SettingError(*self._longest_part, remedy) from None
        return prompts, outputs


def _range(mean: int, ratio: float, least: int) -> tuple[int, int]:
    return max(floor(mean * (1 - ratio)), least), max(ceil(mean * (1 + ratio)), least)


def _lognormal_lengths(mean: int, cv: float, n: int, rng: np.random.Generator) -> np.ndarray:
    variance = log1p(cv * cv)
    drawn = np.exp(log(mean) - variance / 2 + sqrt(variance) * rng.standard_normal(n))
    return np.maximum(np.rint(drawn), 1).astype(np.int64)


def _in_words(mean: int, ratio: float, cv: float | None, least: int) -> str:
    if cv:
        return f"{mean:,} tokens on average (lognormal, CV {cv:g})"
    low, high = _range(mean, 0.0 if cv is not None else ratio, least)
    return f"{mean:,} token{'s' * (mean != 1)}" if low == high else f"{low:,} to {high:,} tokens (uniform)"
