"""Plans of one command: one, or for loads with different models one each, whose bills are added.

A vLLM server loads one model, so models share no replica: cards are divided among them, and the cheapest fleets together are the
cheapest of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...sim.output.folders import OutputFolder
from ..runs.output import Report
from ..runs.parallel import Workers
from .chance import all_enough
from .page import PLAN
from .plan import Plan
from .request import Aims, PlanRequest
from .search import search
from .text import percent_text, purchase


def plans(
    aims: Aims, requests: Sequence[PlanRequest], workers: Workers, out: Path | None, report: Report
) -> dict[str, Any]:
    """Find and report the plan of each request, one or one for each model, and return the data.

    Raises:
        UserError: An invalid input.
    """
    if len(requests) == 1:
        folder = None if out is None else OutputFolder(out, PLAN)
        return search(aims, requests[0], workers, folder, report).write(report, folder)
    folders = {
        each.line.model: None if out is None else OutputFolder(out / each.line.model.replace("/", "--"), PLAN)
        for each in requests
    }
    found = {each.line.model: search(aims, each, workers, folders[each.line.model], report) for each in requests}
    text = together(found)
    report.print_line(text)
    documents = {}
    for model, plan in found.items():
        report.print_line()
        report.print_line(f"{model}:")
        documents[model] = plan.write(report, folders[model])
    return {"recommendation": text, "plans": documents}


def together(plans: Mapping[str, Plan]) -> str:
    """One sentence: what to buy for all models, and the bill and the probability of all at once."""
    found = {model: plan.best for model, plan in plans.items()}
    missing = [model for model, best in found.items() if best is None]
    if missing:
        return f"No fleet is known for {' and '.join(missing)}: the plan of each model follows."
    bests = [best for best in found.values() if best is not None]
    parts = [f"{purchase(*best)} for {model}" for model, best in found.items() if best is not None]
    currencies = {plan.currency for plan in plans.values()}
    bill = ""
    if len(currencies) == 1:
        bill = f": {sum(bill.per_hour for _, bill in bests):,.2f} {currencies.pop()}/h together"
    chances = [each.fleet.chance for each, _ in bests if each.fleet is not None and each.fleet.chance is not None]
    sure = f" (all enough with {percent_text(all_enough(chances))})" if len(chances) == len(bests) else ""
    return f"Buy {', '.join(parts)}{sure}{bill}. Each model has a fleet of its own, as a vLLM server loads one."
