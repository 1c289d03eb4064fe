"""Lines of a text file, numbered as in an editor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.traces.parsing.lines import filled_lines

TEXTS = st.text(st.sampled_from("ab \t\n\r\x0b\x0c"), max_size=12).map(str.encode)


@pytest.mark.slow
@given(TEXTS, st.integers(1, 9))
def test_blank_lines_are_left_out_and_counted(data, first):
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    filled = [(number, text) for number, text in enumerate(lines, first) if text.strip()]
    block, after = filled_lines(data, first)
    assert block.lines.tolist() == [number for number, _ in filled]
    assert block.data == b"\n".join(text for _, text in filled)
    assert after == first + len(lines) - 1


@given(TEXTS, st.integers(0, 5), st.none() | st.integers(0, 5))
def test_a_part_has_the_lines_from_its_start_to_its_end(data, start, end):
    block, _ = filled_lines(data)
    part = block.part(start, end)
    texts = list(zip(block.lines.tolist(), block.texts()))[start:end]
    assert list(zip(part.lines.tolist(), part.texts())) == texts
