"""How much of a trace's prompts was there before: what an endless prefix cache would hit."""

from __future__ import annotations

import numpy as np

from ...sim.memory.prefix import HashChain
from ...sim.workload.content import NO_SESSION, PromptContent
from ..types.trace import Trace


def reused_tokens(trace: Trace) -> tuple[str, np.ndarray] | None:
    """By what it is known, and of each prompt the tokens (int64 [n]) of the longest prefix that was seen before.

    ``hash_ids``: the first blocks that some earlier prompt began with, too. ``session_id``: what was said in the session
    before. ``parent``: the text that a request goes on from. None where the trace says nothing of the kind.
    """
    if trace.dialogue is not None:
        return "parent", trace.dialogue.parent_tokens
    if trace.content is None:
        return None
    if len(trace.content.ids):
        return "hash_ids", _by_pieces(trace.content)
    if trace.content.session_id is None:
        return None
    return "session_id", _by_sessions(trace, trace.content.session_id)


def _by_pieces(content: PromptContent) -> np.ndarray:
    chain = HashChain()
    ids, tokens = content.ids.tolist(), content.tokens.tolist()
    offsets = content.offsets.tolist()
    reused = np.zeros(len(content), dtype=np.int64)
    for request, (start, end) in enumerate(zip(offsets, offsets[1:])):
        known = len(chain.parents)
        path = chain.extend(ids[start:end])
        # Numbers ascend as prefixes are first seen, and a known prefix begins with known ones.
        hits = sum(number < known for number in path)
        reused[request] = sum(tokens[start : start + hits])
    return reused


def _by_sessions(trace: Trace, session_id: np.ndarray) -> np.ndarray:
    reused = np.zeros(len(trace), dtype=np.int64)
    order = np.argsort(session_id, kind="stable")
    session = session_id[order]
    again = np.flatnonzero((session[1:] == session[:-1]) & (session[1:] != NO_SESSION))
    before, turn = order[again], order[again + 1]
    said = (trace.prompt_tokens + trace.output_tokens)[before]
    reused[turn] = np.minimum(said, trace.prompt_tokens[turn])
    return reused
