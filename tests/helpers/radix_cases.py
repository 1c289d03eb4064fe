"""Requests that begin alike, for SGLang's radix tree: stories, random cases, and what the engine is held to."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from engine_runs import serve
from fragmeter.sim.workload.content import PromptContent
from oracle import Limits, Outcome, Pool, Request
from oracle.story import log
from same_runs import same
from schedulers import StoryCost, expected, log_of, same_requests
from strategies import Case, limits, requests, small_costs

A, B = 1, 2


def story(requests: list[tuple[int, int, list[tuple[int, int]]]], slots: int, **limits) -> Case:
    """A case of requests as (arrival, output, pieces of the prompt as (kind, tokens)), outputs declared; a kind below
    nought is in no other request."""
    filled, ids, tokens, offsets = [], [], [], [0]
    for index, (arrival, output, pieces) in enumerate(requests):
        prompt = tuple((kind, place) for kind, length in pieces for place in range(length))
        answer = tuple((index, "out", place) for place in range(output))
        filled.append(Request(arrival, len(prompt), output, output, prompt, answer))
        ids += [kind for kind, _ in pieces]
        tokens += [length for _, length in pieces]
        offsets.append(len(ids))
    bounds = Limits(max_model_len=100, **({"max_num_seqs": 64} | limits))
    return Case(filled, Pool(slots, 1), bounds, StoryCost(), PromptContent(offsets, ids, tokens))


def log_lines(case: Case) -> list[str]:
    """The oracle's log, to which the engine keeps."""
    outcome = expected("sglang", case)
    check(case, outcome)
    return log(outcome)


def check(case: Case, outcome: Outcome) -> None:
    """Stepping gives the oracle's log, stepping and leaping its times; and both are the same bits."""
    stepped, leapt = serve("sglang", case, leap=False), serve("sglang", case, leap=True)
    assert log_of(stepped) == [(step.start_ticks, step.ticks, step.buckets) for step in outcome.steps]
    for run in (stepped, leapt):
        same_requests(run, outcome)
    same(leapt, stepped)


@st.composite
def shared_cases(draw: st.DrawFn) -> Case:
    """Requests that begin alike, over a pool that their tokens overfill: prompts of a few pieces, or turns of sessions;
    or short prompts one after the other, with outputs that turn out to be longer than what is reserved for them.

    The oracle is given every token, the simulator what its traces say.
    """
    bounds = draw(limits([40, 64], [1, 3, 8, 30, 2560], [1, 3, 64]))
    bounds = replace(bounds, schedule_policy=draw(st.sampled_from(["lpm", "lpm", "fcfs"])))
    some = requests(8, 24, 14, [0, 0, 1, 100, 121, 700], bounds.max_model_len)
    drawn = draw(st.one_of(some, late_requests()))
    spell = draw(st.sampled_from([in_pieces, in_sessions]))
    filled, content = spell(draw, drawn)
    longest = max(request.prompt_tokens + request.output_tokens for request in drawn)
    pool = Pool(int(longest * draw(st.sampled_from([1.1, 1.3, 2, 2.7, 3.4, 4]))) + draw(st.integers(1, 4)), 1)
    return Case(filled, pool, bounds, draw(small_costs), content)


@st.composite
def late_requests(draw: st.DrawFn) -> list[Request]:
    """One after the other, with outputs of about one length, which the server knows."""
    now, drawn = 0, []
    for _ in range(draw(st.integers(5, 10))):
        now += draw(st.sampled_from([90, 115, 130, 250]))
        output = draw(st.integers(24, 34))
        drawn.append(Request(now, draw(st.integers(1, 5)), output, output))
    return drawn


def in_pieces(draw: st.DrawFn, drawn: list[Request]) -> tuple[list[Request], PromptContent]:
    """Prompts that begin with pieces of few kinds; of two lengths of a kind one begins the other."""
    filled, offsets, ids, tokens = [], [0], [], []
    for index, request in enumerate(drawn):
        prompt: list[object] = []
        for kind, length in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 7)), max_size=4)):
            length = min(length, request.prompt_tokens - len(prompt))
            if length:
                ids.append(kind)
                tokens.append(length)
                prompt += [(kind, place) for place in range(length)]
        offsets.append(len(ids))
        prompt += [("own", index, place) for place in range(request.prompt_tokens - len(prompt))]
        output = tuple(("output", index, place) for place in range(request.output_tokens))
        filled.append(replace(request, prompt_ids=tuple(prompt), output_ids=output))
    return filled, PromptContent(offsets, ids, tokens)


def in_sessions(draw: st.DrawFn, drawn: list[Request]) -> tuple[list[Request], PromptContent]:
    """Turns that begin with all that was said before, as far as the prompt is long."""
    said: dict[int, tuple[object, ...]] = {}
    filled, sessions = [], []
    for index, request in enumerate(drawn):
        session = draw(st.integers(0, 2))
        known = said.get(session, ())[: request.prompt_tokens]
        prompt = (*known, *(("own", index, place) for place in range(request.prompt_tokens - len(known))))
        output = tuple(("output", index, place) for place in range(request.output_tokens))
        said[session] = prompt + output
        sessions.append(session)
        filled.append(replace(request, prompt_ids=prompt, output_ids=output))
    return filled, PromptContent.of_sessions(sessions)
