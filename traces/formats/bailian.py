"""Alibaba's Qwen-Bailian traces, JSON lines.

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
     "type": "text", "turn": 2, "hash_ids": [1089, 1090, 1091]}

``timestamp`` is in seconds. ``hash_ids`` are blocks of 16 tokens. ``parent_chat_id`` is the previous turn, -1 at the
first turn. Turns that are linked by it form one session.

Source: alibaba-edu/qwen-bailian-usagetraces-anon, README.md.
"""

from collections.abc import Callable

from ..parsing import arrow as pa
from ..parsing.form import HASH_IDS, SECONDS, SESSION, VLLM_BLOCK_TOKENS, Form
from ..parsing.jsonl_format import whole_lists, whole_numbers
from ..parsing.table import Table

_CHAT, _PARENT, _NONE = "chat_id", "parent_chat_id", -1


def _sessions() -> Callable[[Table], Table]:
    """Returns a function that assigns each chat the session of its parent, or a new session."""
    first: dict[int, int] = {}

    def prepared(table: Table) -> Table:
        """The table with a session for each chat; remembers the chats of earlier tables."""
        if _CHAT not in table.columns:
            return table
        chats = table.columns[_CHAT].to_pylist()
        parents = table.columns[_PARENT].to_pylist() if _PARENT in table.columns else [None] * len(chats)
        for chat, parent in zip(chats, parents, strict=True):
            root = chat if parent in (None, _NONE) else parent
            first[chat] = first.get(root, root)
        return table.having(**{SESSION: pa.array([first[chat] for chat in chats], pa.int64())})

    return prepared


BAILIAN = Form(
    "Qwen-Bailian",
    {"timestamp": SECONDS},
    content={HASH_IDS: whole_lists, _CHAT: whole_numbers, _PARENT: whole_numbers},
    preparer=_sessions,
    # A chat takes the session of its parent, which has to be known.
    in_order=True,
    block_tokens=VLLM_BLOCK_TOKENS,
)
