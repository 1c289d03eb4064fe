"""Sessions of coding agents, JSON: one object per session, as kv-cache-tester and the data sets made for it have them.

    {"id": "trace_0049", "models": [...], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 8306, "system_tokens": 737,
     "requests": [{"t": 0.0, "type": "s", "model": "...", "in": 9473, "out": 133, "hash_ids": [1, 2, ...], "api_time": 1.79,
     "think_time": 0.0, ...}, {"t": 185.1, "type": "subagent", "agent_id": "...", "requests": [...]}, ...]}

``t`` is in seconds from the start of the session, ``think_time`` the seconds between the answer to the request before and this one.
``hash_ids`` are the full blocks of ``block_size`` tokens; the rest of a prompt has none. Equal ids of two sessions are equal blocks only
if ``hash_id_scope`` is ``"global"``. A sub-agent is a session of its own, which begins at its own time; its requests count from the time
of its entry, or, in files in which they are not earlier than that, from the start of the session. As in kv-cache-tester the answer before
its entry starts it, and the next turn of the agent waits for its end, and then for what the agent's own delay has beyond it.

Source: callanjfox/agentic-coding-analysis, docs/TRACE_FORMAT.md; callanjfox/kv-cache-tester, docs/trace_replay_tester.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..parsing.form import BLOCK_TOKENS, CONTENT, HASH_IDS, SESSION, ZERO, Form, lengths
from ..parsing.nested import Nested
from ..parsing.times import clock

_TIME, _THINK = "t", "think_time"
_SECONDS = clock("s", doubted=False)
#: Ids of sessions of their own begin here, beyond those that all sessions share.
_LOCAL = 1 << 32


def _is_session(record: dict[str, Any]) -> bool:
    return isinstance(record.get("requests"), list) and "block_size" in record


def _opener() -> Callable[[dict[str, Any]], Iterator[Any]]:
    """Returns the function from a session to its requests; ids of later sessions differ unless they are global."""
    after = _LOCAL

    def requests(session: dict[str, Any]) -> Iterator[Any]:
        nonlocal after
        if not _is_session(session):
            # Refused as a request without lengths.
            yield session
            return
        offset = 0 if session.get("hash_id_scope") == "global" else after
        for request in _requests(session["requests"], session.get("id"), session["block_size"], 0.0):
            ids = request.get(HASH_IDS) if isinstance(request, dict) else None
            if offset and isinstance(ids, list) and all(type(each) is int for each in ids):
                request[HASH_IDS] = [each + offset for each in ids]
                after = max([after, *(each + 1 for each in request[HASH_IDS])])
            yield request

    return requests


def _requests(entries: list[Any], name: Any, block_size: Any, since: Any) -> Iterator[Any]:
    """The requests of a session, each after those before it, and then those of its sub-agents."""
    before: dict[str, Any] = {}
    agents: list[dict[str, Any]] = []
    waits: list[dict[str, Any]] = []
    for entry in entries:
        if not isinstance(entry, dict):
            yield entry
        elif entry.get("type") == "subagent" and isinstance(entry.get("requests"), list):
            agents.append(entry)
            waits.append(entry)
        else:
            ids = entry.get(HASH_IDS)
            blocks = [block_size] * len(ids) if isinstance(ids, list) else None
            found = {
                "in": entry.get("in"),
                "out": entry.get("out"),
                _TIME: _sum(since, entry.get(_TIME)),
                SESSION: name,
            }
            more = {_THINK: _think_after(waits, before, entry), HASH_IDS: ids, BLOCK_TOKENS: blocks}
            # A key that no request has makes no column: without delays a trace is replayed at its own times.
            yield found | {name: value for name, value in more.items() if value is not None}
            before, waits = entry, []
    for number, agent in enumerate(agents):
        first: Any = next((each.get(_TIME) for each in agent["requests"] if isinstance(each, dict)), None)
        start = _sum(since, agent.get(_TIME)) if _counts_from_entry(agent, first) else since
        yield from _requests(agent["requests"], f"{name}/{agent.get('agent_id', number)}", block_size, start)


def _sum(since: Any, time: Any) -> Any:
    return since + time if _are_numbers(since, time) else time


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) for value in values)


def _think_after(agents: list[dict[str, Any]], before: dict[str, Any], entry: dict[str, Any]) -> Any:
    """The delay before a turn; after sub-agents no longer than the time since the last answer of each."""
    think: Any = _think(before, entry)
    sent: Any = entry.get(_TIME)
    for agent in agents:
        requests = [each for each in agent["requests"] if isinstance(each, dict)]
        last: dict[str, Any] = requests[-1] if requests else {}
        ended: Any = _sum(last.get(_TIME), last.get("api_time"))
        if requests and _counts_from_entry(agent, requests[0].get(_TIME)):
            ended = _sum(ended, agent.get(_TIME))
        if _are_numbers(think, sent, ended):
            think = max(0.0, min(think, sent - ended))
    return think


def _counts_from_entry(agent: dict[str, Any], first: Any) -> bool:
    """Whether the times of a sub-agent's requests, of which one is given, count from its own entry."""
    spawned: Any = agent.get(_TIME)
    return _are_numbers(first, spawned) and first < spawned


def _think(before: dict[str, Any], entry: dict[str, Any]) -> Any:
    """The delay after the answer before, where it is given or follows from the times; None otherwise."""
    if entry.get(_THINK) is not None:
        return entry[_THINK]
    sent: Any = before.get(_TIME)
    took: Any = before.get("api_time")
    time: Any = entry.get(_TIME)
    return max(0.0, time - sent - took) if _are_numbers(sent, took, time) else None


AGENTS = Nested(
    Form(
        "agent sessions (kv-cache-tester)",
        {_TIME: _SECONDS},
        lengths("in", "out"),
        CONTENT,
        delays={_THINK: _SECONDS},
        side_by_side=True,
        subsessions=True,
        failures=ZERO,
        remarks=("times count from the start of each session: all sessions begin at once",),
    ),
    _is_session,
    _opener,
)
