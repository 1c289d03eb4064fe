"""Requests that begin alike: for the engine as pieces or sessions, for the oracle token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from engine_runs import settings_of, workload_of
from fragmeter.sim.config.settings import Settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.runs.run import Run
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from oracle import Outcome, Pool, Request
from oracle.decode_step import run as run_oracle
from oracle.vllm_v1_caching import CachingVllmV1
from strategies import Case, limits, small_costs


@dataclass(frozen=True)
class SharedCase(Case):
    """A case with texts for its requests, and what the engine knows of them."""

    content: PromptContent

    @property
    def workload(self) -> Workload:
        return replace(workload_of(self.requests, self.limits.max_model_len), content=self.content)


def request(arrival: int, prompt: int, output: int, text: tuple) -> Request:
    return Request(arrival, prompt, output, prompt_ids=text[:prompt], output_ids=text[prompt:])


def of_pieces(
    arrivals: list[int], pieces: list[list[tuple[int, int]]], own: list[int], outputs: list[int]
) -> tuple[list[Request], PromptContent]:
    """Requests of (id, tokens) a piece and so many tokens of their own."""
    requests = []
    for index, (arrival, of, rest, output) in enumerate(zip(arrivals, pieces, own, outputs, strict=True)):
        text = [("piece", name, place) for name, tokens in of for place in range(tokens)]
        prompt = len(text) + rest
        text += [("own", index, place) for place in range(rest + output)]
        requests.append(request(arrival, prompt, output, tuple(text)))
    flat = [piece for of in pieces for piece in of]
    ids, tokens = [name for name, _ in flat], [tokens for _, tokens in flat]
    return requests, PromptContent(np.cumsum([0, *map(len, pieces)]), ids, tokens)


def of_sessions(
    arrivals: list[int], sessions: list[int], prompts: list[int], outputs: list[int]
) -> tuple[list[Request], PromptContent]:
    """Requests that are turns: as much of what was said before as fits, and then what is new. -1 is no session."""
    requests, said = [], {}
    for index, (arrival, session, prompt, output) in enumerate(zip(arrivals, sessions, prompts, outputs, strict=True)):
        known = said.get(session, ())[:prompt] if session >= 0 else ()
        text = (*known, *((index, place) for place in range(prompt - len(known) + output)))
        said[session] = text
        requests.append(request(arrival, prompt, output, text))
    return requests, PromptContent.of_sessions(np.array(sessions))


_gaps = st.sampled_from([0, 0, 1, 100, 121, 700, 5000])


@st.composite
def shared_cases(draw: st.DrawFn) -> SharedCase:
    """A few requests over a pool that they strain, so that prefixes are hit, evicted and lost to preemptions."""
    count = draw(st.integers(2, 8))
    arrivals = np.cumsum([draw(_gaps) for _ in range(count)]).tolist()
    outputs = [draw(st.integers(1, 12)) for _ in range(count)]
    if draw(st.booleans()):
        piece = st.tuples(st.integers(0, 2), st.integers(1, 7))
        pieces = [draw(st.lists(piece, max_size=3)) for _ in range(count)]
        own = [draw(st.integers(0 if of else 1, 4)) for of in pieces]
        requests, content = of_pieces(arrivals, pieces, own, outputs)
    else:
        sessions = [draw(st.integers(-1, 1)) for _ in range(count)]
        prompts = [draw(st.integers(1, 24)) for _ in range(count)]
        requests, content = of_sessions(arrivals, sessions, prompts, outputs)
    pool = Pool(draw(st.integers(2, 20)), draw(st.integers(1, 4)))
    bounds = draw(limits([40], [4, 9, 2560], [1, 3, 64]))
    bounds = replace(bounds, max_num_batched_tokens=max(bounds.max_num_batched_tokens, bounds.max_num_seqs))
    return SharedCase(requests, pool, bounds, draw(small_costs), content)


def caching_settings(case: SharedCase, window: tuple[int, int] | None = None, **switches) -> Settings:
    """vllm-v1 with prefix caching, unless ``switches`` say otherwise."""
    caching = {"enable_prefix_caching": True} | switches
    return settings_of("vllm-v1", case.pool, case.limits, window, **caching)


def serve_cached(case: SharedCase, window: tuple[int, int] | None = None, **switches) -> Run:
    """Run a case with those settings."""
    return simulate(caching_settings(case, window, **switches), case.workload, case.cost)


def expected(case: SharedCase) -> tuple[Outcome, CachingVllmV1]:
    """What the oracle says, and the oracle as it was left."""
    cost, system = case.cost, CachingVllmV1(case.pool, case.limits)
    return run_oracle(system, case.requests, cost.step_ticks, cost.swap_out_ticks, cost.swap_in_ticks), system
