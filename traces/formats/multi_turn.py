"""Conversations of vLLM's ``benchmark_serving_multi_turn.py``, JSON: their messages, or the distributions that they are drawn from.

    [{"id": "QWJhYvA", "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}, ...]

    {"filetype": "generate_conversations", "num_conversations": 24, "text_files": [...],
     "prompt_input": {"num_turns": {"distribution": "uniform", "min": 12, "max": 18}, "common_prefix_num_tokens": {...},
                      "prefix_num_tokens": {...}, "num_tokens": {...}},
     "prompt_output": {"num_tokens": {...}}}

A conversation is a session: each answer is a request, whose prompt is all messages before. Messages have a quarter of their characters as
tokens, or those that a ``tokenizer.json`` counts, without a chat template. Distributions are drawn with numpy as the client draws them, with
seed 0. The files have no times: the client serves conversations in turn, at most ``--max-active-conversations`` at once. What
conversations have in common, such as ``common_prefix_num_tokens``, is not shared here.

Source: vllm-project/vllm, benchmarks/multi_turn (README.md, bench_dataset.py, generate_multi_turn.json).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..arrivals.streams import stream
from ..parsing.form import SESSION, Form, lengths
from ..parsing.jsonl_format import sessions
from ..parsing.nested import Nested
from .sharegpt import Counter

_PROMPT, _OUTPUT = "prompt_tokens", "output_tokens"
_GENERATED = "generate_conversations"
#: Bounds of the tokens of a turn and of the turns, which no distribution may exceed.
_MOST_TOKENS, _MOST_CONVERSATIONS = 1 << 24, 1 << 20


def is_multi_turn(record: dict[str, Any]) -> bool:
    """Whether a value is a conversation, or what conversations are drawn from."""
    if record.get("filetype") == _GENERATED:
        return True
    messages = record.get("messages")
    return (
        isinstance(messages, list)
        and "id" in record
        and all(isinstance(each, dict) and "role" in each for each in messages)
    )


def multi_turn(count: Counter) -> Nested:
    """The format; ``count`` counts the tokens of texts."""

    def requests(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if record.get("filetype") == _GENERATED:
            return _drawn(record)
        return _turns(record, count)

    form = Form(
        "multi-turn conversations (vLLM)",
        {},
        lengths(_PROMPT, _OUTPUT),
        {SESSION: sessions},
        side_by_side=True,
        remarks=(
            "a turn follows the answer to the turn before with --think-time 0 or more; what conversations have in common is not known",
        ),
    )
    return Nested(form, is_multi_turn, lambda: requests)


def _turns(record: Mapping[str, Any], count: Counter) -> Iterator[dict[str, Any]]:
    """A request for each answer; one without texts has no lengths, and is refused as a row."""
    texts = [each.get("content") for each in record["messages"]]
    if not all(isinstance(text, str) for text in texts):
        yield {SESSION: record["id"]}
        return
    tokens = count(texts)
    for place, each in enumerate(record["messages"]):
        if each["role"] == "assistant":
            yield {SESSION: record["id"], _PROMPT: sum(tokens[:place]), _OUTPUT: tokens[place]}


def _drawn(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The requests of all conversations; one without lengths where a distribution is none of the client's."""
    number: Any = record.get("num_conversations")
    try:
        rng, asked, answers = stream(0, "conversations"), record["prompt_input"], record["prompt_output"]
        turns = np.maximum(_sample(rng, asked["num_turns"], number), 2)
        prefixes = _sample(rng, asked["prefix_num_tokens"], number)
        common = int(_sample(rng, asked.get("common_prefix_num_tokens", _NONE), 1)[0])
        for name, prefix, count in zip(range(len(turns)), prefixes.tolist(), (turns + turns % 2).tolist(), strict=True):
            says, answered = _sample(rng, asked["num_tokens"], count), _sample(rng, answers["num_tokens"], count)
            known = 0
            for turn in range(0, count, 2):
                own = int(says[turn]) + (prefix + max(0, common - int(says[turn])) if turn == 0 else 0)
                known += own
                output = max(1, int(answered[turn + 1]))
                yield {SESSION: f"CONV_ID_{name}", _PROMPT: known, _OUTPUT: output}
                known += output
    except (KeyError, TypeError, ValueError):
        yield {}


_NONE = {"distribution": "constant", "value": 0}


def _sample(rng: np.random.Generator, of: Mapping[str, Any], size: int) -> np.ndarray:
    """Draws of one of the client's distributions, int64 [size].

    Raises:
        KeyError, TypeError, ValueError: It is none of these.
    """
    if not 0 < size <= _MOST_CONVERSATIONS:
        raise ValueError(size)
    drawn = _DISTRIBUTIONS[of["distribution"]](rng, of, size)
    most = min(of.get("max", _MOST_TOKENS), _MOST_TOKENS)
    return np.clip(np.rint(drawn), 0, most).astype(np.int64)


def _lognormal(rng: np.random.Generator, of: Mapping[str, Any], size: int) -> np.ndarray:
    if "average" not in of:
        return rng.lognormal(of["mean"], of["sigma"], size)
    # By the ratio of median and mean; the draws are scaled to the mean, as the client's are.
    sigma = np.sqrt(-2 * np.log(of.get("median_ratio") or 0.85))
    drawn = rng.lognormal(0.0, sigma, size)
    return drawn * of["average"] / drawn.mean()


_DISTRIBUTIONS: Mapping[str, Callable[[np.random.Generator, Mapping[str, Any], int], np.ndarray]] = {
    "constant": lambda rng, of, size: np.full(size, of["value"]),
    "uniform": lambda rng, of, size: rng.integers(int(of["min"]), int(of["max"]) + 1, size),
    "zipf": lambda rng, of, size: rng.zipf(of["alpha"], size),
    "poisson": lambda rng, of, size: rng.poisson(of["alpha"], size),
    "lognormal": _lognormal,
}
