"""Shared prefixes of a load: an LRU stack of prompts, from which a request continues one.

In the LRU stack model (Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970; Spirn,
Distance string models for program behavior, Computer 9(11), 1976) a reference is drawn by its distance: how long ago
the same item was last used. The item here is a prefix. Of each request are drawn

    system prompt    tokens of a prefix that ``_CONTINUATIONS`` or more blocks follow in the trace
    session          share of its other tokens that continue an earlier prompt, by the sixteenth of the prompt's length
    distance         requests since the last one with the same prefix: one distribution each for requests that share no
                     more than a system prompt, and for those that continue a session

and it begins with the prompt that is closest to this distance and not much longer than the prefix, the costs of the two being
logarithms of ratios. A prompt is continued once; what else begins alike is a branch or a system prompt. A distance beyond the
first request leaves the system prompt. A trace shows a distance d only where d requests are before, so each counts
n / (n - d) times in the fit, and as often as tokens are used again after it.
"""

from __future__ import annotations

import numpy as np

from ...sim.memory.prefix import HashChain
from ...sim.workload.content import PromptContent
from ..stats.stats import reused
from ..types.trace import Trace
from .load import GRID, Marginal, Reuse
from .marginal import ranks_of, stratified

#: Different blocks that follow a system prompt, and requests on each side of a distance among which one is continued.
_CONTINUATIONS, _SIDE = 16, 512


def fit_reuse(trace: Trace) -> Reuse | None:
    """The shared prefixes of a trace; None if it has none."""
    found = reused(trace)
    if found is None or not found.tokens.any():
        return None
    n, tokens, distance = len(trace), found.tokens, np.arange(len(trace)) - found.source
    system = np.minimum(tokens, _system_tokens(trace))
    goes_on = np.flatnonzero(tokens > system)
    share = ((tokens - system) / np.maximum(trace.prompt_tokens - system, 1))[goes_on]
    lags = _lags(distance[goes_on], (tokens - system)[goes_on], n)
    band, grid = ranks_of(trace.prompt_tokens) * GRID // n, np.zeros((GRID, GRID + 1))
    kept = 1 - lags.mean() / n if len(lags) else 1.0
    np.add.at(grid, (band[goes_on], 1 + ranks_of(share) * GRID // max(len(share), 1)), 1 / kept)
    grid[:, 0] = np.maximum(0, np.bincount(band, minlength=GRID) - grid.sum(axis=1))
    alone = distance[(tokens > 0) & (tokens == system)]
    columns = (system[tokens > 0], alone, share, lags)
    first, second, third, fourth = (Marginal.of(each if len(each) else np.zeros(1)) for each in columns)
    counts = tuple(map(tuple, np.rint(grid).astype(int).tolist()))
    # A prompt that was seen before as a whole may end within a block.
    block_tokens = max(1, int(np.gcd.reduce(tokens[tokens < trace.prompt_tokens])))
    return Reuse(block_tokens, first, second, third, fourth, counts, found.by != "hash_ids")


def _lags(distance: np.ndarray, tokens: np.ndarray, n: int) -> np.ndarray:
    """As many distances, ascending, with the distribution over the tokens that are used again in an endless trace."""
    order = np.argsort(distance, kind="stable")
    upper = np.cumsum((tokens * (n / (n - distance)))[order])
    shares = (np.arange(len(distance)) + 0.5) / max(len(distance), 1)
    return distance[order][np.searchsorted(upper, shares * upper[-1:])]


def _system_tokens(trace: Trace) -> np.ndarray:
    """Tokens of each prompt up to the last place at which many prompts part, int64 [n]."""
    system, content = np.zeros(len(trace), dtype=np.int64), trace.content
    if content is None or not len(content.ids):
        return system
    chain, spans = HashChain(), [slice(*span) for span in zip(content.offsets[:-1], content.offsets[1:])]
    ids = content.ids.tolist()
    for span in spans:
        chain.extend(ids[span])
    follow = np.bincount(chain.parents)
    follow.resize(len(chain.parents))
    for request, span in enumerate(spans):
        parts = np.flatnonzero(follow[chain.extend(ids[span])] >= _CONTINUATIONS)
        system[request] = content.tokens[span][: parts[-1] + 1].sum() if len(parts) else 0
    return system


def draw_reuse(reuse: Reuse, prompts: np.ndarray, outputs: np.ndarray, rng: np.random.Generator) -> PromptContent:
    """Contents for prompts of a load (int64 [n]).

    Returns:
        Contents with sessions: a request that continues another belongs to its session. Nothing but sessions, if prompts
        go on from answers.
    """
    n, grid = len(prompts), np.array(reuse.grid, dtype=np.float64)
    anywhere = np.zeros(n, dtype=np.int64)
    rows = np.cumsum(grid / np.maximum(grid.sum(axis=1, keepdims=True), 1)).ravel() / GRID
    places = stratified(ranks_of(prompts) * GRID // n, rng)
    column = np.minimum(np.searchsorted(rows, places, side="right"), rows.size - 1) % (GRID + 1)
    goes_on, share = column > 0, np.zeros(n)
    share[goes_on] = reuse.session_share.at(stratified(column[goes_on] - 1, rng))
    system = np.minimum(reuse.system_tokens.occurring(stratified(anywhere, rng)), prompts)
    # Rounded at random, so that the mean is preserved.
    blocks = (share * (prompts - system) / reuse.block_tokens + rng.random(n)).astype(np.int64)
    tokens = system + np.minimum(blocks, (prompts - system) // reuse.block_tokens) * reuse.block_tokens
    lags = [each.whole(stratified(anywhere, rng), rng) for each in (reuse.system_distance, reuse.session_distance)]
    stack = _Stack(prompts, outputs if reuse.answers else np.zeros(n, dtype=np.int64))
    for request, (own, lag) in enumerate(zip(system.tolist(), lags[0].tolist(), strict=True)):
        source = None
        if goes_on[request]:
            source = stack.find(request, int(tokens[request]), int(lags[1][request]), own)
        if source is not None:
            stack.add(request, source, int(tokens[request]), True)
        else:
            stack.add(request, stack.find(request, own, lag, own - 1), own, False)
    return PromptContent.of_sessions(stack.sessions) if reuse.answers else stack.content()


class _Stack:
    """Prompts so far, as pieces: those of the prompt that it continues, and one of its own."""

    def __init__(self, prompts: np.ndarray, outputs: np.ndarray) -> None:
        self._length, self._taken = prompts + outputs, np.zeros(len(prompts), dtype=np.int64)
        self._logarithm, self._pieces = np.log(self._length), list[list[tuple[int, int]]]()
        self.sessions = np.arange(len(prompts))

    def find(self, request: int, tokens: int, distance: int, most_taken: int) -> int | None:
        """A request about ``distance`` before, with ``tokens`` or more; if possible one of which others share ``most_taken`` or fewer."""
        distance = max(distance, 1)
        if distance > request or tokens < 1:
            return None
        first = max(0, request - distance - _SIDE)
        near = slice(first, min(request, request - distance + _SIDE))
        fits = self._length[near] >= tokens
        not_taken = fits & (self._taken[near] <= most_taken)
        rows = first + np.flatnonzero(not_taken if not_taken.any() else fits)
        if not len(rows):
            return None
        return int(rows[np.argmin(np.abs(np.log((request - rows) / distance)) + 2 * self._logarithm[rows])])

    def add(self, request: int, source: int | None, tokens: int, goes_on: bool) -> None:
        """The prompt of ``request``, which begins with the first ``tokens`` of ``source``."""
        pieces, left = [], int(self._length[request])
        if source is not None:
            left -= tokens
            for piece, length in self._pieces[source]:
                pieces.append((piece, min(length, tokens)))
                tokens -= min(length, tokens)
                if not tokens:
                    break
            self._taken[source] = max(self._taken[source], self._length[request] - left)
            if goes_on:
                self.sessions[request] = self.sessions[source]
        self._pieces.append([*pieces, (request, left)] if left else pieces)

    def content(self) -> PromptContent:
        """The contents of all requests."""
        offsets = np.cumsum([0, *map(len, self._pieces)])
        ids, tokens = np.array([piece for pieces in self._pieces for piece in pieces], dtype=np.int64).T
        return PromptContent(offsets, ids, tokens, self.sessions)
