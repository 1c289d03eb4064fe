"""A figure's document as text: what the terminal shows, and the sentences that the page shares with it."""

from __future__ import annotations

from ..reports.tables import print_payload
from .comparison import Payload
from .output import Report
from .waste import by_policy


def tell(payload: Payload, report: Report) -> None:
    """The table, what hangs on the step time, and the remarks."""
    print_payload(for_reports(payload), report.console)
    if "sensitivity" in payload:
        report.say()
        print_payload({"figure": payload["figure"], **payload["sensitivity"]}, report.console)
    report.say()
    for text in [*findings_told(payload), *payload["basis"], *payload.get("remarks", ())]:
        report.say(text)
    report.say()


def for_reports(payload: Payload) -> Payload:
    """The payload in the form that tables and pictures take."""
    if payload["figure"] == "waste":
        return payload | {"rows": by_policy(payload["rows"])}
    return payload | {"rows": [row | {"fitted": row["kind"] == "fitted"} for row in payload["rows"]]}


def findings_told(payload: Payload) -> list[str]:
    """The findings as lines that say whether they hold."""
    return [
        f"{'Holds' if found['holds'] else 'DOES NOT HOLD'}: {found['finding']}" for found in payload.get("findings", ())
    ]
