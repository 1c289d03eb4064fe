"""The parts of ``fragmeter plan --goodput``: bills, rankings, texts, prices and limits, by hand where they can be."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from typing import ClassVar

import numpy as np
import pytest

from engine_runs import settings_of
from fragmeter.experiments.capacity.answer import Answer, bill, ranked
from fragmeter.experiments.capacity.candidates import candidates
from fragmeter.experiments.capacity.chance import Chance
from fragmeter.experiments.capacity.confidence import NUM_SEEDS, Decision
from fragmeter.experiments.capacity.contender import Question
from fragmeter.experiments.capacity.detail import detail, limit, limit_of, waiting_shares
from fragmeter.experiments.capacity.fleet import Fleet, Tried, attained_share
from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.max_rate import MaxRate
from fragmeter.experiments.capacity.planning import Planner
from fragmeter.experiments.capacity.prices import Prices, prices
from fragmeter.experiments.capacity.tasks import Runner, Task
from fragmeter.experiments.capacity.text import (
    TOO_FEW,
    bill_text,
    cheaper_text,
    details,
    headline,
    headroom_text,
    hourly_text,
    range_text,
    rate_text,
    tokens_text,
    why_loses,
)
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.parallel import Workers
from fragmeter.experiments.runs.slo_check import Goal, SloCheck
from fragmeter.experiments.vllm_serve.line import ServeLine
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.spec import gpu_names
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.optional import not_none
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import Pacing
from made_up_service import DETAIL
from oracle import Limits, Pool
from strategies import LineCost


def answer_of(gpu: str, rate: float, ranks: str = "1", wanted: float | None = None) -> Answer:
    """A candidate with replicas that take exactly so many requests/s, and with the smallest fleet for the wanted rate."""
    (candidate,) = candidates(ServeLine("llama-3.1-8b", {}), [gpu], {"tensor_parallel_size": [ranks]})
    found = MaxRate(SloCheck(True, 8, 8, {}), None, (rate,), rate)
    if wanted is None or rate == inf:
        return Answer(candidate, found=found, wanted=wanted, detail=DETAIL)
    size = ceil(wanted / rate)
    fleet = Fleet(size, max(1, size - 1), (Tried(size, (1.0,), Decision.ENOUGH),), (size * rate,), size * rate, seeds=1)
    return Answer(candidate, found=found, wanted=wanted, fleet=fleet, detail=DETAIL)


class FixedLoad:
    mean_tokens = (300.0, 100.0)


PRICES = Prices("here", "EUR", {"a100-80gb": 2.0, "h200": 5.0}, {})
#: Rates at which a token of the H200 costs less.
RATES = (("a100-80gb", 10.0), ("h200", 26.0))


class TestBill:
    def test_by_hand(self):
        """25 requests/s by replicas of 10: three, of two GPUs at 2 an hour, which is 90,000 requests or 36 M tokens."""
        found = bill(answer_of("a100-80gb", 10.0, "2", 25.0), FixedLoad, PRICES, 25.0)
        assert (found.replicas, found.gpus, found.per_hour) == (3, 6, 12.0)
        assert (found.fewest_replicas, found.fewest_per_hour) == (2, 8.0)
        assert found.per_million == pytest.approx({"input": 12 / 27, "output": 12 / 9, "total": 12 / 36})
        # One replica at its full rate: 4 an hour for 14.4 M tokens.
        assert found.full_per_million == pytest.approx(4 / 14.4)

    def test_the_bill_goes_from_the_fewest_replicas_to_those_that_are_enough(self):
        open_, sure = answer_of("a100-80gb", 10.0, "2", 25.0), answer_of("a100-80gb", 10.0, "2", 5.0)
        texts = [bill_text(bill(each, FixedLoad, PRICES, each.wanted)) for each in (open_, sure)]
        assert texts == ["8.00 to 12.00", "4.00"]

    def test_the_cheapest_for_the_wanted_rate_comes_first(self):
        """An H200 takes 26 for 5, an A100 10 for 2: whole numbers decide, or else the price of a token."""

        def order(wanted: float | None) -> list[str]:
            a100, h200 = answer_of("a100-80gb", 10.0, wanted=wanted), answer_of("h200", 26.0, wanted=wanted)
            answers = [h200, Answer(h200.candidate), a100]
            return [each.candidate.axis_values["gpu"] for each, _ in ranked(answers, FixedLoad, PRICES, wanted)]

        assert order(9.0) == order(20.0) == ["a100-80gb", "h200"]
        assert order(25.0) == ["h200", "a100-80gb"]
        assert order(None) == ["h200", "a100-80gb"]

    def test_of_what_meets_at_every_rate_one_replica_is_enough(self):
        """The A100 takes every rate for 2, so that it is the cheapest for any; but its token has no price."""
        every, h200 = answer_of("a100-80gb", inf), answer_of("h200", 26.0)
        wanted = answer_of("h200", 26.0, wanted=25.0)
        assert [each for each, _ in ranked([wanted, every], FixedLoad, PRICES, 25.0)] == [every, wanted]
        found = bill(every, FixedLoad, PRICES, 10_000.0)
        assert (found.replicas, found.per_hour, found.full_per_million) == (1, 2.0, None)
        assert found.per_million["total"] == pytest.approx(2 / 14_400)
        assert [each for each, _ in ranked([h200, every], FixedLoad, PRICES, None)] == [h200]

    def test_what_bursts_alone_show_comes_after_what_is_known(self):
        """An A100 for 2 is a lower bound: it does not win over an H200 for 5, which is known."""
        a100, h200 = answer_of("a100-80gb", 1000.0, wanted=9.0), answer_of("h200", 26.0, wanted=9.0)
        for known, order in (((8.0,), [h200, a100]), ((9.5,), [a100, h200])):
            a100_ = replace(a100, known_rates=known)
            ranks = ranked([a100_, h200], FixedLoad, PRICES, 9.0)
            assert [each.candidate for each, _ in ranks] == [each.candidate for each in order]

    def test_beside_a_gpu_without_a_price_gpus_are_counted(self):
        """25 requests/s: three A100, one H200 or two MI300X; and a token by the GPU-hours of replicas at their full rates."""
        rates = {"a100-80gb": 10.0, "h200": 26.0, "mi300x": 13.0}
        counted = PRICES.for_gpus(rates)
        for wanted, order in ((25.0, ["h200", "mi300x", "a100-80gb"]), (None, ["h200", "mi300x", "a100-80gb"])):
            answers = [answer_of(name, rate, wanted=wanted) for name, rate in rates.items()]
            ranks = ranked(answers, FixedLoad, counted, wanted)
            assert [each.candidate.axis_values["gpu"] for each, _ in ranks] == order
            assert [found.per_hour for _, found in ranks] == [found.gpus for _, found in ranks]
        assert ranks[0][1].full_per_million == pytest.approx(1e6 / (26 * 400 * 3600))
        assert (counted.missing, counted.currency, PRICES.for_gpus(["h200"])) == (("mi300x",), "GPU-hours", PRICES)
        assert counted.as_dict()["mi300x"] == {"price": None, "source": None}
        assert counted.as_dict()["h200"]["price"] == 5.0


class TestNeighbour:
    """One H200 for 5 an hour, beside A100s for 2; they take so many requests/s, and 20 are wanted."""

    AT: ClassVar = DETAIL

    def line(
        self, a100: float, h200: float, known: tuple[float, ...] | None = None, prices: Prices = PRICES
    ) -> str | None:
        answers = [
            replace(answer_of(gpu, rate, wanted=20.0), detail=self.AT)
            for gpu, rate in (("a100-80gb", a100), ("h200", h200))
        ]
        answers[1] = replace(answers[1], known_rates=known)
        ranks = ranked(answers, FixedLoad, prices, 20.0)
        assert ranks[0][0].candidate.axis_values["gpu"] == "a100-80gb"
        lines = details(ranks, Goal(Objectives(ttft=500)), 20.0, "EUR")
        return next((line for line in lines if " money, " in line), None)

    def test_a_little_more_money_for_half_as_much_again_above_the_wanted_rate(self):
        """Two A100s take 26 for 4, an H200 38 for 5."""
        assert self.line(13.0, 38.0) == (
            "For 25% more money, h200 takes 1.5 times as many requests: 38 requests/s (headroom +90% in place of +30%)."
        )

    def test_neither_a_little_more_rate_nor_dearer_requests(self):
        """From 26 requests/s to 28 is less than half as much again, and 32 cost more a request."""
        assert self.line(13.0, 28.0) is self.line(13.0, 32.0) is None

    def test_a_number_format_for_the_same_money_comes_with_its_caveat(self):
        """An A100 with an fp8 KV cache takes 40 requests/s in place of 22; without any finite rate it loses for the same reason."""

        def answers(*rates: float) -> list[Answer]:
            fp8 = candidates(ServeLine("llama-3.1-8b", {}), ["a100-80gb"], {"kv_cache_dtype": ["auto", "fp8"]})
            found = [replace(answer_of("a100-80gb", rate, wanted=20.0), detail=self.AT) for rate in rates]
            fleet = Fleet(1, 1, (Tried(1, (1.0,), Decision.ENOUGH),), (inf,), seeds=1)
            return [
                replace(each, candidate=candidate, fleet=each.fleet or fleet)
                for each, candidate in zip(found, fp8, strict=True)
            ]

        ranks = ranked(answers(22.0, 40.0), FixedLoad, PRICES, 20.0)
        lines = details(ranks, Goal(Objectives(ttft=500)), 20.0, "EUR")
        caveat = "the number format may change what the model answers: compare its quality first"
        assert (
            "For the same money, a100-80gb, kv_cache_dtype=fp8 takes 1.8 times as many requests: 40 requests/s (headroom +100% in"
            f" place of +10%); {caveat}."
        ) in lines
        first, other = ranked(answers(inf, inf), FixedLoad, PRICES, 20.0)
        assert first[1].full_per_million is None
        reason = why_loses(*other, first, 20.0, "EUR")
        assert reason.startswith("as cheap, but its number format may change what the model answers; ")

    def test_one_that_leaves_answers_alone_comes_before_a_faster_one_that_does_not(self):
        """H200s for 5 in place of an A100 for 2: 85 requests/s, or 95 with an fp8 KV cache."""
        axes = {"kv_cache_dtype": ["auto", "fp8"]}
        plain, fp8 = candidates(ServeLine("llama-3.1-8b", {}), ["h200"], axes)
        a100 = answer_of("a100-80gb", 22.0, wanted=20.0)
        answers = [a100] + [
            replace(answer_of("h200", rate, wanted=20.0), candidate=candidate)
            for candidate, rate in ((plain, 85.0), (fp8, 95.0))
        ]
        ranks = ranked([replace(each, detail=self.AT) for each in answers], FixedLoad, PRICES, 20.0)
        (line,) = (each for each in details(ranks, Goal(Objectives(ttft=500)), 20.0, "EUR") if " money, " in each)
        assert (
            line.startswith("For 150% more money, h200, kv_cache_dtype=auto takes 3.9 times")
            and "number format" not in line
        )

    @pytest.mark.parametrize(
        ("price", "text"), [(2.0002, "the same money"), (2.01, "0.5% more money"), (2.4, "20% more money")]
    )
    def test_the_money_in_words(self, price, text):
        prices_ = Prices("here", "EUR", {"a100-80gb": 2.0, "h200": price}, {})
        assert f"For {text}, h200 takes" in not_none(self.line(22.0, 60.0, prices=prices_))

    def test_nothing_is_said_of_a_rate_that_is_unknown(self):
        assert self.line(13.0, 38.0, (30.0,)) is None


class TestRange:
    """20 requests/s by two A100s for 4, of which one may be enough; and by two of a dearer GPU, one of which costs less than both."""

    def text(self, h200: float, fewest: int) -> str:
        answers = [answer_of(gpu, 10.0, wanted=20.0) for gpu in ("a100-80gb", "h200")]
        fleets = [replace(not_none(answers[0].fleet), fewest=2), replace(not_none(answers[1].fleet), fewest=fewest)]
        answers = [
            replace(each, fleet=fleet, detail=TestNeighbour.AT) for each, fleet in zip(answers, fleets, strict=True)
        ]
        priced = Prices("here", "EUR", {"a100-80gb": 2.0, "h200": h200}, {})
        return cheaper_text(ranked(answers, FixedLoad, priced, 20.0), "EUR")

    def test_a_candidate_that_may_be_cheaper_is_named(self):
        named = "A cheaper one is open: h200 (3.00 to 6.00 EUR/h, as 1 replica may be enough)."
        assert self.text(3.0, 1) == named

    def test_one_that_is_not_is_not(self):
        """At both ends dearer, or as dear at the low one."""
        for price, fewest in ((3.0, 2), (5.0, 1), (4.0, 1)):
            assert not self.text(price, fewest)

    def test_a_bound_is_named_and_marked(self):
        """By bursts one A100 for 2 is enough for 20 requests/s; an H200 for 5 is known to be."""
        bursts, sure = (replace(answer_of(gpu, 26.0, wanted=20.0), detail=TestNeighbour.AT) for gpu, _ in RATES)
        bursts = replace(bursts, known_rates=(19.0,))
        ranks = ranked([bursts, sure], FixedLoad, PRICES, 20.0)
        why = f"at least 2.00 EUR/h, a lower bound, because its runs are bursts ({TOO_FEW})"
        assert cheaper_text(ranks, "EUR") == f"A cheaper one is open: a100-80gb ({why})."
        assert why_loses(*ranks[1], ranks[0], 20.0, "EUR") == why
        assert [hourly_text(*each) for each in ranks] == ["5.00", ">=2.00"]
        # Among bounds alone the lowest comes first.
        dearer = replace(sure, known_rates=(19.0,))
        ranks = ranked([dearer, bursts], FixedLoad, PRICES, 20.0)
        assert ranks[0][0] is bursts
        reason = why_loses(*ranks[1], ranks[0], 20.0, "EUR")
        assert reason.startswith("5.00 EUR/h against 2.00: 1 GPU; both are lower bounds; limited by ")

    @pytest.mark.parametrize("bursts", ["a100-80gb", "h200"])
    def test_the_price_of_tokens_that_bursts_show_is_marked(self, bursts):
        answers = [replace(answer_of(gpu, rate), detail=TestNeighbour.AT) for gpu, rate in RATES]
        answers = [
            replace(each, known_rates=(0.0,)) if each.candidate.axis_values["gpu"] == bursts else each
            for each in answers
        ]
        first, other = ranked(answers, FixedLoad, PRICES, None)
        marks = ["more than " * (each.candidate.axis_values["gpu"] == bursts) for each, _ in (other, first)]
        prices_ = [f"{mark}{each.per_million['total']:.3g}" for mark, (_, each) in zip(marks, (other, first))]
        reason = why_loses(*other, first, None, "EUR")
        assert reason.startswith(f"{prices_[0]} EUR a million tokens at the full rate against {prices_[1]}; ")


class TestFirstLine:
    """25 requests/s by replicas of 10 on two GPUs each: three, of which the seeds say that two may be enough."""

    @pytest.mark.parametrize(
        ("open_", "chances", "text"),
        [
            (True, (), " (4 may be enough)"),
            (True, (0.714, 0.97), " (enough with 97%; 4 with 71%)"),
            (False, (0.0, 0.996), " (enough with 99%; 4 with 0%)"),
            (False, (), ""),
        ],
    )
    def test_other_sizes_are_named_together(self, open_, chances, text):
        answer = replace(answer_of("a100-80gb", 10.0, "2", 25.0), detail=TestNeighbour.AT)
        fleet = not_none(answer.fleet)
        known = tuple(Chance(size, each, (), (), ()) for size, each in zip((2, 3), chances, strict=False))
        answer = replace(answer, fleet=replace(fleet if open_ else replace(fleet, fewest=3), chances=known))
        found = headline(answer, bill(answer, FixedLoad, PRICES, 25.0), 25.0, "EUR")
        assert found.startswith(f"Buy 6 x a100-80gb for 25 requests/s{text}: ")

    def test_spare_replicas_are_bought_beside_those_that_are_enough(self):
        answer = replace(answer_of("a100-80gb", 10.0, "2", 25.0), detail=TestNeighbour.AT)
        chances = tuple(Chance(size, each, (), (), ()) for size, each in ((2, 0.71), (3, 0.97)))
        answer = replace(answer, fleet=replace(not_none(answer.fleet), chances=chances))
        ((_, found),) = ranked([answer], FixedLoad, PRICES, 25.0, 1)
        assert (found.replicas, found.gpus, found.fewest_replicas, found.spare_gpus) == (4, 8, 3, 2)
        assert (found.per_hour, found.fewest_per_hour) == (16.0, 12.0)
        own = bill(answer, FixedLoad, PRICES, 25.0)
        assert found.per_million["total"] == pytest.approx(own.per_million["total"] * 4 / 3)
        assert found.full_per_million == own.full_per_million
        start = "Buy 8 x a100-80gb for 25 requests/s, 2 of them spare (6 are enough with 97%; 4 with 71%): 12.00 to 16.00 EUR/h"
        assert headline(answer, found, 25.0, "EUR").startswith(start)

    def test_a_lower_bound_names_no_fewer_gpus(self):
        """By bursts two replicas may be enough, which says nothing of a load that lasts."""
        answer = replace(answer_of("a100-80gb", 10.0, "2", 25.0), detail=TestNeighbour.AT)
        fleet = replace(not_none(answer.fleet), tried=(Tried(3, (1.0, 1.0), Decision.ENOUGH),))
        answer = replace(answer, fleet=fleet)
        for known, first, row, more in (
            ((26.0,), "Buy 6 x a100-80gb for 25 requests/s (4 may be enough): ", "4-6", True),
            ((24.0,), "Buy at least 6 x a100-80gb for 25 requests/s: at least", ">=6", False),
        ):
            answer = replace(answer, known_rates=known)
            cost = bill(answer, FixedLoad, PRICES, 25.0)
            text = headline(answer, cost, 25.0, "EUR")
            assert text.startswith(first) and ("8.00 to 12.00 EUR/h" in text) == more
            assert (range_text(answer, cost), cost.fewest_replicas) == (row, 2 if more else 3)
            lines = details([(answer, cost)], Goal(Objectives(ttft=500)), 25.0, "EUR")
            assert any("2 replicas may be enough" in line for line in lines) == more
            assert not any("would be too few" in line for line in lines)


class TestWhatThePurchaseDependsOn:
    """Three replicas, one of them for prefill, behind a router, with weights and a KV cache in 8 bits."""

    AXES: ClassVar = {"quantization": ["fp8"], "kv_cache_dtype": ["fp8"], "router": ["kv-aware"]}

    def answer(self, axes: dict[str, list[str]], prefill: int | None, rate: float = 10.0) -> Answer:
        (candidate,) = candidates(ServeLine("llama-3.1-8b", {}), ["h200"], axes)
        found = answer_of("h200", rate, wanted=25.0)
        return replace(found, candidate=candidate, prefill_replicas=prefill, detail=TestNeighbour.AT)

    def first(self, answer: Answer) -> str:
        return headline(answer, bill(answer, FixedLoad, PRICES, 25.0), 25.0, "EUR")

    def test_it_is_in_the_first_line(self):
        assert self.first(self.answer(self.AXES, 1)).startswith(
            "Buy 3 x h200 for 25 requests/s, with --quantization fp8, --kv-cache-dtype fp8 (which may change what the model answers),"
            " --router kv-aware, 1 replica for prefill, 2 for decode (2 may be enough): "
        )
        assert self.first(self.answer({}, None)).startswith("Buy 3 x h200 for 25 requests/s (2 may be enough): ")

    def test_the_router_is_among_the_settings_of_fleets(self):
        def set_line(answer: Answer) -> str:
            ranks = ranked([answer], FixedLoad, PRICES, 25.0)
            lines = details(ranks, Goal(Objectives(ttft=500)), 25.0, "EUR")
            return next(line for line in lines if line.startswith("Set: "))

        assert set_line(self.answer(self.AXES, None)).endswith("; behind --router kv-aware")
        assert set_line(self.answer({}, None)).endswith("; behind --router round-robin")
        # One replica needs none.
        assert "router" not in set_line(self.answer(self.AXES, None, 50.0))
        assert "router" not in self.first(self.answer(self.AXES, None, 50.0))


class TestTheRateOfAFleet:
    """Two replicas for 20 requests/s."""

    @pytest.mark.parametrize(
        ("rates", "text"),
        [
            ((22.0,), "It takes 22 requests/s before it misses the goal, 10% more."),
            (
                (22.0,) * 4,
                "It takes 22 requests/s in the mean of the first seeds before it misses the goal, 10% more, and 21 with the same"
                " confidence.",
            ),
        ],
    )
    def test_beside_the_mean_of_the_seeds_what_most_others_take(self, rates, text):
        lines = details(ranked([self.answer(*rates)], FixedLoad, PRICES, 20.0), Goal(Objectives(ttft=500)), 20.0, "EUR")
        assert any(line.endswith(text) for line in lines)

    def answer(self, *rates: float, sure_rate: float = 21.0) -> Answer:
        fleet = Fleet(2, 2, (Tried(2, (0.95,) * len(rates), Decision.ENOUGH),), rates, sure_rate, seeds=NUM_SEEDS)
        return replace(answer_of("a100-80gb", 11.0, wanted=20.0), fleet=fleet, detail=DETAIL)

    @pytest.mark.parametrize(
        ("rates", "text"),
        [((22.0,) * 4, "headroom +10% (+5% with confidence);"), ((22.0,), "headroom +10%;")],
    )
    def test_the_first_line_has_both(self, rates, text):
        answer = self.answer(*rates)
        assert answer.sure_rate == (None if len(rates) == 1 else 21.0)
        assert text in headline(answer, bill(answer, FixedLoad, PRICES, 20.0), 20.0, "EUR")

    @pytest.mark.parametrize(("sure_rate", "idle"), [(40.0, True), (39.0, False)])
    def test_a_fleet_that_only_some_seeds_leave_idle_is_not_called_idle(self, sure_rate, idle):
        """In the mean they take 50 requests/s."""
        ranks = ranked([self.answer(50.0, 50.0, 50.0, 50.0, sure_rate=sure_rate)], FixedLoad, PRICES, 20.0)
        lines = details(ranks, Goal(Objectives(ttft=500)), 20.0, "EUR")
        assert any("idle at the wanted rate" in line for line in lines) == idle


def test_a_fleet_that_meets_the_goal_at_every_rate_has_no_number():
    fleet = Fleet(2, 2, (Tried(2, (1.0, 1.0), Decision.ENOUGH),), (inf, inf), seeds=2)
    found = MaxRate(SloCheck(True, 80, 80, {}), 3.0, (2.0,), 5)
    answer = Answer(None, found=found, wanted=4.0, fleet=fleet, detail=DETAIL)
    assert (headroom_text(answer), rate_text(answer)) == ("every rate", "every rate")


@pytest.mark.slow
def test_the_fleet_of_a_candidate_does_not_depend_on_the_others():
    """With an H200, which has more requests in flight, the runs of A100s are not longer."""
    load = Load(Inputs(requests=Requests(dataset="sharegpt"), pacing=Pacing(request_rate=20.0)))
    goal = Goal(Objectives(ttft=500, tpot=50))
    a100, h200 = candidates(ServeLine("llama-3.1-8b", {}), ["a100-80gb", "h200"], {})

    def planner() -> Planner:
        return Planner(Question(load, goal, range(1), 20.0), Workers(jobs=1), None)

    (alone,) = planner().answers([[a100]], prices(None), lambda *_: None)
    both = planner()
    beside, _ = both.answers([[a100], [h200]], prices(None), lambda *_: None)
    assert beside == alone and alone.replicas > 1
    # The loads do differ: one for all candidates would change the runs.
    sizes = [both.jobs.load_of(not_none(each.settings)).num_prompts(alone.replicas) for each in (a100, h200)]
    assert sizes[0] < sizes[1]


class TestUnknownRates:
    """Runs that are too few to fill a replica tell rates up to 24 and 25 requests/s, or none."""

    def answer(self, *known: float) -> Answer:
        return replace(answer_of("a100-80gb", 300.0, wanted=20.0), known_rates=known)

    def test_a_lower_bound_or_nothing_in_place_of_the_headroom(self):
        bound, nothing = self.answer(24.0, 25.0), self.answer(24.0, 0.0)
        assert (headroom_text(bound), rate_text(bound)) == (">+22%", "more than 24.5 requests/s")
        assert headroom_text(nothing) == "unknown" and nothing.fleet_rate == 20
        assert headroom_text(answer_of("a100-80gb", 300.0, wanted=20.0)) == "+1400%"

    @pytest.mark.parametrize(
        ("rates", "known", "idle"),
        [((39.0,), None, False), ((40.0,), None, True), ((90.0,), (41.0,), True), ((90.0,), (24.0,), False)],
    )
    def test_a_fleet_of_any_size_that_takes_twice_the_wanted_rate_is_called_idle(self, rates, known, idle):
        """Eight replicas, the fewest of engines that share experts."""
        fleet = Fleet(8, 8, (Tried(8, (1.0,), Decision.ENOUGH),), rates, seeds=1)
        answer = replace(answer_of("a100-80gb", 300.0, wanted=20.0), fleet=fleet, known_rates=known)
        ranks = ranked([replace(answer, detail=DETAIL)], FixedLoad, PRICES, 20.0)
        lines = details(ranks, Goal(Objectives(ttft=500)), 20.0, "EUR")
        assert any("idle at the wanted rate" in line for line in lines) == idle

    def test_the_first_line(self):
        def first(answer: Answer, wanted: float | None = 20.0) -> str:
            answer = replace(answer, detail=TestNeighbour.AT)
            return headline(answer, bill(answer, FixedLoad, PRICES, wanted), wanted, "EUR")

        remedy = "(too few requests to fill a replica: raise --num-prompts)"
        assert f"; headroom more than 22% {remedy};" in first(self.answer(24.0, 25.0))
        assert f"; headroom unknown {remedy};" in first(self.answer(0.0))
        sure = replace(self.answer(0.0), known_rates=None)
        sure = replace(sure, fleet=replace(not_none(sure.fleet), rates=(300.0,) * 4))
        assert "95% confidence" in first(sure) and "95% confidence" in first(replace(sure, known_rates=(24.0,) * 4))
        # With one seed a burst at the wanted rate nothing is sure, and the fleet is a bound.
        bursts = first(replace(sure, known_rates=(24.0, 24.0, 24.0, 19.0)))
        assert "confidence" not in bursts and bursts.startswith("Buy at least 1 x a100-80gb for 20 requests/s")
        assert "; a lower bound: at this rate the runs are bursts, and a load that lasts may need more;" in bursts
        one = replace(answer_of("a100-80gb", 300.0), known_rates=(0.0,))
        assert f"; a replica sustains less than 300 requests/s, the rate of a burst {remedy};" in first(one, None)

    def test_the_rate_of_a_burst_is_not_sold_as_one_that_lasts(self):
        """Bounds on both sides: of the rate from above, of the price of tokens from below."""
        one = replace(answer_of("a100-80gb", 300.0), known_rates=(0.0,))
        price = bill(one, FixedLoad, PRICES, None)
        assert rate_text(one) == "less than 300 requests/s"
        assert tokens_text(one, price) == f"more than {price.per_million['total']:.3g}"
        filled = answer_of("a100-80gb", 300.0)
        assert (rate_text(filled), tokens_text(filled, price)[0]) == ("300 requests/s", "0")


class TestPrices:
    def test_the_examples_have_sources_and_dates(self):
        found = prices(None)
        assert set(found.per_gpu_hour) == set(found.sources) < set(gpu_names())
        assert all("https://" in source and "2026-" in source for source in found.sources.values())

    def test_toml(self, tmp_path):
        path = tmp_path / "mine.toml"
        path.write_text('currency = "EUR"\n[per_gpu_hour]\nh200 = 3\n')
        assert (prices(path).of("h200"), prices(path).currency) == (3, "EUR")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "is neither JSON nor TOML"),
            ("[" * 100_000, "is neither JSON nor TOML"),
            ("[]", "must have per_gpu_hour"),
            ('{"per_gpu_hour": {}}', "must have per_gpu_hour"),
            ('{"per_gpu_hour": {"h200": -1}}', "h200 costs -1; a price must be a number above 0"),
            (
                '{"per_gpu_hour": {"h200": ' + "9" * 400 + "}}",
                "h200 costs 9+; a price must be a number above 0, and at most",
            ),
            ('{"per_gpu_hour": {"h200": NaN}}', "h200 costs nan; a price must be a number above 0, and at most"),
            ('{"per_gpu_hour": {"h200": "4"}}', "h200 costs '4'"),
            ('{"per_gpu_hour": {"h200": true}}', "h200 costs True"),
            ('{"per_gpu_hour": {"h200": 4}, "sources": 3}', "sources is 3"),
            ('{"per_gpu_hour": {"h200": 4}, "currency": 3}', "currency is 3; it must be a name, such as EUR"),
            ('{"per_gpu_hour": {"h200": 4}, "currency": " "}', "currency is ' '; it must be a name"),
        ],
    )
    def test_what_cannot_be(self, text, message, tmp_path):
        (tmp_path / "prices.json").write_text(text)
        with pytest.raises(SettingError, match=message):
            prices(tmp_path / "prices.json")

    def test_no_file(self, tmp_path):
        with pytest.raises(SettingError, match="cannot be read: No such file"):
            prices(tmp_path / "none.json")


def test_what_is_kept_is_found_again_only_for_the_same_question():
    """It covers the work, the replica, the load, the seed, the goal and the other arguments of the task."""
    chosen = settings_of("vllm-v1", Pool(64, 16), Limits(64))
    loads = [Load(Inputs(requests=Requests(num_prompts=count))) for count in (100, 101)]
    goals = [Goal(Objectives(ttft=5)), Goal(Objectives(ttft=5), 0.8), Goal(Objectives(tpot=5))]
    asked = [
        Task(detail, chosen, 0, (Cluster(), 1.0)),
        Task(attained_share, chosen, 0, (Cluster(), 1.0)),
        Task(detail, chosen, 1, (Cluster(), 1.0)),
        Task(detail, chosen, 0, (Cluster(), 2.0)),
        Task(detail, chosen, 0, (Cluster(num_replicas=2), 1.0)),
        Task(detail, chosen, 0, (Cluster(num_replicas=2, router="kv-aware"), 1.0)),
        Task(detail, settings_of("vllm-v1", Pool(65, 16), Limits(64)), 0, (Cluster(), 1.0)),
    ]
    keys = [Runner(load, goal, Workers(jobs=1), None).key(each) for load in loads for goal in goals for each in asked]
    assert len(set(keys)) == len(keys) == 42
    assert keys[0] == Runner(loads[0], goals[0], Workers(jobs=1), None).key(asked[0])


class TestLimit:
    """Forty requests at once, of 32 prompt tokens and 20 of output."""

    def run(self, blocks: int, num_seqs: int, budget: int):
        forty = np.ones(40, dtype=np.int64)
        work = Workload("crowd", 0 * forty, 32 * forty, 20 * forty)
        chosen = settings_of(
            "vllm-v1", Pool(blocks, 16), Limits(64, max_num_seqs=num_seqs, max_num_batched_tokens=budget)
        )
        return simulate(chosen, work, LineCost())

    @pytest.mark.parametrize(
        ("parts", "cause"), [((400, 4, 2048), "max_num_seqs"), ((9, 40, 2048), "memory"), ((400, 40, 40), "steps")]
    )
    def test_what_they_wait_for(self, parts, cause):
        run = self.run(*parts)
        waits = waiting_shares(run)
        assert max(waits, key=waits.get) == cause
        found = limit(run, Goal(Objectives(ttft=1e-6)))
        assert (found.cause, found.objective) == (cause, "ttft")
        assert found.missed["ttft"] > 0.5

    @pytest.mark.parametrize(
        ("tpot_ms", "num_seqs", "cause"), [(30, 1024, "memory"), (5, 1024, "steps"), (30, 56, "max_num_seqs")]
    )
    def test_memory_limits_only_where_more_of_it_helps(self, tpot_ms, num_seqs, cause):
        """At 60 requests/s the queue waits for blocks in all cases. Twice the blocks serve nine of ten that missed 500 ms to the
        first token; no number of blocks makes a step of 5 ms, or has room for more than 56 sequences."""
        draw = np.random.default_rng(0)
        arrivals = (np.cumsum(draw.exponential(1 / 60, 400)) * 1e12).astype(np.int64)
        work = Workload("poisson", arrivals, np.full(400, 500), np.full(400, 100))
        chosen = settings(
            policy="vllm-v1", model="llama-3.1-8b", gpu="h100-80gb", num_gpu_blocks_override=1600, max_num_seqs=num_seqs
        )
        goal = Goal(Objectives(ttft=500, tpot=tpot_ms))
        assert limit(simulate(chosen, work), goal).cause == "memory"
        assert limit_of(chosen, work, goal).cause == cause

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("policy", "too_small"),
        [("orca-max", 1600), ("orca-pow2", 800), ("orca-oracle", 800), ("trtllm-no-evict", 1600), ("tgi", 1600)],
    )
    def test_memory_that_a_policy_reserves_limits_it(self, policy, too_small):
        """At 20 requests/s requests wait for a reservation, for some policies while blocks are free; with twice the blocks none
        does. A pool for all leaves the steps, of which none takes 1 ms."""
        draw = np.random.default_rng(0)
        arrivals = (np.cumsum(draw.exponential(1 / 20, 400)) * 1e12).astype(np.int64)
        work = Workload("poisson", arrivals, np.full(400, 500), np.full(400, 100))
        of_pool = {"policy": policy, "model": "llama-3.1-8b", "gpu": "h100-80gb", "max_model_len": 2048}
        small, large = (settings(**of_pool, num_gpu_blocks_override=blocks) for blocks in (too_small, 25_600))
        assert limit_of(small, work, Goal(Objectives(ttft=500))).cause == "memory"
        assert limit_of(large, work, Goal(Objectives(tpot=1))).cause == "steps"

    def test_preemptions_without_a_queue_are_memory(self):
        """Room for all prompts, and not for the outputs."""
        run = self.run(100, 40, 2048)
        found = limit(run, Goal(Objectives(tpot=1e-9)))
        assert found.preemptions and found.cause == "memory"
