"""What a load would cost if its rate, its lengths or the objectives were others: the sliders on the page of a plan.

    changed     a replica serves up to ``MOST_REQUESTS`` of the first seed's requests, with prompts or outputs times a factor: its highest
                rate (``max_rate``) for the objectives times each factor, which share their runs
    relative    the factor on the wanted rate, times that rate with nothing changed over that with the change
    margin      the rate that the plan's fleet takes for sure, over the wanted one; where the fleet has a probability, step times are the
                decisive ones, as for the smaller fleets of a day
    replicas    with a change for the worse no fewer than those of the plan, and as many as serve the wanted rate if the margin is
                proportional to their number; with one for the better as many as before times the relative rate, rounded up

With nothing changed they are the plan's own. Lengths change one at a time, which takes five searches a candidate. More of a length is not
always worse: of fewer output tokens one prefill delays a larger share, so a tail of TPOT may rise as answers become shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf, log

import numpy as np

from ...reports.explore.axis import Axis
from ...reports.explore.what_if import NO_RATE, NOT_KNOWN, Offer, WhatIf
from ...sim import Settings, simulate
from ...sim.types.optional import not_none
from ..runs.slo_check import Goal, SloCheck, check_run, compiled_cost, saturated_rate
from .answer import Answer, Bill
from .fleet import first_fleet
from .load import Drawn, Load
from .max_rate import MOST, STEP, highest, rate
from .prices import GPU_HOURS, Prices
from .uncertainty import uncertainty

#: Factors on the wanted rate, on the objectives, and on a mean length.
RATES, OBJECTIVES, LENGTHS = (
    (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0),
    (0.5, 0.75, 1.0, 1.5, 2.0),
    (0.5, 1.0, 2.0),
)
#: Candidates of the page, and requests of their runs.
MOST_OFFERS, MOST_REQUESTS = 3, 2000
#: First stride of a search, in exponents of ``STEP``.
_STRIDE = 8
#: Factors on prompts and on outputs.
Lengths = tuple[float, float]
#: The rates of a candidate by lengths, and by ``OBJECTIVES``; None of one that is not known.
Rates = Mapping[Lengths, Sequence[float | None] | None]
_PLANNED: Lengths = (1.0, 1.0)


def changed_lengths(load: Load) -> list[Lengths]:
    """The lengths that are tried, those of the plan first. Requests that share prefixes have no others: what they share would be
    others'."""
    factors = [each for each in LENGTHS if each != 1 and not load.keeps_order]
    return [_PLANNED, *((each, 1.0) for each in factors), *((1.0, each) for each in factors)]


def changed_rates(
    settings: Settings, load: Load, goal: Goal, seed: int, prompts: float, outputs: float, near: float
) -> list[float | None]:
    """The highest rates of a replica with other lengths, requests/s, for each of ``OBJECTIVES``; None where every rate meets them.

    Args:
        near: Where to begin, requests/s.

    Raises:
        UserError, SimulationFault: As ``simulate``.
    """
    drawn = _scaled(load.draw(seed), prompts, outputs)
    cost = compiled_cost(settings)
    goals = [goal.scaled(factor) for factor in OBJECTIVES]
    most = saturated_rate(settings, drawn.at(inf), cost)

    @cache
    def checks(power: int) -> list[SloCheck]:
        run = simulate(settings, drawn.at(rate(power)), cost, logs_contents=False)
        return [check_run(run, each) for each in goals]

    start, rates = round(log(near) / log(STEP)), list[float | None]()
    for place in range(len(goals)):

        def meets(power: int, place: int = place) -> bool:
            return (most is None or rate(power) <= most) and checks(power)[place].meets

        found = highest(meets, start, _STRIDE)
        rates.append(0.0 if found is None else None if found == MOST else rate(found))
        start = start if found in (None, MOST) else not_none(found)
    return rates


def what_if(
    ranks: Sequence[tuple[Answer, Bill]],
    rates: Sequence[Rates],
    load: Load,
    goal: Goal,
    wanted: float,
    confidence: float,
    prices: Prices,
) -> WhatIf:
    """The sliders of candidates of a plan for a wanted rate, in requests/s.

    Args:
        rates: Of each candidate.
    """
    states = [*product(RATES, range(len(OBJECTIVES)), changed_lengths(load))]
    offers = []
    for (answer, bill), known in zip(ranks, rates, strict=True):
        margin, spare = _margin(answer, wanted, confidence), bill.replicas - answer.replicas
        serving = [
            _replicas(answer, margin, factor, _relative(known, lengths, place)) for factor, place, lengths in states
        ]
        replicas = [each + spare if each > 0 else each for each in serving]
        launch = answer.candidate.started.launch
        hour = launch.num_gpus * prices.of(launch.gpu.name)
        offers.append(Offer(answer.candidate.name, launch.gpu.name, launch.num_gpus, hour, replicas))
    return WhatIf(_axes(load, goal, wanted), offers, None if prices.currency == GPU_HOURS else prices.currency)


def _relative(rates: Rates, lengths: Lengths, objectives: int) -> float | int:
    """The rate with nothing changed over that with a change; or why there is none, as ``Offer.replicas``."""
    planned = OBJECTIVES.index(1.0)
    if lengths == _PLANNED and objectives == planned:
        return 1.0
    own, changed = rates.get(_PLANNED), rates.get(lengths)
    if own is None or changed is None:
        return NOT_KNOWN
    before, after = own[planned], changed[objectives]
    if not before or after is None:
        return NOT_KNOWN
    return before / after if after else NO_RATE


def _axes(load: Load, goal: Goal, wanted: float) -> list[Axis]:
    prompt, output = load.mean_tokens
    limits = goal.objectives.limits
    objectives = tuple("/".join(_text(limit * factor) for limit in limits.values()) for factor in OBJECTIVES)
    if goal.loads:
        objectives = tuple(f"{factor:g} x" for factor in OBJECTIVES)
    about, start = f"Objectives of {goal.attainment:.0%} of the requests.", OBJECTIVES.index(1.0)
    rates, lengths = tuple(_text(wanted * factor) for factor in RATES), LENGTHS.index(1.0)
    axes = [
        Axis("request_rate", "Request rate", "requests/s", "How often requests arrive.", rates, RATES.index(1.0), True),
        Axis("objectives", "/".join(map(str.upper, limits)), "ms", about, objectives, start, True),
    ]
    for name, label, text, mean in (
        ("input_len", "Prompt length", "Mean of the prompts.", prompt),
        ("output_len", "Answer length", "Mean of the outputs.", output),
    ):
        if not load.keeps_order:
            axes.append(
                Axis(name, label, "tokens", text, tuple(_text(mean * each) for each in LENGTHS), lengths, False)
            )
    return axes


def _text(value: float) -> str:
    """Three digits, and all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _scaled(drawn: Drawn, prompts: float, outputs: float) -> Drawn:
    """The first requests, with lengths times factors, at least one token each."""
    drawn = drawn.first(min(MOST_REQUESTS, len(drawn.gaps)))
    if (prompts, outputs) == _PLANNED:
        return drawn
    prompt_tokens, output_tokens = (
        np.maximum(1, np.round(column * factor)).astype(np.int64)
        for column, factor in ((drawn.trace.prompt_tokens, prompts), (drawn.trace.output_tokens, outputs))
    )
    ignores = drawn.trace.ignore_eos
    limit = None if ignores is None or not ignores.all() else output_tokens
    trace = replace(
        drawn.trace,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=limit,
        ignore_eos=None if limit is None else ignores,
    )
    return replace(drawn, trace=trace, max_tokens=None)


def _margin(answer: Answer, wanted: float, confidence: float) -> float:
    """The rate that the fleet takes for sure, over the wanted one, at least 1."""
    fleet = not_none(answer.fleet)
    sure = min((fleet.sure_rate, *(answer.known_rates or ())))
    if fleet.chance is not None:
        sure /= max(1.0, uncertainty(answer.candidate).decisive(confidence))
    return max(1.0, sure / wanted) if sure < inf else 1.0


def _replicas(answer: Answer, margin: float, factor: float, relative: float) -> int:
    """Those of a state, from the factor on the wanted rate and the relative rate of its changes."""
    if relative < 0:
        return int(relative)
    return changed_replicas(answer.replicas, answer.candidate.engines, factor * relative, margin)


def changed_replicas(replicas: int, engines: int, times: float, margin: float) -> int:
    """Replicas of a fleet that has to take so many times the rate, in multiples of the engines that share experts.

    A search may find a rate some per mil higher with a change for the worse, or lower with one for the better: neither turns it round.
    """
    needed = engines * first_fleet(replicas * times, engines * margin if times > 1 else engines)
    return max(replicas, needed) if times > 1 else min(replicas, needed)
