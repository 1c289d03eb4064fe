"""Whether ``plan`` finds what a whole search finds: twenty drawn questions, of which plan_questions.json keeps the whole searches made so far.

    python benchmarks/plan_questions.py              regret of every question, CPU seconds, and whether the first answer was right
    python benchmarks/plan_questions.py --whole 3 7  of these questions, the missing whole searches first: minutes of CPU time each

A question is a model, five cards, lengths, a rate and objectives, drawn with a seed. ``plan`` searches the five cards with 1 to 8 ranks
and every known checkpoint. The whole search answers each combination of the three cards with the lowest bound (``least``) by itself.
Regret is the bill of ``plan`` over the lowest of the whole search, less one; a lower one, with another card, counts as 0.

Questions are small: one draw of 1,000 requests, at most 128 sequences at a time. The probability is over step times and KV caches.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fragmeter.experiments.capacity.answer import ranked
from fragmeter.experiments.capacity.candidates import CHECKPOINT, DECODE, Choices, candidates
from fragmeter.experiments.capacity.contender import Question as PlanQuestion
from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.planning import Planner
from fragmeter.experiments.capacity.prices import Prices, prices
from fragmeter.experiments.capacity.request import Aims, PlanRequest
from fragmeter.experiments.capacity.search import search
from fragmeter.experiments.capacity.unlisted import RANKS
from fragmeter.experiments.runs.grid import NONE
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.output import Report
from fragmeter.experiments.runs.parallel import Workers
from fragmeter.experiments.runs.slo_check import Goal
from fragmeter.experiments.vllm_serve.line import ServeLine
from fragmeter.experiments.vllm_serve.start import shape_of
from fragmeter.sim.metrics.objectives import objectives
from fragmeter.sim.spec import published_formats
from fragmeter.traces import Pacing

KEPT = Path(__file__).with_suffix(".json")
SEED, COUNT = 57, 20
MODELS = (
    "llama-3.1-8b", "qwen3-14b", "mistral-small-24b", "qwen3-32b", "qwen3-30b-a3b", "llama-3.1-70b",
    "meta-llama/Llama-3.1-70B-Instruct", "ibm-granite/granite-3.3-8b-instruct",
)  # fmt: skip
NUM_CARDS, NUM_WHOLE, MOST_CANDIDATES = 5, 3, 30
NUM_PROMPTS, MAX_NUM_SEQS, CONFIDENCE = 1000, "128", 0.9
_ROUNDING = 1e-9
#: The best fleet so far, by one seed or confirmed.
_BEST = re.compile(r"(?:best so far, by one seed|confirmed): (.+), [0-9.,]+ USD/h")


@dataclass(frozen=True)
class Question:
    """One question; lengths in tokens, objectives in ms."""

    model: str
    cards: tuple[str, ...]
    prompts: int
    outputs: int
    rate: float
    ttft: int
    tpot: int

    @property
    def goodput(self) -> list[str]:
        """Objectives as flags."""
        return [f"ttft:{self.ttft}", f"tpot:{self.tpot}"]

    @property
    def line(self) -> ServeLine:
        """The base line."""
        return ServeLine(self.model, {"max-model-len": "auto"}, version=None)

    @property
    def inputs(self) -> Inputs:
        """The load."""
        requests = Requests(input_len=self.prompts, output_len=self.outputs, num_prompts=NUM_PROMPTS)
        return Inputs(requests=requests, pacing=Pacing(request_rate=self.rate))


def questions() -> list[Question]:
    """The drawn questions."""
    rng, cards = np.random.default_rng(SEED), sorted(prices(None).per_gpu_hour)
    found = []
    for _ in range(COUNT):
        chosen = tuple(str(each) for each in rng.choice(cards, NUM_CARDS, replace=False))
        prompts, outputs = (
            round(float(np.exp(rng.uniform(np.log(low), np.log(high))))) for low, high in ((200, 4000), (50, 500))
        )
        rate = round(float(np.exp(rng.uniform(0, np.log(12)))), 1)
        found.append(
            Question(
                str(rng.choice(MODELS)),
                chosen,
                prompts,
                outputs,
                rate,
                int(rng.choice([500, 1000, 2000])),
                int(rng.choice([25, 33, 50, 80])),
            )  # fmt: skip
        )
    return found


def of_cards(cards: Sequence[str]) -> Prices:
    """The prices of the package, of some cards alone."""
    known = prices(None)
    return Prices(known.origin, known.currency, {each: known.per_gpu_hour[each] for each in cards}, {})


def planned(question: Question) -> dict[str, Any]:
    """The answer of ``plan``: its bill an hour, card, ranks and checkpoint, of both sides of a pair; its name, and that of the first
    answer; and CPU seconds."""
    said, start_s = io.StringIO(), time.process_time()
    with TemporaryDirectory() as folder:
        file = Path(folder, "prices.json")
        file.write_text(json.dumps({"per_gpu_hour": of_cards(question.cards).per_gpu_hour}))
        aims = Aims(goodput=question.goodput, seeds=1, confidence=CONFIDENCE, prices=file)
        choices = Choices(max_num_seqs=[MAX_NUM_SEQS])
        request = PlanRequest(question.line, (), choices, question.model, None, question.inputs, searches_ranks=True)
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            report = Report(None)
            document = search(aims, request, Workers(jobs=1), None, report).write(report, None)
    names, best = _BEST.findall(said.getvalue()), document["recommended"]
    named = None if best is None else [best["gpu"], best["tensor_parallel_size"], best.get(CHECKPOINT, NONE)]
    if named is not None and best.get(DECODE, NONE) != NONE:
        named.append(best[DECODE])
    bill = document["candidates"][0].get("bill") if named else None
    return {
        "recommended": named, "per_hour": bill and bill["per_hour"], "text": document["recommendation"],
        "first": names[0] if names else None, "last": names[-1] if names else None,
        "cpu_s": round(time.process_time() - start_s, 1),
    }  # fmt: skip


def whole(question: Question, rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Every combination of the three cards with the lowest bound that starts: its bill an hour, or None where no fleet is enough.

    Args:
        rows: Those that are known; all with one more are yielded until none is missing.
    """
    axes = {"tensor_parallel_size": list(RANKS), "max_num_seqs": [MAX_NUM_SEQS]}
    axes[CHECKPOINT] = [NONE, *published_formats(question.model)]
    started = candidates(question.line, question.cards, axes, question.model, unlisted=["gpu", *axes])
    able = [each for each in started if each.settings is not None]
    priced = of_cards(question.cards)
    name = shape_of(question.line, question.model).name
    of_model = replace(question.inputs, settings=replace(question.inputs.settings, model=name, max_model_len=None))
    load, goal = Load(of_model), Goal(objectives(question.goodput))
    planner = Planner(PlanQuestion(load, goal, range(1), question.rate, CONFIDENCE), Workers(jobs=1), None)
    lowest: dict[str, float] = {}
    for each in able:
        launch = each.started.launch
        cost = planner.contender(each).fewest_at(inf) * launch.num_gpus * priced.of(launch.gpu.name)
        lowest[launch.gpu.name] = min(cost, lowest.get(launch.gpu.name, inf))
    cards = sorted(lowest, key=lambda card: lowest[card])[:NUM_WHOLE]
    chosen = [each for each in able if each.started.launch.gpu.name in cards][:MOST_CANDIDATES]
    for each in chosen[len(rows) :]:
        ranks = ranked(planner.answers([[each]], priced, lambda *_: None), load, priced, question.rate)
        bills = [bill.per_hour for answer, bill in ranks if not answer.is_burst and not answer.is_unsure]
        values = each.axis_values
        named = [values["gpu"], values["tensor_parallel_size"], values[CHECKPOINT]]
        rows = [*rows, {"candidate": named, "per_hour": bills[0] if bills else None}]
        yield rows


def regret(answer: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float:
    """The bill over the lowest of the whole search, less one; infinite where ``plan`` alone finds none, and 0 where neither does."""
    lowest = min((row["per_hour"] for row in rows if row["per_hour"] is not None), default=inf)
    own = inf if answer["per_hour"] is None else answer["per_hour"]
    if own <= lowest * (1 + _ROUNDING):
        return 0.0
    return own / lowest - 1


def main() -> None:
    """Make the whole searches that are asked for, and print a line for each question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="make the whole searches that are missing")
    parser.add_argument("places", type=int, nargs="*", help="numbers of questions, from 0; all where none is given")
    asked = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for place, question in enumerate(questions()):
        if asked.places and place not in asked.places:
            continue
        for rows in whole(question, kept.get(str(place), [])) if asked.whole else ():
            kept[str(place)] = rows
            text = ",\n".join(f'"{name}": {json.dumps(rows)}' for name, rows in kept.items())
            KEPT.write_text(f"{{\n{text}\n}}\n")
        if str(place) not in kept:
            continue
        answer = planned(question)
        right = answer["first"] == answer["last"]
        print(
            f"{place}: {question}\n   {answer['text'][:90]}\n   {answer['recommended']} {answer['per_hour']}; regret"
            f" {regret(answer, kept[str(place)]):.1%} over {len(kept[str(place)])} candidates; first answer"
            f" {'the same' if right else answer['first']}; {answer['cpu_s']} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
