"""Conversations of vLLM's multi-turn benchmark."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fragmeter.sim.types.errors import TraceError
from fragmeter.traces import read, read_with_content

CONVERSATIONS = [
    {
        "id": "a",
        "messages": [
            {"role": "system", "content": "s" * 40},
            {"role": "user", "content": "u" * 20},
            {"role": "assistant", "content": "x" * 9},
            {"role": "user", "content": "u" * 8},
            {"role": "assistant", "content": "y" * 12},
        ],
    },
    {"id": "b", "messages": [{"role": "user", "content": "u" * 4}, {"role": "assistant", "content": "z"}]},
]
#: ``generate_multi_turn.json`` of vLLM.
GENERATED = {
    "filetype": "generate_conversations",
    "num_conversations": 24,
    "text_files": ["pg1184.txt"],
    "print_stats": False,
    "prompt_input": {
        "num_turns": {"distribution": "uniform", "min": 12, "max": 18},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 500},
        "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
        "num_tokens": {"distribution": "uniform", "min": 120, "max": 160},
    },
    "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 80, "max": 120}},
}


def written(folder, document) -> str:
    path = folder / "conversations.json"
    path.write_text(json.dumps(document, indent=2))
    return str(path)


def test_each_answer_is_a_request_after_all_messages_before(tmp_path):
    found = read_with_content(written(tmp_path, CONVERSATIONS))
    assert found.prompt_tokens.tolist() == [10 + 5, 10 + 5 + 3 + 2, 1]
    assert found.output_tokens.tolist() == [3, 3, 1]
    assert found.content.session_id.tolist() == [1, 1, 2]
    assert found.arrival_ticks is None


def test_a_conversation_without_texts_is_refused(tmp_path):
    document = [{"id": "a", "messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "x"}]}]
    with pytest.raises(TraceError, match="prompt_tokens"):
        read(written(tmp_path, document))


def test_drawn_conversations_have_the_distributions(tmp_path):
    found = read_with_content(written(tmp_path, GENERATED))
    session, prompts, outputs = found.content.session_id, found.prompt_tokens, found.output_tokens
    turns = np.bincount(session)[1:]
    assert len(turns) == 24 and 6 <= turns.min() and turns.max() <= 9
    assert 80 <= outputs.min() and outputs.max() <= 120
    first = np.flatnonzero(np.diff(session, prepend=0))
    # The common prefix holds the first message, and the prefix of a conversation comes on top: 500 and 1,000 in the mean.
    assert prompts[first].min() >= 500 and prompts[first].mean() == pytest.approx(1500, rel=0.01)
    later = np.setdiff1d(np.arange(len(session)), first)
    more = prompts[later] - prompts[later - 1] - outputs[later - 1]
    assert 120 <= more.min() and more.max() <= 160
    assert read_with_content(written(tmp_path, GENERATED)).prompt_tokens.tolist() == prompts.tolist()


@pytest.mark.parametrize(
    ("of", "low", "high"),
    [
        ({"distribution": "zipf", "alpha": 1.2, "max": 100}, 1, 100),
        ({"distribution": "poisson", "alpha": 10, "max": 12}, 0, 12),
        ({"distribution": "lognormal", "mean": 4, "sigma": 1, "max": 200}, 1, 200),
        ({"distribution": "constant", "value": 7}, 7, 7),
    ],
)
def test_every_distribution_of_the_client_is_drawn(of, low, high, tmp_path):
    document = GENERATED | {"prompt_output": {"num_tokens": of}}
    outputs = read(written(tmp_path, document)).output_tokens
    assert max(1, low) <= outputs.min() and outputs.max() <= high


@pytest.mark.parametrize(
    "change",
    [{"num_conversations": 0}, {"prompt_output": {}}, {"prompt_output": {"num_tokens": {"distribution": "cauchy"}}}],
)
def test_what_the_client_would_refuse_is_refused(change, tmp_path):
    with pytest.raises(TraceError):
        read(written(tmp_path, GENERATED | change))
