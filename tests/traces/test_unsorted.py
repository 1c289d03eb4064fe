"""Rows out of order are sorted by arrival: a log that is written when requests end gives the trace of the sorted file."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.types.errors import TraceError
from fragmeter.traces import Reading, read, read_with_content
from paths import SAMPLES
from same_trace import assert_same

#: Samples with a time in every row, and their header lines.
SORTABLE = {
    "azure2023.csv": 1,
    "azure2024.csv": 1,
    "burstgpt.csv": 1,
    "burstgpt_sessions.csv": 1,
    "splitwise.csv": 1,
    "vidur_timed.csv": 1,
    "mooncake.jsonl": 0,
    "timed_trace.jsonl": 0,
    "ours.jsonl": 0,
}
HEAD = "arrival_s,prompt_tokens,output_tokens\n"


def written(folder: Path, text: str, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def by_arrival(path: Path) -> list[int]:
    """Line numbers of the rows of a sorted file, as an unsorted copy has them."""
    return [int(line) for line in read(path).rows.lines]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SORTABLE)
def test_the_order_of_rows_changes_nothing(tmp_path, name, seed):
    lines = (SAMPLES / name).read_text().splitlines()
    head, rows = lines[: SORTABLE[name]], lines[SORTABLE[name] :]
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    # Rows of one instant keep the order of the file.
    sorted_, times = read_with_content(SAMPLES / name), {}
    for row, line in enumerate(sorted_.rows.lines.tolist()):
        times.setdefault(int(sorted_.arrival_ticks[row]), []).append(line - 1 - len(head))
    for same in times.values():
        places = sorted(order.index(row) for row in same)
        for place, row in zip(places, sorted(same), strict=True):
            order[place] = row
    found = read_with_content(written(tmp_path, "\n".join([*head, *(rows[row] for row in order)]) + "\n", name))
    lines_of_rows = [order.index(line - 1 - len(head)) + 1 + len(head) for line in sorted_.rows.lines.tolist()]
    assert found.rows.lines.tolist() == lines_of_rows
    assert found.start == sorted_.start
    assert len(found.remarks) == (lines_of_rows != sorted(lines_of_rows))
    assert_same(found, sorted_, lines=False)


def test_a_log_in_order_of_the_ends(tmp_path):
    starts = np.arange(200) * 0.5
    ends = starts + np.random.default_rng(0).exponential(5, 200)
    rows = [f"{start},{10 + row},5" for row, start in enumerate(starts)]
    path = written(tmp_path, HEAD + "\n".join(rows[row] for row in np.argsort(ends)))
    found = read(path)
    assert found.prompt_tokens.tolist() == list(range(10, 210))
    assert (found.arrival_ticks / 1e12).tolist() == starts.tolist()
    late = sum(starts[row] < starts[earlier].max() for place, row in enumerate(np.argsort(ends))
               if len(earlier := np.argsort(ends)[:place]))  # fmt: skip
    assert found.remarks == (f"{late} of 200 requests were not in order of time; they are sorted by it",)


def test_pieces_of_a_file_are_sorted_together(tmp_path, monkeypatch):
    rows = [f"{time},{time + 1},2" for time in range(2000)]
    random.Random(1).shuffle(rows)
    monkeypatch.setattr("fragmeter.traces.parsing.files.PIECE_BYTES", 512)
    found = read(written(tmp_path, HEAD + "\n".join(rows)))
    assert found.prompt_tokens.tolist() == list(range(1, 2001))
    assert found.start.written == "0"


def test_an_error_names_the_line_of_the_file(tmp_path):
    path = written(tmp_path, HEAD + "9,1,2\n4,1,2\n6,1,0\n")
    with pytest.raises(TraceError, match="line 4: output_tokens = 0"):
        read(path)
    assert by_arrival(written(tmp_path, HEAD + "9,1,2\n4,1,2\n6,1,1\n")) == [3, 4, 2]


def test_a_time_far_from_the_others_is_no_order(tmp_path):
    week_s = 7 * 86_400
    rows = f"{week_s + 9},1,2\n{week_s + 10},1,2\n"
    with pytest.raises(
        TraceError, match="line 4: arrival_s = 5: is before a row above, .* 7 days apart; correct the t"
    ):
        read(written(tmp_path, HEAD + rows + "5,1,2\n"))
    dates = "2025-11-22T21:00:00,1,2\n2025-11-22T21:00:01,1,2\n2025-11-12T21:00:00.5,1,2\n"
    with pytest.raises(TraceError, match="line 4: arrival_s = '2025-11-12T21:00:00.500000000': .* 10 days apart"):
        read(written(tmp_path, HEAD + dates))
    assert len(read(written(tmp_path, HEAD + rows + "10,1,2\n"))) == 3
    # In order, it is a pause.
    assert len(read(written(tmp_path, HEAD + "5,1,2\n" + rows))) == 3
    with pytest.raises(TraceError, match="line 4: arrival_s = 0: is more than 97 days before the first"):
        read(written(tmp_path, HEAD + "1700000000,1,2\n1700000001,1,2\n0,1,2\n"))
    skipped = read(written(tmp_path, HEAD + "1700000000,1,2\n1700000001,1,2\n0,1,2\n"), Reading(skip_bad=True))
    assert (len(skipped), skipped.left_out.bad, skipped.start.written) == (2, 1, "1700000000")


def test_rows_that_refer_to_rows_above_are_not_sorted(tmp_path):
    text = '{"arrival_s": 5, "prompt_tokens": 9, "output_tokens": 2}\n'
    child = '{"arrival_s": 4, "prompt_tokens": 12, "output_tokens": 2, "parent": 0, "fork_at": 8}\n'
    with pytest.raises(TraceError, match="line 2: arrival_s = 4: is before the row above; sort the rows by arrival"):
        read(written(tmp_path, text + child, "tree.jsonl"))
    lines = (SAMPLES / "bailian.jsonl").read_text().splitlines()
    with pytest.raises(TraceError, match="is before the row above"):
        read(written(tmp_path, "\n".join(lines[::-1]), "bailian.jsonl"))


@pytest.mark.slow
def test_a_command_says_so(tmp_path, capsys):
    path = written(tmp_path, HEAD + "9,100,20\n4,100,20\n6,100,20\n")
    assert status(["simulate", "--policy", "vllm-v1", "--model", "opt-13b", "--trace", str(path)]) == DONE
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "log.csv: times begin at 4 s, which is 0 here."
