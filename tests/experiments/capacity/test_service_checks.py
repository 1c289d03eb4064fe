"""``fragmeter plan --check``: services that meet their objectives, that miss them, that do not start; and mistakes."""

from __future__ import annotations

import json
import re

import pytest

from fragmeter.experiments.capacity.service_checks import Checked, Service, table
from fragmeter.experiments.cli.app import DONE, MISSED, MISTAKE, status

GOOD = """
[[service]]
name = "good"
serve = "vllm serve llama-3.1-8b"
gpu = "h200"
dataset = "alpaca"
num_prompts = 100
request_rate = 5
goodput = ["ttft:500", "tpot:50"]
"""


def service(**changed: object) -> str:
    """The good service with other values; None leaves a key out."""
    lines = [line for line in GOOD.splitlines() if line.partition(" = ")[0] not in changed]
    added = [f"{key} = {json.dumps(value)}" for key, value in changed.items() if value is not None]
    return "\n".join([*lines, *added]) + "\n"


@pytest.fixture
def check(tmp_path, capsys):
    def run(*services: str) -> tuple[int, str]:
        path = tmp_path / "services.toml"
        path.write_text("".join(services))
        code = status(["plan", "--check", str(path), "--jobs", "1"])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.mark.slow
def test_services_that_meet_their_objectives(check):
    code, text = check(GOOD, service(name="two", replicas=2, router="kv-aware"))
    assert code == DONE
    lines = text.splitlines()
    assert lines[0].startswith("| service | fleet | requests/s | objectives |")
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| good", "| two"]
    assert "| 2 x h200 | 5 | ttft:500 tpot:50, 90% | 100.0 to 100.0 |" in lines[3]
    assert all(line.endswith("| meets |") for line in lines[2:])
    # 100 requests do not fill a replica; it takes more than the rate at which they arrive for ten times their time in it.
    assert all(re.search(r"\| >\+\d+% \| meets", line) for line in lines[2:])


@pytest.mark.slow
def test_a_load_in_words_is_that_of_a_rate(check):
    words = {"input_len": 200, "output_len": 20, "random_cv": 0.5}
    users = {"request_rate": None, "users": 1800, "requests_per_user_hour": 10}
    assert check(service(dataset=None, **words, **users)) == check(service(dataset=None, **words))
    code, text = check(service(**words, dataset="alpaca"))
    assert code == MISTAKE and "exclude each other" in text


@pytest.mark.slow
def test_one_that_misses_them_gives_the_status_of_its_own(check, tmp_path):
    """No replica prefills within a microsecond; the other service meets its objectives all the same."""
    code, text = check(GOOD, service(name="fast", goodput=["ttft:0.001"]))
    assert code == MISSED
    assert "| meets |" in text and text.endswith("| 0.0 to 0.0 | takes no rate | **misses** |\n")
    code, _ = check(service(goodput=["ttft:0.001"]))
    target = tmp_path / "checks.json"
    assert status(["plan", "--check", str(tmp_path / "services.toml"), "--json", str(target)]) == MISSED
    (found,) = json.loads(target.read_text())["services"]
    assert not found["meets"] and found["shares"] == [0.0] * 4 and found["headroom"] == -1


@pytest.mark.slow
def test_bursts_are_open(check, tmp_path):
    """900 requests/s of 100 requests are a burst, which the objectives allow: it says nothing of a load."""
    code, text = check(GOOD, service(name="burst", request_rate=900, goodput=["ttft:60000"]))
    assert code == MISSED
    assert "| meets |" in text and "| unknown | **open** |" in text
    assert "burst: at 900 requests/s its runs are bursts, which say nothing of a load that lasts: " in text
    target = tmp_path / "checks.json"
    assert status(["plan", "--check", str(tmp_path / "services.toml"), "--jobs", "1", "--json", str(target)]) == MISSED
    found = json.loads(target.read_text())["services"][1]
    assert found["is_burst"] and not found["meets"] and found["sure_rate"] is None and found["highest_rate_is_bound"]


@pytest.mark.slow
def test_bursts_that_miss_are_decided(check):
    """A load that lasts is harder."""
    code, text = check(service(name="burst", request_rate=900, goodput=["ttft:0.001"]))
    assert code == MISSED and "**misses**" in text and "its runs are bursts" not in text


@pytest.mark.parametrize(
    ("result", "bound", "cell"),
    [
        ("misses", False, "takes 4 to 4.5 requests/s"),
        ("open", True, "takes 4 to 4.5 requests/s"),
        ("meets", False, "-10%"),
    ],
)
def test_one_that_misses_them_has_the_rates_that_it_takes(result, bound, cell):
    serving = Service(name="s", serve="vllm serve llama-3.1-8b", gpu="h200", request_rate=5, goodput=["ttft:500"])
    found = Checked(serving, 5.0, result, (0.8,), 4.0, 4.5, is_bound=bound)
    assert f"| {cell} |" in table([found])[2]


@pytest.mark.slow
def test_a_name_does_not_end_its_cell(check):
    _, text = check(service(name="a|b", serve="vllm serve llama-3.1-70b -tp 1"))
    assert "| a\\|b | 1 x h200 |" in text


def test_one_that_does_not_start(check):
    code, text = check(service(serve="vllm serve llama-3.1-70b -tp 1"))
    assert code == MISSED and "**does not start: " in text and "--tensor-parallel-size 2 it would.**" in text


@pytest.mark.slow
def test_only_runs_of_too_few_requests_are_a_bound(check, tmp_path):
    """100 requests do not fill a replica; four sequences at a time do. One that does not start has no rate at all."""
    check(
        GOOD,
        service(name="full", serve="vllm serve llama-3.1-8b --max-num-seqs 4", request_rate=1, goodput=["ttft:60000"]),
        service(name="none", serve="vllm serve llama-3.1-70b -tp 1"),
    )
    target = tmp_path / "checks.json"
    status(["plan", "--check", str(tmp_path / "services.toml"), "--jobs", "1", "--json", str(target)])
    good, full, none = json.loads(target.read_text())["services"]
    assert [each["highest_rate_is_bound"] for each in (good, full, none)] == [True, False, False]
    assert [each["is_burst"] for each in (good, full, none)] == [False] * 3
    assert none["highest_rate"] is none["headroom"] is none["sure_rate"] is None and none["shares"] == []


def test_one_with_requests_longer_than_its_model(check):
    code, text = check(service(serve="vllm serve llama-3.1-8b --max-model-len 64"))
    assert code == MISSED and "**cannot be simulated: " in text and "more than max_model_len = 64" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[service", "is no TOML"),
        ("", "has no services; give a table [[service]] for each"),
        (service(gpu=None), "service good, gpu: is missing; correct it"),
        (service(repliacs=3), "service good, repliacs = 3: "),
        (service(replicas=0), "service good, replicas = 0: "),
        (service(gpu="h300"), "service good: gpu = 'h300': one of"),
        (service(router="best"), "service good: router = 'best': one of round-robin"),
        (service(goodput=["itl:5"]), "service good: goodput = 'itl:5': must be KEY:MILLISECONDS"),
        (service(request_rate=None), "service good: request_rate: its load has no arrivals; give a rate"),
        (service(request_rate=-1), "service good: request_rate = -1.0: must be above 0"),
        (service(trace="none.csv"), "service good: "),
    ],
)
def test_mistakes(text, message, check):
    code, printed = check(text)
    assert code == MISTAKE and message in printed and printed.count("\n") == 1


@pytest.mark.slow
def test_other_flags_are_refused(check, tmp_path, capsys):
    check(GOOD)
    assert (
        status(["plan", "--check", str(tmp_path / "services.toml"), "--gpu", "h200", "--num-prompts", "5"]) == MISTAKE
    )
    assert "leave out --gpu, --num-prompts\n" in capsys.readouterr().err
    assert status(["plan", "--check", str(tmp_path / "none.toml")]) == MISTAKE
    assert "cannot be read" in capsys.readouterr().err
    assert status(["plan", "--serve", "vllm serve llama-3.1-8b", "--goodput", "ttft:500"]) == MISTAKE
    assert "gpu = None: is missing" in capsys.readouterr().err
