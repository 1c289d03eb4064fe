"""Batches of requests, JSON lines, as OpenAI's and Anthropic's batch APIs and ``vllm run-batch`` take and write them.

    output: {"id": ..., "custom_id": "a", "response": {"status_code": 200, "body": {"usage": {"prompt_tokens": 8,
             "completion_tokens": 20}, ...}}, "error": null}
            {"custom_id": "a", "result": {"type": "succeeded", "message": {"usage": {"input_tokens": 8, "output_tokens": 20}}}}
    input:  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content":
             "..."}], "max_tokens": 20}}

A batch has no times: its requests arrive at once. The input has no lengths: ``--tokenizer`` counts those of the prompts, without
the tokens that a chat template adds, and an answer is assumed to be as long as its ``max_tokens``. Requests with an error count
as failed.

Source: platform.openai.com/docs/api-reference/batch, the request input and output objects; docs.anthropic.com, Message Batches;
vllm-project/vllm, vllm/entrypoints/openai/run_batch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ...sim.types.errors import TraceError
from ..parsing import arrow as pa
from ..parsing.form import Form, lengths
from ..parsing.json_values import Element
from ..parsing.jsonl_format import numbers, value_at
from ..parsing.nested import Nested
from ..parsing.table import Table
from .logs import tokens_of
from .sharegpt import token_counter

_MOST = ("body.max_tokens", "body.max_completion_tokens", "body.max_output_tokens")
_PROMPT, _OUTPUT = "prompt_tokens", "completion_tokens"


def _is_output(record: dict[str, Any]) -> bool:
    return "custom_id" in record and ("response" in record or "result" in record)


def is_batch_input(record: dict[str, Any]) -> bool:
    """Whether a value is a request of the input of a batch."""
    return "custom_id" in record and isinstance(record.get("body"), dict)


def _requests(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tokens_of(record)


def _opener() -> Callable[[dict[str, Any]], Iterator[dict[str, Any]]]:
    return _requests


BATCHES = Nested(
    Form(
        "output of a batch",
        {},
        lengths(_PROMPT, _OUTPUT),
        content={},
        failures=frozenset({0, None}),
        at_once=True,
    ),
    _is_output,
    _opener,
    unit="line",
)
BATCH_INPUT = Form(
    "input of a batch",
    {},
    lengths(_PROMPT, "max_tokens"),
    content={},
    at_once=True,
    remarks=("a batch's input has no answers, which are assumed to be as long as max_tokens",),
)


class BatchInputParser:
    """Parser of the requests of a batch into a table of lengths.

    Args:
        path: The file.
        tokenizer: A Hugging Face ``tokenizer.json``; without one there are no lengths.
    """

    def __init__(self, path: str | PathLike[str], tokenizer: Path | None) -> None:
        self._path, self._count = path, None if tokenizer is None else token_counter(tokenizer)

    def __call__(self, batch: Sequence[Element]) -> Table:
        """The lengths of the requests.

        Raises:
            TraceError: There is no tokenizer; or an element is not a request, or has no texts.
        """
        if self._count is None:
            remedy = "is the input of a batch, without lengths; give the batch's output, or --tokenizer tokenizer.json"
            raise TraceError(self._path, None, None, None, remedy)
        table = Table(self._path, {}, np.array([element.line for element in batch]))
        records = [element.value for element in batch]
        for row, record in enumerate(records):
            if not isinstance(record, dict) or not is_batch_input(record):
                raise table.error(row, "row", record, "is not a request of a batch; correct or drop it")
        prompts = self._count([_text(table, row, record["body"]) for row, record in enumerate(records)])
        most = [next((value_at(record, name) for name in _MOST if value_at(record, name)), None) for record in records]
        for row, value in enumerate(most):
            if value is None:
                remedy = "is missing, and says how long the answer is; give the batch's output, which has the lengths"
                raise table.error(row, "max_tokens", None, remedy)
        return table.having(
            **{_PROMPT: pa.array(prompts, pa.int64()), "max_tokens": numbers(table, "max_tokens", most)}
        )


def _text(table: Table, row: int, body: Mapping[str, Any]) -> str:
    """The text of a prompt: that of all messages, of a completion's ``prompt``, or of a response's ``input``."""
    messages = next((body[name] for name in ("messages", "prompt", "input") if name in body), None)
    parts = [messages] if isinstance(messages, str) else messages
    texts: list[Any] = []
    for part in parts if isinstance(parts, list) else []:
        content = part.get("content") if isinstance(part, dict) else part
        pieces = content if isinstance(content, list) else [content]
        texts += [piece.get("text") if isinstance(piece, dict) else piece for piece in pieces]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise table.error(row, "messages", messages, "must be messages with a text as content; correct or drop it")
    return "\n".join(texts)
