"""Three loads for today's models: short chats, long contexts, agents. Their lengths and the sources are in ``LOADS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...sim.types.ticks import PER_SECOND
from ...sim.workload.content import PromptContent
from ...sim.workload.users import Users
from ...sim.workload.workload import Workload
from ...traces import stream, synthetic_pairs

_SHAREGPT = "vllm_sosp23_sharegpt_opt"
_MOST_CHAT_TOKENS = 2048
_CONTEXT_TOKENS, _ANSWER_TOKENS, _LEAST_SHARE = 32_768, 1_024, 0.8
#: Turns of an agent, tokens of its first prompt, tokens that a turn adds, tokens of an answer, and seconds that a tool takes.
_TURNS, _FIRST_PROMPT, _ADDED, _ANSWER, _TOOL_S = 8, 4_350, 1_213, 182, 2


@dataclass(frozen=True)
class Load:
    """A load.

    Attributes:
        name: Name in documents.
        text: Lengths, arrivals and source, in a sentence.
        requests: Number of requests.
        make: The workload for a number of requests and a seed.
    """

    name: str
    text: str
    requests: int
    make: Callable[[int, int], Workload]

    def workload(self, seed: int) -> Workload:
        """The requests."""
        return self.make(self.requests, seed)


def _short_chat(requests: int, seed: int) -> Workload:
    pairs = synthetic_pairs(_SHAREGPT, requests, seed, _MOST_CHAT_TOKENS)
    return Workload("short chat", np.zeros(requests), pairs.prompt_tokens, pairs.output_tokens)


def _long_context(requests: int, seed: int) -> Workload:
    least = int(_LEAST_SHARE * _CONTEXT_TOKENS)
    prompts = stream(seed, "long context").integers(least, _CONTEXT_TOKENS + 1, requests)
    return Workload("long context", np.zeros(requests), prompts, np.full(requests, _ANSWER_TOKENS))


def _agents(requests: int, seed: int) -> Workload:
    sessions = requests // _TURNS
    turn = np.tile(np.arange(_TURNS), sessions)
    session_id = np.repeat(np.arange(sessions), _TURNS)
    added = stream(seed, "agents").integers(_ADDED // 2, _ADDED * 3 // 2 + 1, (sessions, _TURNS))
    # The first prompt varies like what a turn adds.
    added[:, 0] = added[:, 0] * _FIRST_PROMPT // _ADDED
    users = Users(None, np.full(len(turn), _TOOL_S * PER_SECOND), session_id)
    return Workload(
        "agents",
        np.zeros(len(turn)),
        np.cumsum(added, axis=1).ravel(),
        np.full(len(turn), _ANSWER),
        content=PromptContent.of_sessions(session_id),
        users=users,
    )


LOADS = (
    Load(
        "short chat",
        f"first rounds of ShareGPT, drawn from the summary of the SOSP'23 paper's pairs, up to {_MOST_CHAT_TOKENS:,} tokens; all"
        " requests at once",
        1_500,
        _short_chat,
    ),
    Load(
        "long context",
        f"prompts uniform from {int(_LEAST_SHARE * _CONTEXT_TOKENS):,} to {_CONTEXT_TOKENS:,} tokens (the longer context of"
        f" vllm#55196), {_ANSWER_TOKENS:,} output tokens (assumed); all requests at once",
        60,
        _long_context,
    ),
    Load(
        "agents",
        f"sessions of {_TURNS} turns, {_FIRST_PROMPT:,} tokens at first and {_ADDED:,} more each turn, {_ANSWER} output tokens: the"
        " mean lengths of the tool and agent trace of Mooncake (FAST'25, 8,596 and 182 tokens); the turns, what a turn adds and a"
        f" tool's {_TOOL_S} s are assumed; all sessions at once",
        800,
        _agents,
    ),
)
