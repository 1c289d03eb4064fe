"""Arrival times and declared output lengths: conversion of a trace into a workload."""

from __future__ import annotations

import numpy as np

from ...sim.types.errors import MissingSetting, SettingError
from ...sim.workload.users import Users
from ...sim.workload.workload import Workload
from ..parsing.checks import MOST_SEQUENCES
from ..types.pairs import LengthPairs
from ..types.trace import Trace
from .pacing import at_rate, unit_gaps
from .streams import stream


def poisson(n: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Arrival ticks (int64 [n]) of a Poisson process of ``rate`` requests/s, in whole nanoseconds.

    The first request arrives one gap after 0. At an infinite rate all requests arrive at 0.

    Raises:
        SettingError: The rate is not positive, or is so low that the last request arrives after more than 97 days.
    """
    return at_rate(rate, unit_gaps(n, 1, rng))


def declared_max_tokens(output_tokens: np.ndarray, rule: str | int) -> np.ndarray:
    """The ``max_tokens`` that requests declare, int64 [n], from their true output lengths.

    Args:
        rule: ``"true"``: the output length. ``"pow2"``: the next power of two, ``1 << (out - 1).bit_length()``, as for
            the paper's Orca (Pow2). A number: the same value for all requests.

    Raises:
        SettingError: The rule is unknown, or the number is below the longest output.
    """
    if rule == "true":
        return output_tokens
    if rule == "pow2":
        # frexp's exponent is the bit length, exact below 2**53.
        return np.int64(1) << np.frexp(output_tokens - 1)[1].astype(np.int64)
    if isinstance(rule, (str, bool)):
        raise SettingError("max_tokens", rule, "choose true, pow2 or a number of tokens")
    longest_tokens = int(output_tokens.max(initial=0))
    if rule < longest_tokens:
        raise SettingError("max_tokens", rule, f"the longest output has {longest_tokens} tokens; give at least that")
    return np.full(len(output_tokens), rule, dtype=np.int64)


def workload(
    source: Trace | LengthPairs,
    request_rate: float | None = None,
    seed: int = 0,
    max_tokens: str | int | None = None,
    n: int | None = None,
    users: Users | None = None,
) -> Workload:
    """The workload of a trace or of length pairs, in file order.

    Prompt contents, priorities and ``ignore_eos`` of the trace are kept.

    Args:
        request_rate: Requests/s of Poisson arrivals that replace those of the trace; None keeps the trace's arrivals.
        max_tokens: A rule of ``declared_max_tokens``; None uses the trace's column, if it has one.
        n: Sequences of every request; None uses the trace's column, if it has one.
        users: Users of a closed loop.

    Raises:
        SettingError: Neither the trace nor the caller gives arrivals, or a rate, a rule or ``n`` is invalid.
    """
    trace = source if isinstance(source, Trace) else Trace(source.name, source.prompt_tokens, source.output_tokens)
    declared = trace.max_tokens if max_tokens is None else declared_max_tokens(trace.output_tokens, max_tokens)
    arrivals = _arrival_ticks(trace, request_rate, seed)
    samples = trace.n if n is None else np.full(len(trace), _checked_n(n), dtype=np.int64)
    lengths = trace.prompt_tokens, trace.output_tokens
    contents = trace.content, trace.dialogue
    ignored = trace.ignore_eos
    if ignored is not None and declared is not None:
        ignored = ignored * (declared == trace.output_tokens)
    return Workload(trace.name, arrivals, *lengths, declared, *contents, samples, users, trace.priority, ignored)


def _checked_n(n: int) -> int:
    if not 1 <= n <= MOST_SEQUENCES:
        raise SettingError("n", n, f"must be from 1 to {MOST_SEQUENCES}")
    return n


def _arrival_ticks(trace: Trace, request_rate: float | None, seed: int) -> np.ndarray:
    if request_rate is not None:
        return poisson(len(trace), request_rate, stream(seed, "arrivals"))
    if trace.arrival_ticks is None:
        raise MissingSetting("request_rate", f"{trace.name} has no arrivals; give a request rate")
    return trace.arrival_ticks
