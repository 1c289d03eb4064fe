"""What prompts are made of: runs against token strings written out, and names of blocks against whole prefixes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.cli.simulate import simulate
from fragmeter.experiments.runs.inputs import Requests
from fragmeter.sim.memory.prefix import Chains
from fragmeter.sim.types.errors import SettingError, TraceError
from fragmeter.sim.workload.content import NO_SESSION, PromptContent, TokenRuns
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import read_with_content, workload

OWN = 1 << 63


def written_out(runs) -> list[tuple[int, int]]:
    """Every token of a string of runs."""
    return [(stream, start + place) for stream, start, length in runs for place in range(length)]


def content(pieces: list[list[tuple[int, int]]], session_id=None) -> PromptContent:
    """The contents of requests given as (id, tokens) a piece."""
    flat = [piece for request in pieces for piece in request]
    offsets = np.cumsum([0, *map(len, pieces)])
    return PromptContent(offsets, [i for i, _ in flat], [tokens for _, tokens in flat], session_id)


def test_a_prompt_is_its_pieces_and_the_rest_its_own():
    made = content([[(7, 5), (-9, 2)], [], [(7, 3)]])
    runs = TokenRuns(made, np.array([7, 4, 5]), np.array([2, 1, 6]))
    assert [runs.runs(i) for i in range(3)] == [
        ((7, 0, 5), (-9, 0, 2)),
        ((OWN + 1, 0, 4),),
        ((7, 0, 3), (OWN + 2, 0, 2)),
    ]
    # The output goes on where what is the prompt's own ends.
    assert [runs.output_runs(i) for i in range(3)] == [((OWN, 0, 2),), ((OWN + 1, 4, 1),), ((OWN + 2, 2, 6),)]


def test_pieces_may_reach_into_the_output():
    """Request 1 continues the answer to request 0; the prompt of request 0 ends within a piece. Request 2 shares no answer."""
    pieces = content([[(7, 4), (8, 4)], [(7, 4), (8, 4), (9, 4)], [(7, 4)]])
    made = PromptContent(pieces.offsets, pieces.ids, pieces.tokens, covers_outputs=True)
    prompts, outputs = np.array([6, 9, 5]), np.array([4, 3, 2])
    runs = TokenRuns(made, prompts, outputs)
    assert [(runs.runs(i), runs.output_runs(i)) for i in range(3)] == [
        (((7, 0, 4), (8, 0, 2)), ((8, 2, 2), (OWN, 0, 2))),
        (((7, 0, 4), (8, 0, 4), (9, 0, 1)), ((9, 1, 3),)),
        (((7, 0, 4), (OWN + 2, 0, 1)), ((OWN + 2, 1, 2),)),
    ]
    strings = [written_out((*runs.runs(i), *runs.output_runs(i))) for i in range(3)]
    assert [len(string) for string in strings] == (prompts + outputs).tolist()
    assert strings[1][:8] == strings[0][:8] and strings[1][8] != strings[0][8]
    assert runs.unshared == [False, False, False]
    Workload("answers", np.zeros(3), prompts, outputs, content=made)
    with pytest.raises(SettingError, match="content = 12: the pieces of request 1 are more than its 11 tokens"):
        Workload("answers", np.zeros(3), prompts, outputs - 1, content=made)
    with pytest.raises(SettingError, match="n = 2: must be 1"):
        made.repeated(np.array([1, 2, 1]))


def test_turns_of_a_session_begin_with_what_was_said_before():
    """Requests 0, 2 and 4 are one session, 1 and 3 none. 2 knows 3 + 4 tokens and adds 2; 4 is shorter than what came
    before: it ends two tokens into what 2 added and generated."""
    made = PromptContent.of_sessions([5, NO_SESSION, 5, NO_SESSION, 5])
    runs = TokenRuns(made, np.array([3, 6, 9, 6, 8]), np.array([4, 1, 1, 2, 3]))
    assert [runs.runs(i) for i in range(5)] == [
        ((OWN, 0, 3),),
        ((OWN + 1, 0, 6),),
        ((OWN, 0, 7), (OWN + 2, 0, 2)),
        ((OWN + 3, 0, 6),),
        ((OWN, 0, 7), (OWN + 2, 0, 1)),
    ]
    assert runs.output_runs(4) == ((OWN + 4, 0, 3),)


def test_pieces_say_more_than_sessions():
    made = content([[(7, 5)], [(7, 5)]], [1, 1])
    runs = TokenRuns(made, np.array([5, 6]), np.array([2, 2]))
    assert runs.runs(1) == ((7, 0, 5), (OWN + 1, 0, 1))


lengths = st.lists(st.tuples(st.integers(-1, 2), st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=12)


@pytest.mark.slow
@given(turns=lengths)
def test_sessions_are_what_a_client_would_send(turns):
    """A client keeps the history of its session and sends as much of it as fits, then what is new."""
    sessions, prompts, outputs = (np.array(column) for column in zip(*turns))
    runs = TokenRuns(PromptContent.of_sessions(sessions), prompts, outputs)
    history: dict[int, list] = {}
    for request, (session, prompt, output) in enumerate(turns):
        known = history.get(session, [])[:prompt] if session != NO_SESSION else []
        sent = written_out(runs.runs(request))
        answer = written_out(runs.output_runs(request))
        assert sent[: len(known)] == known and len(sent) == prompt and len(answer) == output
        said = {token for tokens in history.values() for token in tokens}
        new = [*sent[len(known) :], *answer]
        assert len(set(new)) == len(new) and not said & set(new)
        history[session] = sent + answer


def test_blocks_of_a_request_are_named_to_the_end_of_its_output():
    """Blocks of 4: the second holds the end of piece 7 and the beginning of piece 8, the third generated tokens. A
    second request shares one and a half blocks, and so one."""
    made = content([[(7, 5), (8, 4)], [(7, 6)]])
    chains = Chains(TokenRuns(made, np.array([9, 6]), np.array([4, 4])), 4)
    (one, stop), *others = chains.path(0)
    assert (stop, others) == (3, [])
    (first, shared), (other, end) = chains.path(1)
    assert (first, shared, end) == (one, 1, 2) and other is not one
    first, second = chains.prompt_names(0), chains.prompt_names(1)
    assert (len(first), len(second), first[0] == second[0]) == (2, 1, True)


def test_a_request_is_shared_where_something_of_it_is_known_or_goes_on():
    """The second has a piece, the third and fourth are one session, of the fifth there are two."""
    pieces = TokenRuns(content([[], [(7, 5)], []]), np.array([9, 9, 9]), np.array([4, 4, 4]))
    assert pieces.unshared == [True, False, True]
    sessions = PromptContent.of_sessions(np.array([5, 6, 5, NO_SESSION, NO_SESSION]))
    lengths = np.array([9, 9, 20, 9, 9]), np.full(5, 4)
    assert TokenRuns(sessions, *lengths).unshared == [False, True, False, True, True]
    times = np.array([1, 1, 1, 1, 2])
    repeated = TokenRuns(sessions.repeated(times), *(np.repeat(column, times) for column in lengths))
    assert repeated.unshared == [False, True, False, True, False, False]


BAD = {
    "offsets": ([0, 2, 1], [1], [1], None),
    "ids": ([0, 2], [1], [1, 1], None),
    "tokens = 1": ([0, 2], [1, 1], [1], None),
    "tokens = 0": ([0, 1], [1], [0], None),
    "session_id": ([0, 1], [1], [1], [1, 2]),
}


@pytest.mark.parametrize("named", BAD)
def test_contents_that_cannot_be_are_refused(named):
    with pytest.raises(SettingError, match=f"^{named}"):
        PromptContent(*BAD[named])


def test_a_workload_refuses_contents_of_other_requests():
    lengths = np.array([0, 0]), np.array([4, 4]), np.array([1, 1])
    Workload("fits", *lengths, content=content([[(1, 4)], []]))
    with pytest.raises(SettingError, match="content = 3: must be of 2 requests"):
        Workload("three", *lengths, content=content([[], [], []]))
    with pytest.raises(SettingError, match="content = 5: the pieces of request 1 are more than its 4 prompt tokens"):
        Workload("long", *lengths, content=content([[(1, 4)], [(2, 3), (1, 2)]]))


def test_the_hash_of_a_workload_tells_contents_apart():
    lengths = np.array([0, 0]), np.array([4, 4]), np.array([1, 1])
    made = [None, content([[(1, 4)], []]), content([[], [(1, 4)]]), content([[], [(1, 4)]], [1, 1])]
    assert len({Workload("made", *lengths, content=some).sha256() for some in made}) == 4


def put(folder, rows, name="made.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]},
]
TURNS = [
    {"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 5, "session_id": "a"},
    {"arrival_s": 1, "prompt_tokens": 9, "output_tokens": 5},
    {"arrival_s": 2, "prompt_tokens": 20, "output_tokens": 5, "session_id": "a"},
]


class TestFiles:
    def test_mooncakes_pieces_are_of_512_tokens(self, tmp_path):
        work = workload(read_with_content(put(tmp_path, MOONCAKE)))
        assert work.content.offsets.tolist() == [0, 3, 5, 7]
        assert work.content.ids.tolist() == [0, 1, 2, 0, 1, 0, 7]
        assert work.content.tokens.tolist() == [512, 512, 76, 512, 512, 512, 88]
        assert work.content.session_id is None

    def test_pieces_of_their_own_lengths_and_sessions(self, tmp_path):
        pieces = [{"hash_ids": [4], "block_tokens": [9]}, {"hash_ids": [], "block_tokens": []}]
        made = read_with_content(put(tmp_path, [row | more for row, more in zip(TURNS, pieces)])).content
        assert (made.ids.tolist(), made.tokens.tolist(), made.offsets.tolist()) == ([4], [9], [0, 1, 1])
        assert made.session_id.tolist() == [1, NO_SESSION]

    def test_sessions_alone(self, tmp_path):
        made = read_with_content(put(tmp_path, TURNS)).content
        assert (len(made), made.ids.tolist(), made.session_id.tolist()) == (3, [], [1, NO_SESSION, 1])

    @pytest.mark.parametrize("rows", [[{"input": 3, "output": 4}], [{"input": 3, "output": 4, "session_id": None}]])
    def test_a_trace_without_contents_has_none(self, tmp_path, rows):
        assert read_with_content(put(tmp_path, rows)).content is None

    def test_sessions_of_other_formats(self, tmp_path):
        (tmp_path / "pairs.csv").write_text("input,output,session_id\n3,4,5\n3,4,\n9,4,5\n")
        assert read_with_content(tmp_path / "pairs.csv").content.session_id.tolist() == [1, NO_SESSION, 1]

    def test_the_first_requests_alone(self, tmp_path):
        cut = read_with_content(put(tmp_path, MOONCAKE)).first(2).content
        assert (cut.offsets.tolist(), cut.ids.tolist(), cut.tokens.tolist()) == (
            [0, 3, 5], [0, 1, 2, 0, 1], [512, 512, 76, 512, 512],
        )  # fmt: skip
        assert read_with_content(put(tmp_path, TURNS)).first(2).content.session_id.tolist() == [1, NO_SESSION]

    @pytest.mark.parametrize("value", [1.5, True, [1]])
    def test_a_session_is_a_number_or_a_text(self, tmp_path, value):
        path = put(tmp_path, [TURNS[0], TURNS[1] | {"session_id": value}])
        with pytest.raises(TraceError, match="line 2: session_id = .*: must be a whole number or a text"):
            read_with_content(path)

    def test_pieces_that_are_missing_in_a_row_are_named(self, tmp_path):
        path = put(tmp_path, [MOONCAKE[0], {"timestamp": 1, "input_length": 1, "output_length": 1}])
        with pytest.raises(TraceError, match="line 2: hash_ids = None: is missing"):
            read_with_content(path)

    @pytest.mark.slow
    def test_simulate_reads_them(self, tmp_path):
        """The hash in run.json tells of contents; of the first two requests it is the same, whatever the third holds."""

        def hashed(rows, name):
            simulate(requests=Requests(trace=put(tmp_path, rows, f"{name}.jsonl"), num_prompts=2), out=tmp_path / name)
            return json.loads((tmp_path / name / "run.json").read_text())["workload"]["sha256"]

        assert hashed(MOONCAKE, "whole") == hashed([*MOONCAKE[:2], MOONCAKE[2] | {"hash_ids": [3, 3]}], "third")
        assert hashed(MOONCAKE, "whole") != hashed(
            [MOONCAKE[0], MOONCAKE[1] | {"hash_ids": [0, 2]}, MOONCAKE[2]], "second"
        )
