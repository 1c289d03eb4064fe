"""Plans with GPUs that have no price: they count GPUs, and say so in every output."""

from __future__ import annotations

import json

import pytest

from fragmeter.experiments.capacity.prices import prices
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.spec.gpu import gpu_names

LLAMA = [
    "--model",
    "llama-3.1-8b",
    "--goodput",
    "ttft:2000",
    "--num-prompts",
    "100",
    "--seeds",
    "1",
    "--jobs",
    "1",
    "--dataset",
    "alpaca",
]
UNPRICED = [name for name in gpu_names() if name not in prices(None).per_gpu_hour]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A priced GPU beside a smaller and a larger one without a price."""
    out = tmp_path_factory.mktemp("plan") / "out"
    gpus = ["--gpu", "a10,l4,mi300x", "--max-model-len", "4096", "--request-rate", "3000"]
    assert status(["plan", *LLAMA, *gpus, "--explain", "--out", str(out)]) == DONE
    return out


@pytest.mark.slow
def test_candidates_are_ranked_by_gpus(planned):
    document = json.loads((planned / "plan.json").read_text())
    gpus = [each["bill"]["gpus"] for each in document["candidates"]]
    assert len(gpus) == 3 and gpus == sorted(gpus) and gpus[0] < gpus[-1]
    assert document["recommended"]["gpu"] == "mi300x"
    assert all(each["bill"]["per_hour"] == each["bill"]["gpus"] for each in document["candidates"])
    assert (document["currency"], document["gpus_without_price"]) == ("GPU-hours", ["a10", "mi300x"])
    assert document["prices"]["mi300x"]["price"] is None and document["prices"]["l4"]["price"] > 0


@pytest.mark.parametrize("name", ["plan.md", "plan.html", "plan.csv"])
def test_no_output_has_a_currency(planned, name):
    text = (planned / name).read_text()
    assert "USD" not in text and "GPU-hours" in text


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if place % 4 else name for place, name in enumerate(UNPRICED)]
)
def test_every_preset_without_a_price_is_planned_for(name, capsys):
    assert status(["plan", *LLAMA, "--gpu", name, "--max-model-len", "4096", "--json", "-"]) == DONE
    document = json.loads(capsys.readouterr().out)
    assert document["gpus_without_price"] == [name]
    # Where the model does not fit, the candidate says so, and no price is asked for.
    (candidate,) = document["candidates"]
    assert candidate["refused"] or candidate["request_rate"] or candidate["every_rate_meets"]


@pytest.mark.slow
def test_a_price_for_each_of_them_gives_bills(tmp_path, capsys):
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"currency": "EUR", "per_gpu_hour": {"mi300x": 2.5}}))
    assert (
        status(["plan", *LLAMA, "--gpu", "mi300x", "--request-rate", "1", "--prices", str(path), "--json", "-"]) == DONE
    )
    document = json.loads(capsys.readouterr().out)
    assert (document["currency"], document["gpus_without_price"]) == ("EUR", [])
    assert document["candidates"][0]["bill"]["per_hour"] == 2.5
