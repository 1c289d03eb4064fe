"""Stories of one's own: TOML files, what is refused in them, and the command ``fragmeter story``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.story.reading import read_story, story_names
from fragmeter.experiments.story.story import run_story
from fragmeter.reports.story.text import frame_lines
from story_walk import walk

OWN = """title = "Own"
text = "Two words."

[settings]
block_size = 2
num_gpu_blocks_override = 4

[[requests]]
name = "A"
prompt = "one two"
output = "three four"

[[captions]]
step = 2
text = "A block is taken."
"""
TEXT = """Own

step 1
  A arrives.
  A is admitted: it takes block 0 and prefills 2 tokens.
  A prefill, block table [0]: one two (three)
  block 0: one* two* (A, references 1)
  slots: 2 live, 6 free

step 2
  A block is taken.
  A writes “three” to a new block, 1.
  A decode, block table [0, 1]: one two three (four)
  block 0: one two (A, references 1)
  block 1: three* _ (A, references 1)
  slots: 3 live, 1 reserved, 4 free

end
  A is done and releases blocks 0 and 1.
  slots: 8 free

live: slots that hold the keys and values of a token
reserved: slots that a coming token fills
free: slots that any request can take
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(OWN)
    return tmp_path


def test_a_story_as_text(here, capsys):
    assert status(["story", "own.toml", "--text"]) == DONE
    assert capsys.readouterr().out == TEXT
    assert status(["story", "own.toml", "--text", "--out", "own.html"]) == MISTAKE
    assert "out = 'own.html': no page is written with --text" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["own.toml"]


def test_a_story_as_a_page_that_is_the_same_each_time(here, capsys):
    for out in ("one.html", "deep/two.html"):
        assert status(["story", "own.toml", "--out", out]) == DONE
        assert capsys.readouterr().out == f"Own\nStory: {out}\n"
    page = (here / "one.html").read_text("utf-8")
    assert (here / "deep" / "two.html").read_text("utf-8") == page
    # Without pictures it does without plotly.js, too.
    assert len(page) < 100_000 and "Plotly.react" in page and "plotly.js v" not in page
    data = json.loads(re.search(r'<script type="application/json" class="data">(.*?)</script>', page)[1])
    assert [moment["label"] for moment in data["moments"]] == ["1", "2", "end"]
    assert data["runs"][0]["strip"] == [{"name": "A", "states": ["prefill", "decode", None]}]
    assert "A block is taken. A writes “three” to a new block, 1." in page


@pytest.mark.slow
def test_every_story_is_drawn(here, capsys):
    for name in story_names():
        assert status(["story", name, "--out", f"{name}.html"]) == DONE
        assert "<h1>" in (here / f"{name}.html").read_text("utf-8")


def test_two_runs_share_a_clock():
    text = (
        OWN.partition("[[captions]]")[0] + '[[runs]]\npolicy = "orca"\n[[runs]]\nname = "blocks"\npolicy = "vllm-v0"\n'
    )
    orca, blocks = run_story(read_story(text, "own.toml"))
    assert (orca.name, blocks.name) == ("orca", "blocks")
    assert [frame.at for frame in orca.frames] == [frame.at for frame in blocks.frames]
    assert "  A decode, slots 0 to 3, 1 reserved: one two three (four)" in [*frame_lines(orca.frames[1])]


def changed(old: str, new: str) -> str:
    assert old in OWN
    return OWN.replace(old, new, 1)


MISTAKES = {
    "an unknown field": (
        changed("output", "outptu"),
        "own.toml, line 11: requests[1].outptu = 'three four': is not a known field; did you mean output?",
    ),
    "an unknown table": (
        "x = 1\n" + OWN,
        "own.toml, line 1: x = 1: is not a known field; leave it out; the fields are title, text, settings, runs,"
        " requests, captions",
    ),
    "a misspelled table": (
        changed("[[captions]]", "[[caption]]"),
        "own.toml, line 13: caption = 'a list': is not a known field; did you mean captions?",
    ),
    "a misspelled prompt, which is missing then": (
        changed("prompt =", "promt ="),
        "own.toml, line 10: requests[1].promt = 'one two': is not a known field; did you mean prompt?",
    ),
    "a misspelled field of a caption": (
        changed("step = 2", "stpe = 2"),
        "own.toml, line 14: captions[1].stpe = 2: is not a known field; did you mean step?",
    ),
    "an unknown setting": (
        changed("block_size", "blok_size"),
        "own.toml, line 5: settings.blok_size = 2: there is no such setting; did you mean block_size?",
    ),
    "a wrong value": (
        changed("= 4", "= 0"),
        "own.toml, line 6: settings.num_gpu_blocks_override = 0: must be at least 1",
    ),
    "no words": (
        changed('"three four"', '" "'),
        "own.toml, line 11: requests[1].output = ' ': must be text with a word or more",
    ),
    "no prompt": (
        changed('prompt = "one two"\n', ""),
        "own.toml, line 8: requests[1].prompt = None: is missing; give it",
    ),
    "no output": (
        changed('output = "three four"\n', ""),
        "own.toml, line 8: requests[1].output = None: give output or outputs, one of both",
    ),
    "samples of two lengths": (
        changed('output = "three four"', 'outputs = ["a", "b c"]'),
        "own.toml, line 11: requests[1].outputs = [1, 2]: must have the same number of words each",
    ),
    "too short a limit": (
        changed('"three four"', '"three four"\nmax_tokens = 1'),
        "own.toml, line 12: requests[1].max_tokens = 1: must be at least the 2 words of the output",
    ),
    "a name twice": (
        OWN + '[[requests]]\nname = "A"\nprompt = "a"\noutput = "b"\n',
        "own.toml, line 17: requests[2].name = 'A': must be a name that no other request has",
    ),
    "out of order": (
        changed('name = "A"', 'name = "A"\narrival_s = 2')
        + '[[requests]]\nname = "B"\narrival_s = 1\nprompt = "a"\noutput = "b"\n',
        "own.toml, line 19: requests[2].arrival_s = 1.0: list the requests in order of arrival",
    ),
    "no pool": (
        changed("num_gpu_blocks_override = 4", ""),
        "own.toml, line 4: settings.num_gpu_blocks_override = None: give block_size and num_gpu_blocks_override, together at"
        " most 1,024 slots",
    ),
    "too large a pool": (
        changed("= 4", "= 4000"),
        "own.toml, line 6: settings.num_gpu_blocks_override = 4000: give block_size and num_gpu_blocks_override,"
        " together at most 1,024 slots",
    ),
    "too many words": (
        changed("three four", "three " * 1001),
        "own.toml, line 8: requests = 1003: must have at most 1,000 words together",
    ),
    "a cost": (
        changed("= 4", '= 4\ncost = "roofline"'),
        "own.toml, line 7: settings.cost = 'roofline': a step of a story takes one second; leave it out",
    ),
    "an unknown policy": (
        OWN + '[[runs]]\npolicy = "orka"\n',
        "own.toml, line 17: runs[1].policy = 'orka': one of static,",
    ),
    "a run twice": (
        OWN + '[[runs]]\npolicy = "orca"\n' * 2,
        "own.toml, line 18: runs[2].name = 'orca': must be text that no other run has",
    ),
    "a caption of no run": (
        OWN + 'run = "x"\n',
        "own.toml, line 16: captions[1].run = 'x': one of vllm-sosp23",
    ),
    "a caption of no step": (
        changed("step = 2", "step = 7"),
        "own.toml, line 14: captions[1].step = '7': the steps are 1, 2, end; name one",
    ),
    "a setting that is not read": (
        OWN + '[[runs]]\npolicy = "orca"\npreemption_mode = "swap"\n',
        "own.toml: preemption_mode = 'swap': orca does not read it",
    ),
    "too small a pool": (
        changed("= 4", "= 1"),
        "own.toml, line 8: request A needs 2 blocks, and the pool has 1; take a larger pool",
    ),
    "no TOML": (changed("= 2", "= = 2"), "own.toml, line 5, column 14: is no TOML: Invalid value; correct it"),
    "half a TOML": (OWN + 'run = "x', "own.toml, "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_its_place_and_a_remedy(here, capsys, mistake):
    text, shown = MISTAKES[mistake]
    (here / "own.toml").write_text(text)
    assert status(["story", "own.toml", "--out", "own.html"]) == MISTAKE
    error = capsys.readouterr().err
    assert error.startswith(f"fragmeter: {shown}") and error.count("\n") == 1
    assert not (here / "own.html").exists()


def test_a_story_that_is_not_there(here, capsys):
    for name, shown in (
        ("frist", "story = 'frist': one of first-prompt, two-requests,"),
        ("sampels", f"story = 'sampels': one of {', '.join(story_names())}, or a TOML file; did you mean samples?"),
        ("no.toml", "story = 'no.toml': cannot be read: No such file or directory"),
    ):
        assert status(["story", name]) == MISTAKE
        assert f"fragmeter: {shown}" in capsys.readouterr().err
    (here / "latin.toml").write_bytes(b"title = '\xe9'")
    assert status(["story", "latin.toml"]) == MISTAKE
    assert "is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("name", [[], ["list"]])
def test_without_a_name_the_stories_are_listed(here, capsys, name):
    assert status(["story", *name]) == DONE
    listed = capsys.readouterr().out
    assert [
        line.split()[0] for line in listed.splitlines() if line.split()[:1] and line.split()[0] in story_names()
    ] == story_names()
    assert "Two samples of one prompt, and copy on write" in listed
    assert [path.name for path in here.iterdir()] == ["own.toml"]
    for flag in (["--text"], ["--out", "own.html"]):
        assert status(["story", *name, *flag]) == MISTAKE
        assert "the stories are listed; name one, or leave it out" in capsys.readouterr().err


def test_a_page_does_not_replace_its_story(here, capsys):
    assert status(["story", "own.toml", "--out", "own.toml"]) == MISTAKE
    assert "is also story" in capsys.readouterr().err
    assert (here / "own.toml").read_text() == OWN


def test_a_caption_of_the_first_part_of_a_step():
    text = changed('output = "three four"', 'outputs = ["three four", "x y"]').replace("one two", "one two three")
    (run,) = run_story(read_story(text, "own.toml"))
    assert [(frame.label, frame.events[0]) for frame in run.frames[1:3]] == [
        ("2a", "A block is taken."),
        ("2b", "Copy on write: A1 takes block 2, a copy of block 1. References of block 1: 2 before, 1 after."),
    ]


def test_a_request_that_is_preempted_while_its_last_token_is_computed():
    """Seven blocks of two, steps decided one ahead: that of step 6 does not know that B ends at an EOS, and preempts it."""
    text = """title = "Own"
text = "Two requests."
[settings]
policy = "vllm-v1"
block_size = 2
num_gpu_blocks_override = 8
max_model_len = 64
max_num_seqs = 2
max_num_batched_tokens = 64
enable_prefix_caching = false
[[requests]]
name = "A"
prompt = "a"
output = "1 2 3 4 5 6"
[[requests]]
name = "B"
prompt = "b c d e"
output = "1 2 3 4 5"
max_tokens = 10
"""
    (run,) = run_story(read_story(text, "own.toml"))
    preempted = [(frame.label, event) for frame in run.frames for event in frame.events if "preempted" in event]
    ((label, event),) = preempted
    assert label == "6" and event.startswith("B ")
    assert not any("later" in event for frame in run.frames for event in frame.events)


def test_siblings_that_are_preempted_before_and_after_they_began():
    """Both requests have two samples. In five blocks B gives way before B2 has begun, in six after."""
    text = changed('output = "three four"', 'outputs = ["three four five six", "x y z w"]').partition("[[captions]]")[0]
    text += '[[requests]]\nname = "B"\nprompt = "b c"\noutputs = ["1 2 3 4 5", "6 7 8 9 0"]\n'
    for blocks, step, events in (
        (5, "2", ["B1 is preempted and loses block 1. Its tokens are computed again later."]),
        (
            6,
            "3",
            [
                "B2 is preempted and loses blocks 1 and 5. Its tokens are computed again later.",
                "B1 is preempted and loses blocks 1 and 4. Its tokens are computed again later.",
            ],
        ),
    ):
        own = text.replace("= 4", f"= {blocks}\nswap_space = 0.0")
        chosen = read_story(own, "own.toml")
        (run,) = run_story(chosen)
        walk(run.frames, chosen.cast())
        frame = next(frame for frame in run.frames if frame.label == step)
        assert [event for event in frame.events if "preempted" in event] == events
        last = {view.name: " ".join(view.words) for frame in run.frames for view in frame.sequences}
        assert (last["B1"], last["B2"]) == ("b c 1 2 3 4 5", "b c 6 7 8 9 0")
    assert "B2 is admitted again: it shares 2 tokens with B1, names blocks 1 and 0 and prefills 2 tokens." in [
        event for frame in run.frames for event in frame.events
    ]
