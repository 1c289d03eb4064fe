"""ShareGPT, JSON: an array of conversations. The first round of each is the request, as in vLLM's ``sharegpt``.

    [{"id": "QWJhYvA_0", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}]

Lengths are a quarter of the characters, rounded up, or the token counts of a ``tokenizer.json``. Conversations without
an answer are left out and counted. The file has no times.

Source: vllm-project/vllm, vllm/benchmarks/datasets (``ShareGPTDataset``: the first two turns); the quarter is the rule
of thumb of OpenAI's tokenizer page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ...sim.types.errors import MissingExtra, SettingError, install
from ..parsing import arrow as pa
from ..parsing.form import ZERO, Form
from ..parsing.json_values import Element
from ..parsing.table import Table

_CHARACTERS_A_TOKEN = 4
#: The key that holds the turns of a conversation, under either name.
TURNS = ("conversations", "conversation")
Counter = Callable[[Sequence[str]], list[int]]
SHAREGPT = Form("ShareGPT", {}, content={}, failures=ZERO)


class ShareGptParser:
    """Parser of conversations into a table of lengths.

    Args:
        path: The file.
        tokenizer: A Hugging Face ``tokenizer.json``; None counts characters.
    """

    def __init__(self, path: str | PathLike[str], tokenizer: Path | None) -> None:
        self._path = path
        self._count = quarters if tokenizer is None else token_counter(tokenizer)

    def __call__(self, batch: Sequence[Element]) -> Table:
        """The first rounds; a conversation without an answer has lengths of 0.

        Raises:
            TraceError: An element is not a conversation.
        """
        table = Table(self._path, {}, np.array([element.line for element in batch]))
        rounds = [_first_round(table, row, element.value) for row, element in enumerate(batch)]
        prompts, outputs = (self._count([part[side] for part in rounds]) for side in (0, 1))
        return table.having(prompt_tokens=pa.array(prompts, pa.int64()), output_tokens=pa.array(outputs, pa.int64()))


def _first_round(table: Table, row: int, conversation: Any) -> tuple[str, str]:
    """Texts of the first prompt and its answer; both empty if there is no answer."""
    turns = None
    if isinstance(conversation, dict):
        turns = next((conversation[name] for name in TURNS if name in conversation), None)
    if not isinstance(turns, list):
        raise table.error(row, "conversation", conversation, "must have a list of conversations; correct or drop it")
    texts = [turn["value"] for turn in turns[:2] if isinstance(turn, dict) and isinstance(turn.get("value"), str)]
    if len(texts) < len(turns[:2]):
        raise table.error(row, "conversations", turns[:2], "must be turns with a text as value; correct or drop it")
    return (texts[0], texts[1]) if len(texts) == 2 and all(texts) else ("", "")


def quarters(texts: Sequence[str]) -> list[int]:
    """A quarter of the characters of each text, rounded up."""
    return [-(-len(text) // _CHARACTERS_A_TOKEN) for text in texts]


def token_counter(tokenizer: Path) -> Counter:
    """Returns a function that counts the tokens of texts.

    Raises:
        MissingExtra: The package ``tokenizers`` is not installed.
        SettingError: The file is not a tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        text = f"--tokenizer needs the package tokenizers: {install('traces')}, or leave it out to take characters/4"
        raise MissingExtra(text) from None
    try:
        found = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # tokenizers raises plain Exception
        complaint = " ".join(str(error).split())
        raise SettingError("tokenizer", str(tokenizer), f"is not a tokenizer.json ({complaint})") from None
    return lambda texts: [len(encoding.ids) for encoding in found.encode_batch(texts, add_special_tokens=False)]
