"""``unlisted``: the winner of a contest is that of the whole search, with fewer candidates answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.capacity.prices import Prices
from fragmeter.experiments.capacity.tasks import Search
from fragmeter.experiments.capacity.unlisted import Contest, groups_of
from trials import ended

WANTED = 20.0
#: A rough rate over that of one draw.
ROUGH = 0.9


class MadeUp:
    """A candidate of replicas that take made-up rates: with one draw, saturated, and in the whole test."""

    is_pair = False

    def __init__(self, name: str, rates: tuple[float, float, float], wanted: float | None, gpus: int = 1) -> None:
        launch = SimpleNamespace(num_gpus=gpus, gpu=SimpleNamespace(name=name))
        started = SimpleNamespace(launch=launch)
        self.candidate = SimpleNamespace(name=name, num_gpus=gpus, engines=1, started=started, decode=None)
        self.name, self.rates, self.wanted, self.bursts = name, rates, wanted, False
        #: What was asked for.
        self.asked: list[str] = []

    def fewest_at(self, most: float) -> int:
        return 1

    def bound(self) -> Search[tuple[float, int | None]]:
        return self._said("bound", (self.rates[1], self._size(self.rates[1])))

    def rough_rate(self) -> Search[float]:
        return self._said("rate", self.rates[0] * ROUGH)

    def rough_size(self, near: int) -> Search[int | None]:
        return self._said("draw", self._size(self.rates[0]) if self.rates[0] else None)

    def is_too_few(self, size: int) -> Search[bool]:
        return self._said("too few", size < (self._size(self.rates[2]) or 1))

    def answer(self) -> Search[Any]:
        rate, size = self.rates[2], self._size(self.rates[2])
        fleet = None if self.wanted is None else size
        found = SimpleNamespace(
            rate=rate, full_rate=rate, replicas=size, fleet=fleet, is_burst=self.bursts, is_unsure=False
        )
        return self._said("answer", found)

    def _size(self, rate: float) -> int | None:
        return None if self.wanted is None else ceil(self.wanted / rate) if rate else 1

    def _said(self, name: str, found: Any) -> Search[Any]:
        self.asked.append(name)
        return found
        yield


class Made:
    """Runs searches that ask for nothing."""

    def side_by_side(self, searches: Mapping[Any, Search[Any]]) -> dict[Any, Any]:
        return {name: ended(search, lambda _: None)[0] for name, search in searches.items()}


def contest(members: Sequence[MadeUp], prices: Mapping[str, float], spare: int = 0, say: Any = None) -> Contest:
    """A contest of them, for the rate that they are made for."""
    question = SimpleNamespace(wanted=members[0].wanted, spare=spare)
    priced = Prices("here", "USD", dict(prices), {})
    return Contest([*members], question, Made(), None, priced, say or (lambda *_: None))  # type: ignore[arg-type, list-item]


#: Highest rate with one draw and in the whole test, as shares of the saturated one; the latter may be 0.
SHARES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
CARD = st.tuples(st.floats(0.5, 40), SHARES, SHARES, st.sampled_from([1, 2, 4, 8]), st.floats(0.3, 9))


@pytest.mark.slow
@given(st.lists(CARD, min_size=2, max_size=9), st.sampled_from([(WANTED, 0), (WANTED, 1), (WANTED, 3), (None, 0)]))
def test_the_winner_is_that_of_the_whole_search(cards, asked):
    wanted, spare = asked
    members = [
        MadeUp(f"card{place}", (most * first, most, most * whole), wanted, gpus)
        for place, (most, first, whole, gpus, _) in enumerate(cards)
    ]
    prices = {each.name: card[4] for each, card in zip(members, cards, strict=True)}
    found, whole = contest(members, prices, spare), contest(members, prices, spare)
    found.search()
    # The whole search: every candidate answered.
    whole.answers = whole.runner.side_by_side({each: each.answer() for each in members})
    costs = {each.name: whole.cost_of(each) for each in members}
    lowest = min((found.cost_of(each) for each in found.answers), default=inf)
    assert lowest == pytest.approx(min(costs.values()))
    assert len(found.answers) + len(found.closed) == len(members)
    for each in found.closed:
        assert each.at_least is None or costs[each.name] >= each.at_least * (1 - 1e-6)


def made(rates: Mapping[str, tuple[float, float, float]]) -> list[MadeUp]:
    return [MadeUp(name, of_one, WANTED) for name, of_one in rates.items()]


def test_one_answer_closes_the_others_by_their_bounds():
    small, large = made({"small": (9.0, 10.0, 9.0), "large": (30.0, 40.0, 30.0)})
    said: list[tuple[str, float, bool]] = []
    found = contest([small, large], {"small": 1.0, "large": 4.0}, say=lambda *best: said.append(best))
    found.search()
    assert "answer" in small.asked and "answer" not in large.asked
    assert said == [("small", 3.0, False), ("small", 3.0, True)]
    assert [each.text("USD/h") for each in found.closed] == ["large: at least 4.00 USD/h, 1 replicas; not cheaper"]


def test_spare_replicas_are_part_of_the_cost():
    """Two replicas of 2.5 become 5.0 with a spare one, and three of 1.0 become 4.0."""
    rates = {"small": (9.0, 10.0, 9.0), "pair": (25.0, 30.0, 25.0)}
    for spare, winner in ((0, ("pair", 2.5, True)), (1, ("small", 4.0, True))):
        found = contest(made(rates), {"small": 1.0, "pair": 2.5}, spare)
        found.search()
        assert found.best() == winner
    assert [each.text("USD/h") for each in found.closed] == ["pair: at least 5.00 USD/h, 1 replicas; not cheaper"]


def test_only_members_that_may_be_the_cheapest_are_drawn_and_the_first_answer_is_the_lowest_draw():
    members = made({"near": (10.0, 12.0, 10.0), "lower": (10.0, 12.0, 10.0), "far": (2.0, 40.0, 2.0)})
    said: list[tuple[str, float, bool]] = []
    contest(members, {"near": 1.1, "lower": 1.0, "far": 1.0}, say=lambda *best: said.append(best)).search()
    assert "draw" not in members[2].asked and said == [("lower", 2.0, False), ("lower", 2.0, True)]


def test_a_fleet_of_which_only_bursts_are_known_closes_no_other():
    small, large = made({"small": (9.0, 10.0, 9.0), "large": (30.0, 40.0, 30.0)})
    small.bursts = large.bursts = True
    found = contest([small, large], {"small": 1.0, "large": 4.0})
    found.search()
    assert "answer" in small.asked and "answer" in large.asked and not found.closed


def test_groups_have_equal_listed_values_and_one_refused_member_where_none_starts():
    def made(gpu: str, ranks: str, starts: bool) -> Any:
        return SimpleNamespace(axis_values={"gpu": gpu, "tensor_parallel_size": ranks}, settings=starts or None)

    found = [made("l4", "1", False), made("l4", "2", False), made("h200", "1", False), made("h200", "2", True)]
    groups = groups_of(found, ["tensor_parallel_size"])
    assert groups == [[found[0]], [found[3]]]
    assert groups_of(found, ["gpu", "tensor_parallel_size"]) == [[found[3]]]
