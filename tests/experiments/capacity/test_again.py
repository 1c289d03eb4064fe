"""``fragmeter plan --again``: inputs are changed for real, and the lines must name the one that was."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.runs.slo_check import compiled_cost

CARD = {
    "name": "my-gpu", "memory_bytes": 85899345920, "memory_gb_per_s": 2000, "fp16_tflops": 312, "pcie_gb_per_s": 32,
    "source": "made up",
}  # fmt: skip
#: Prompts and outputs; the longest ones decide how many sequences fit.
TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{each / 10},600,100\n" for each in range(120))


GOAL = ["--goodput", "ttft:2000", "tpot:60", "--request-rate", "40", "--seeds", "1", "--num-prompts", "100"]
FILES = ["--prices", "prices.json", "--trace", "trace.csv", "--cost", "roofline"]


def write(folder: Path) -> None:
    (folder / "card.json").write_text(json.dumps(CARD))
    (folder / "prices.json").write_text(json.dumps({"per_gpu_hour": {"my-gpu": 2.0, "l40s": 3.0}}))
    (folder / "trace.csv").write_text(TRACE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a card, prices and a trace."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def plan_of_one_card(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of the plan for the card alone, made once."""
    folder = tmp_path_factory.mktemp("then")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write(folder)
        planned("card.json")
    return (folder / "plan.json").read_text()


def planned(cards: str) -> None:
    tokens = ["plan", "--model", "llama-3.1-8b", "--gpu", cards, *GOAL, *FILES, "--jobs", "1", "--json", "plan.json"]
    assert status(tokens) == DONE


def again(folder: Path, then: str) -> list[str]:
    (folder / "plan.json").write_text(then)
    # By the name of the file of the card, within one process.
    compiled_cost.cache_clear()
    assert status(["plan", "--again", "plan.json", "--jobs", "1", "--json", "now.json"]) == DONE
    return json.loads((folder / "now.json").read_text())["again"]


def bill(file: Path) -> float:
    return json.loads(file.read_text())["candidates"][0]["bill"]["per_hour"]


def differences(lines: list[str]) -> float:
    return sum(float(found[1].replace(",", "")) for line in lines if (found := re.match(r"([+-][\d.,]+) ", line)))


def changed(folder: Path, **values: object) -> None:
    (folder / "card.json").write_text(json.dumps(CARD | values))


def test_the_same_inputs_move_nothing(folder, plan_of_one_card):
    lines = again(folder, plan_of_one_card)
    assert lines[1:] == ["The bill has not moved.", "No input of my-gpu differs."]
    # The answer is a plan, too, and has the flags for the next one.
    then, now = (json.loads((folder / name).read_text()) for name in ("plan.json", "now.json"))
    assert now.pop("again") and now == then


@pytest.mark.slow
def test_a_price_is_named_with_its_share_of_the_bill(folder, plan_of_one_card):
    (folder / "prices.json").write_text(json.dumps({"per_gpu_hour": {"my-gpu": 2.5, "l40s": 9.0}}))
    lines = again(folder, plan_of_one_card)
    before = bill(folder / "plan.json")
    assert lines[1:] == [
        f"{before / 4:+,.2f} USD/h by the price of my-gpu: {before:,.2f} to {1.25 * before:,.2f}.",
        "No input of my-gpu differs.",
    ]


@pytest.mark.slow
def test_a_price_may_make_another_candidate_the_cheapest(folder):
    planned("card.json,l40s")
    (folder / "prices.json").write_text(json.dumps({"per_gpu_hour": {"my-gpu": 40.0, "l40s": 1.0}}))
    lines = again(folder, (folder / "plan.json").read_text())
    assert any("by a cheaper candidate" in line for line in lines)
    moved = bill(folder / "now.json") - bill(folder / "plan.json")
    assert differences(lines) == pytest.approx(moved, abs=0.02)


@pytest.mark.slow
def test_slower_flops_are_named_by_the_steps_that_they_make_longer(folder, plan_of_one_card):
    changed(folder, fp16_tflops=120)
    lines = again(folder, plan_of_one_card)
    assert "ms of a step with a prompt" in lines[-1] and "KV cache in blocks" not in lines[-1]
    assert any("by the size of my-gpu (what differs of it)" in line for line in lines)
    assert differences(lines) == pytest.approx(bill(folder / "now.json") - bill(folder / "plan.json"), abs=0.02)


@pytest.mark.slow
def test_less_memory_is_named_by_its_blocks(folder, plan_of_one_card):
    changed(folder, memory_bytes=64 * 2**30)
    lines = again(folder, plan_of_one_card)
    assert "KV cache in blocks" in lines[-1] and "ms of a step" not in lines[-1]


@pytest.mark.slow
def test_other_requests_are_named(folder, plan_of_one_card):
    (folder / "trace.csv").write_text(TRACE.replace(",600,", ",1600,"))
    lines = again(folder, plan_of_one_card)
    assert "The requests differ: the file of the load, or how they are drawn." in lines
    assert lines[-1] == "No input of my-gpu differs." and bill(folder / "now.json") > bill(folder / "plan.json")


@pytest.mark.slow
def test_a_card_that_does_not_start_any_more_is_said_to(folder, plan_of_one_card):
    changed(folder, memory_bytes=12 * 2**30)
    assert again(folder, plan_of_one_card)[-1] == "The candidate of then is not searched now, or does not start."


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("[", (), "again = 'plan.json': is no JSON"),
        ("{}", (), "has no flags of a plan (asked); give a plan.json of this release or later"),
        ('{"asked": {"aims": {"goodput": ["ttft:1"], "hope": 1}}, "candidates": []}', (), "flags that this release does not take"),
        (None, ("--gpu", "h200"), "has its own flags; leave out --gpu"),
        (None, ("--request-rate", "3"), "has its own flags; leave out --request-rate"),
        (None, ("--ask", "samples"), "has its own flags; leave out --ask"),
    ],
)  # fmt: skip
def test_what_is_refused(content, more, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("plan.json").write_text(content)
    assert status(["plan", "--again", "plan.json", *more]) == MISTAKE
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1
