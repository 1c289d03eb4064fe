"""``unlisted``: the winner of a contest is that of the whole search, with fewer candidates answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.capacity.prices import Prices
from fragmeter.experiments.capacity.unlisted import Contest, groups_of

WANTED = 20.0
#: A rough rate over that of one draw.
ROUGH = 0.9


class MadeUp:
    """A planner of replicas that take made-up rates: with one draw, saturated, and in the whole test."""

    def __init__(self, rates: Mapping[str, tuple[float, float, float]], wanted: float | None, spare: int = 0) -> None:
        self.rates, self.wanted, self.spare, self.bursts = rates, wanted, spare, False
        self.answered_names: list[str] = []
        self.limited_names: list[str] = []
        self.drawn_names: list[str] = []

    def least(self, services: Iterable[str]) -> dict[str, tuple[float, int | None]]:
        return dict.fromkeys(services, (inf, None if self.wanted is None else 1))

    def limits(self, services: Sequence[str]) -> dict[str, tuple[float, int | None]]:
        self.limited_names += services
        return {each: (self.rates[each][1], self._size(self.rates[each][1])) for each in services}

    def rough_rates(self, services: Iterable[str]) -> dict[str, float]:
        return {each: self.rates[each][0] * ROUGH for each in services}

    def replicas_at(self, rate: float) -> int | None:
        return self._size(rate)

    def rough_sizes(self, near: Mapping[str, int]) -> dict[str, int | None]:
        self.drawn_names += near
        return {each: self._size(self.rates[each][0]) if self.rates[each][0] else None for each in near}

    def is_too_few(self, service: str, size: int) -> bool:
        return size < (self._size(self.rates[service][2]) or 1)

    def answered(self, services: Iterable[str]) -> dict[str, Any]:
        self.answered_names += services
        return {each: self.answer(each) for each in services}

    def answer(self, name: str) -> Any:
        rate, size = self.rates[name][2], self._size(self.rates[name][2])
        fleet = None if self.wanted is None else size
        return SimpleNamespace(
            rate=rate, full_rate=rate, replicas=size, fleet=fleet, is_burst=self.bursts, is_unsure=False
        )

    def _size(self, rate: float) -> int | None:
        return None if self.wanted is None else ceil(self.wanted / rate) if rate else 1


def candidate(name: str, gpus: int) -> Any:
    started = SimpleNamespace(launch=SimpleNamespace(num_gpus=gpus, gpu=SimpleNamespace(name=name)))
    return SimpleNamespace(name=name, num_gpus=gpus, engines=1, started=started, decode=None)


#: Highest rate with one draw and in the whole test, as shares of the saturated one; the latter may be 0.
SHARES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
CARD = st.tuples(st.floats(0.5, 40), SHARES, SHARES, st.sampled_from([1, 2, 4, 8]), st.floats(0.3, 9))


@pytest.mark.slow
@given(st.lists(CARD, min_size=2, max_size=9), st.sampled_from([(WANTED, 0), (WANTED, 1), (WANTED, 3), (None, 0)]))
def test_the_winner_is_that_of_the_whole_search(cards, asked):
    wanted, spare = asked
    names = [f"card{place}" for place in range(len(cards))]
    rates = {
        name: (most * first, most, most * whole) for name, (most, first, whole, *_) in zip(names, cards, strict=True)
    }
    members = {name: candidate(name, card[3]) for name, card in zip(names, cards, strict=True)}
    prices = Prices("here", "USD", {name: card[4] for name, card in zip(names, cards, strict=True)}, {})
    planner = MadeUp(rates, wanted, spare)
    contest = Contest(planner, members, prices, lambda *_: None)  # type: ignore[arg-type]
    contest.search()
    # The whole search: every candidate answered.
    whole = Contest(planner, members, prices, lambda *_: None)  # type: ignore[arg-type]
    whole.answers = {name: planner.answer(name) for name in names}
    costs = {name: whole.cost_of(name) for name in names}  # type: ignore[arg-type]
    found = min((contest.cost_of(each) for each in contest.answers), default=inf)
    assert found == pytest.approx(min(costs.values()))
    assert len(contest.answers) + len(contest.closed) == len(names)
    for each in contest.closed:
        assert each.at_least is None or costs[each.name] >= each.at_least * (1 - 1e-6)


def test_one_answer_closes_the_others_by_their_bounds():
    rates = {"small": (9.0, 10.0, 9.0), "large": (30.0, 40.0, 30.0)}
    planner = MadeUp(rates, WANTED)
    members = {name: candidate(name, 1) for name in rates}
    said: list[tuple[str, float, bool]] = []
    prices = Prices("here", "USD", {"small": 1.0, "large": 4.0}, {})
    contest = Contest(planner, members, prices, lambda *best: said.append(best))  # type: ignore[arg-type]
    contest.search()
    assert planner.answered_names == ["small"] and said == [("small", 3.0, False), ("small", 3.0, True)]
    assert [each.text("USD/h") for each in contest.closed] == ["large: at least 4.00 USD/h, 1 replicas; not cheaper"]


def test_spare_replicas_are_part_of_the_cost():
    """Two replicas of 2.5 become 5.0 with a spare one, and three of 1.0 become 4.0."""
    rates = {"small": (9.0, 10.0, 9.0), "pair": (25.0, 30.0, 25.0)}
    members = {name: candidate(name, 1) for name in rates}
    prices = Prices("here", "USD", {"small": 1.0, "pair": 2.5}, {})
    for spare, winner in ((0, ("pair", 2.5, True)), (1, ("small", 4.0, True))):
        contest = Contest(MadeUp(rates, WANTED, spare), members, prices, lambda *_: None)  # type: ignore[arg-type]
        contest.search()
        assert contest.best() == winner
    assert [each.text("USD/h") for each in contest.closed] == ["pair: at least 5.00 USD/h, 1 replicas; not cheaper"]


def test_only_members_that_may_be_the_cheapest_are_drawn_and_the_first_answer_is_the_lowest_draw():
    rates = {"near": (10.0, 12.0, 10.0), "lower": (10.0, 12.0, 10.0), "far": (2.0, 40.0, 2.0)}
    planner = MadeUp(rates, WANTED)
    members = {name: candidate(name, 1) for name in rates}
    said: list[tuple[str, float, bool]] = []
    prices = Prices("here", "USD", {"near": 1.1, "lower": 1.0, "far": 1.0}, {})
    Contest(planner, members, prices, lambda *best: said.append(best)).search()  # type: ignore[arg-type]
    assert "far" not in planner.drawn_names and said == [("lower", 2.0, False), ("lower", 2.0, True)]


def test_a_fleet_of_which_only_bursts_are_known_closes_no_other():
    planner = MadeUp({"small": (9.0, 10.0, 9.0), "large": (30.0, 40.0, 30.0)}, WANTED)
    planner.bursts = True
    members = {name: candidate(name, 1) for name in planner.rates}
    contest = Contest(planner, members, Prices("here", "USD", {"small": 1.0, "large": 4.0}, {}), lambda *_: None)  # type: ignore[arg-type]
    contest.search()
    assert planner.answered_names == ["small", "large"] and not contest.closed


def test_groups_have_equal_listed_values_and_one_refused_member_where_none_starts():
    def made(gpu: str, ranks: str, starts: bool) -> Any:
        return SimpleNamespace(axis_values={"gpu": gpu, "tensor_parallel_size": ranks}, settings=starts or None)

    found = [made("l4", "1", False), made("l4", "2", False), made("h200", "1", False), made("h200", "2", True)]
    groups = groups_of(found, ["tensor_parallel_size"])
    assert groups == [[found[0]], [found[3]]]
    assert groups_of(found, ["gpu", "tensor_parallel_size"]) == [[found[3]]]
