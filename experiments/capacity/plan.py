"""A finished plan, as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from ... import __version__
from ...reports.explore.what_if import WhatIf
from ...sim.cluster import Cluster
from ...sim.output.folders import OutputFolder
from ...sim.types.optional import not_none
from ..measured.evidence import drafts_lines, engines_lines, evidence, evidence_lines
from ..runs.output import Report
from .answer import Answer, Bill, ranked
from .candidates import CHECKPOINT
from .confidence import CONFIDENCE, CONTENT, NUM_SEEDS, allowed_misses
from .day import DayPlan
from .day_text import day_lines, day_table
from .least import least_headline
from .load import Load
from .manifest import FILES, loadable, manifest
from .measurement import measured_text, next_measurement
from .page import write_plan
from .planning import Planner
from .prices import Prices
from .request import Aims, PlanRequest
from .text import (
    EVERY_RATE,
    candidates_table,
    cheaper_text,
    details,
    flags_text,
    headline,
    pair_lines,
    served_at_rate,
    why_loses,
    why_none,
)
from .uncertainty import uncertainty
from .what_if import MOST_OFFERS, changed_lengths, what_if


class Plan:
    """The answers of a plan.

    Attributes:
        recommendation: The first line.
    """

    def __init__(
        self, aims: Aims, request: PlanRequest, planner: Planner, priced: Prices, answers: Sequence[Answer],
        day: DayPlan | None = None,
    ) -> None:  # fmt: skip
        self._model, self._request, self._aims = request.model or request.line.model, request, aims
        self._planner, self._priced, self._answers, self._day = planner, priced, answers, day
        question = planner.question
        self._goal, self._load, self._wanted = question.goal, question.load, question.wanted
        self._ranks = ranked(answers, self._load, priced, self._wanted, question.spare)
        priced_answers = [answer for answer, _ in self._ranks]
        # Candidates that can serve come first.
        self._others = sorted(
            (answer for answer in answers if answer not in priced_answers), key=lambda each: not each.every_rate_meets
        )
        self.recommendation = self._recommendation()

    @property
    def currency(self) -> str:
        """That of its bills."""
        return self._priced.currency

    @property
    def best(self) -> tuple[Answer, Bill] | None:
        """The recommended candidate; None if there is none."""
        return self._ranks[0] if self._ranks else None

    def write(self, report: Report, out: OutputFolder | None) -> dict[str, Any]:
        """Report the recommendation, the table and the requested details; write the page and the data, and return these."""
        currency = self._priced.currency
        if self._request.line.uncounted_names:
            report.print_line(f"Without {', '.join(self._request.line.uncounted_names)}, not counted:")
        report.print_line(self.recommendation)
        report.print_line()
        report.console.print(candidates_table(self._ranks, self._others, currency, self._wanted))
        about = details(self._ranks, self._goal, self._wanted, currency) if self._ranks else []
        about += self._measurements()
        if about:
            report.print_line()
        for line in about:
            report.line(line)
        explained = self._explained()
        for line in explained if self._aims.explain or not self._ranks else ():
            report.line(line)
        for line in self._closed_lines() + self._pair_lines():
            report.line(line)
        if self._day is not None:
            report.print_line()
            report.console.print(day_table(self._day))
            for line in day_lines(self._day, currency):
                report.print_line(line)
        document = self._document(about, explained)
        assumptions = [f"Requests: {self._load.source()}.", *self._assumptions()]
        report.print_line()
        for line in assumptions:
            report.print_line(line)
        if out is not None:
            page = write_plan(out, document, self._ranks, assumptions, self._what_if(), self._day)
            report.point_to("Plan", page)
            if self._aims.deploy is not None and self._ranks:
                name, version = FILES[self._aims.deploy], self._ranks[0][0].candidate.started.line.version
                out.write(name, manifest(self._aims.deploy, *self._ranks[0], loadable(self._model), version).encode())
                report.point_to("Manifest", out.path / name)
        return document

    def _what_if(self) -> WhatIf | None:
        """Of the first fleets that are enough; None without a wanted rate, or without any."""
        sure = [
            each
            for each in self._ranks
            if not each[0].is_burst and not each[0].is_unsure and each[0].candidate.decode is None
        ]
        if self._wanted is None or not sure:
            return None
        ranks = sure[:MOST_OFFERS]
        rates = self._planner.changed([answer for answer, _ in ranks], changed_lengths(self._load))
        return what_if(ranks, rates, self._load, self._goal, self._wanted, self._aims.confidence, self._priced)

    def _measurements(self) -> list[str]:
        """What a benchmark says of the step times, or the measurement that would narrow the answer most."""
        if not self._ranks:
            return []
        (best, _), given = self._ranks[0], self._aims.measured
        if given is not None:
            return [measured_text(best.candidate, given)]
        return next_measurement(best, uncertainty(best.candidate), self._aims.confidence)

    def _closed_lines(self) -> list[str]:
        """The candidates that cannot be cheaper: how many, or with ``explain`` each."""
        closed = [each for contest in self._planner.contests for each in contest.closed]
        if not closed:
            return []
        unit = f"{self._priced.currency}/h{'' if self._wanted else ' for 1 request/s'}"
        nearest = min((each.at_least for each in closed if each.at_least is not None), default=None)
        if self._aims.explain:
            return [each.text(unit) for each in closed]
        has_formats = any(CHECKPOINT in answer.candidate.axis_values for answer in self._answers)
        parts = "card, ranks and checkpoint" if has_formats else "card and ranks"
        costs = "" if nearest is None else f", which cost {nearest:,.2f} {unit} or more, or"
        return [
            f"Not answered: {len(closed)} other combinations of {parts} that start{costs or ', which'} miss the goal with"
            " requests served alone (--explain has each)."
        ]

    def _pair_lines(self) -> list[str]:
        """Pairs of prefill and decode that were tried and are not cheaper."""
        currency, lines = self._priced.currency, []
        for contest in self._planner.contests:
            pairs, nearest = contest.closed_pairs, contest.nearest_pair
            if self._aims.explain:
                lines += [f"{name}: {_pair_cost(cost, currency)}; not cheaper" for name, cost in pairs.items()]
            elif pairs:
                name, cost = min(pairs.items(), key=lambda each: each[1])
                others = f"Of {len(pairs)} pairs of prefill and decode apart that are not cheaper the nearest is"
                lines.append(f"{others} {name}, {_pair_cost(cost, currency)}.")
            if not contest.pairs and nearest is not None:
                about = f"{nearest.candidate.name}, about {nearest.cost:,.2f} {currency}/h"
                lines.append(
                    f"Prefill and decode apart are not cheaper by a few step times: the nearest pair is {about}."
                )
        return lines

    def _recommendation(self) -> str:
        unpriced = [answer.candidate.name for answer in self._others if answer.every_rate_meets]
        beside = f"Of {', '.join(unpriced)} {EVERY_RATE}. For a price give more requests a run (--num-prompts)."
        if self._ranks:
            text = headline(*self._ranks[0], self._wanted, self._priced.currency)
            cheaper = "" if self._wanted is None else cheaper_text(self._ranks, self._priced.currency)
            return " ".join(filter(None, (text, cheaper, beside if unpriced else "")))
        if unpriced:
            return beside
        if bounds := [answer for answer in self._answers if answer.is_too_large]:
            return least_headline(bounds, self._priced)
        tried = [answer for answer in self._answers if answer.found]
        if not tried:
            return "Buy none of these: no candidate has a rate; the reasons follow."
        best = max(tried, key=lambda answer: answer.rates.alone.attained)
        return f"Buy none of these. The nearest, {best.candidate.name}: {why_none(best, self._goal)}."

    def _explained(self) -> list[str]:
        lines = [
            f"{answer.candidate.name}: {why_loses(answer, bill, self._ranks[0], self._wanted, self._priced.currency)}"
            for answer, bill in self._ranks[1:]
        ]
        equal = [
            f"{name}: the same fleet as {answer.candidate.name}" for answer, _ in self._ranks for name in answer.equal
        ]
        return lines + equal + [f"{answer.candidate.name}: {why_none(answer, self._goal)}" for answer in self._others]

    def _assumptions(self) -> list[str]:
        load = self._load
        wanted = "no rate is asked for" if self._wanted is None else f"{self._wanted:.3g} requests/s wanted"
        chosen = [
            (each.candidate.settings, served_at_rate(each).load) for each in self._answers if each.candidate.settings
        ]
        counts = load.num_prompts(), *(self._load_of(each).num_prompts(each.replicas) for each, _ in self._ranks)
        runs = " to ".join(f"{count:,}" for count in dict.fromkeys((min(counts), max(counts))))
        return [
            f"Load: {load.description()}; {wanted}; {runs} requests a run, of which the middle 80% count; {self._seeds()}",
            *evidence_lines(chosen),
            *[_MOVES] * any(answer.candidate.decode is not None for answer in self._answers),
            *dict.fromkeys(
                line for each, _ in chosen for line in (*engines_lines(each, planned=True), *drafts_lines(each))
            ),
            self._priced.line(),
        ]

    def _load_of(self, answer: Answer) -> Load:
        return self._planner.load_of(not_none(answer.candidate.settings))

    def _seeds(self) -> str:
        seeds = not_none(self._aims.seeds)
        if seeds == 1:
            return "one seed; its result says nothing about other seeds."
        most = max(seeds, NUM_SEEDS)
        if self._ranks and self._ranks[0][0].is_burst:
            return (
                f"{seeds} to {most} seeds. The runs are bursts, and say nothing sure of a load that lasts: give more requests"
                " (--num-prompts)."
            )
        if self._wanted is None:
            return f"{most} seeds. A rate is recommended that {CONTENT:.0%} of other seeds take, with {CONFIDENCE:.0%} confidence."
        chances = [
            answer.fleet.chances for answer, _ in self._ranks if answer.fleet is not None and answer.fleet.chances
        ]
        if chances:
            about = self._ranks[0][0].candidate
            return (
                f"{len(chances[0][0].by_draw)} draws with the step times and the KV caches that they may have: {uncertainty(about).text()}."
                f" A fleet is recommended that is enough with {self._aims.confidence:.0%} or more. Fleets are simulated behind their router."
            )
        short = any(self._load_of(answer).is_short(answer.replicas) for answer, _ in self._ranks)
        return (
            f"{seeds} to {most} seeds. A fleet is recommended with which {CONTENT:.0%} of other seeds meet the goal,"
            f" with {CONFIDENCE:.0%} confidence: at most {allowed_misses(most)} of {most} seeds misses it. Fleets are simulated"
            " behind their router."
            + " Runs with fewer requests than the default (--num-prompts) may overstate it: few of them have the rare long requests."
            * short
        )

    def _document(self, about: Sequence[str], explained: Sequence[str]) -> dict[str, Any]:
        bills = {answer.candidate.name: bill for answer, bill in self._ranks}
        return {
            "fragmeter": __version__,
            "requests_sha256": self._load.draw(self._aims.seed).at(1.0).sha256(),
            "recommendation": self.recommendation,
            "details": list(about),
            "recommended": self._ranks[0][0].candidate.axis_values if self._ranks else None,
            "flags": flags_text(self._ranks[0][0]) if self._ranks else None,
            **({"serve": lines} if self._ranks and (lines := pair_lines(self._ranks[0][0], self._model)) else {}),
            "model": self._model,
            "goal": {
                "goodput": self._goal.objectives.limits,
                "attainment": self._goal.attainment,
                **({"loads": {name: each.limits for name, each in self._goal.loads}} if self._goal.loads else {}),
            },
            "load": self._load.description(),
            "requests": self._load.source(),
            "wanted_request_rate": self._wanted,
            "num_prompts": self._load.num_prompts(),
            "seeds": self._aims.seeds,
            "seed": self._aims.seed,
            "currency": self._priced.currency,
            "prices": self._priced.as_dict(),
            "gpus_without_price": list(self._priced.missing),
            "explained": list(explained),
            **({"not_cheaper": closed} if (closed := self._closed()) else {}),
            **({"pairs_not_cheaper": pairs} if (pairs := self._closed_pairs()) else {}),
            **({} if self._day is None else {"day": self._day.as_dict()}),
            "candidates": [_data(answer, bills.get(answer.candidate.name)) for answer in self._by_rank()],
        }

    def _closed(self) -> list[dict[str, Any]]:
        return [asdict(each) for contest in self._planner.contests for each in contest.closed]

    def _closed_pairs(self) -> dict[str, float | None]:
        return {
            name: _finite(cost) for contest in self._planner.contests for name, cost in contest.closed_pairs.items()
        }

    def _by_rank(self) -> list[Answer]:
        return [answer for answer, _ in self._ranks] + self._others


#: Of fleets with prefill and decode apart.
_MOVES = (
    f"Prefill and decode apart: KV caches move by NixlConnector at {Cluster.kv_transfer_bandwidth:g} GB/s from each replica that"
    f" prefills, to the decode replica with the fewest tokens ({Cluster.decode_router})."
)


def _pair_cost(cost: float, currency: str) -> str:
    return "no fleet serves the first draw" if cost == inf else f"{cost:,.2f} {currency}/h by draws"


def _finite(rate: float) -> float | None:
    """A rate as JSON data: None if it is infinite."""
    return None if rate == inf else rate


def _data(answer: Answer, bill: Bill | None) -> dict[str, Any]:
    """All data of a candidate."""
    candidate, found = answer.candidate, answer.found
    data: dict[str, Any] = {"candidate": candidate.axis_values, "refused": candidate.refused, "error": answer.error}
    if candidate.settings is not None:
        pool = candidate.started.pool()
        data |= {
            "settings": candidate.settings.as_dict(),
            "evidence": evidence(candidate.settings, served_at_rate(answer)).as_dict(),
            "memory": asdict(pool.stage),
            "kv_cache_tokens": pool.num_tokens,
        }
    if found is not None:
        data |= {
            "request_rate": _finite(answer.rate),
            "every_rate_meets": answer.every_rate_meets,
            "seed_rates": [_finite(each) for each in found.seed_rates],
            "spread": found.spread,
            "saturated_request_rate": found.saturated,
            "attained_alone": found.alone.attained,
        }
    if answer.least_replicas is not None:
        data["least_replicas"] = answer.least_replicas
    if answer.prefill_replicas is not None:
        data["prefill_replicas"] = answer.prefill_replicas
    if answer.fleet is not None:
        rates = [_finite(each) for each in answer.fleet.rates]
        data["fleet"] = asdict(answer.fleet) | {"rates": rates, "sure_rate": _finite(answer.fleet.sure_rate)}
    if answer.known_rates is not None:
        data["known_rates"] = [_finite(each) for each in answer.known_rates]
    data |= ({} if answer.detail is None else answer.detail.as_dict()) | (
        {} if bill is None else {"bill": asdict(bill)}
    )
    return data
