"""The load and the questions of ``fragmeter plan --ask``, from its flags."""

from __future__ import annotations

from typing import Any

from ...sim import Settings
from ...sim.engine.unread import only_read
from ...sim.types.errors import SettingError
from ...traces import Pacing, Reading, Trace
from ..runs.inputs import Inputs, Requests
from ..runs.output import Report
from ..runs.trace_flags import left_out_lines
from ..runs.unread import LOAD_FIELDS, refuse_unread
from .questions import SAMPLES, Subject, answer, questions

Flags = tuple[Requests, Reading, Pacing]
NO_FLAGS: Flags = (Requests(), Reading(), Pacing())


def questions_of(ask: str | None, flags: Flags) -> list[str]:
    """The questions by name.

    Raises:
        SettingError: A question is unknown, or a load is given without a question.
    """
    if ask is None and flags != NO_FLAGS:
        remedy = "is missing: flags of a load are given without a question about it; give --ask, or leave them out"
        raise SettingError("ask", None, remedy)
    return [] if ask is None else questions(ask)


def subject_of(settings: Settings, mean_tokens: int | None, flags: Flags) -> tuple[Subject, Trace | None]:
    """The subject of the questions, and the source of its requests; None for the source if only a length is given.

    Raises:
        UserError: The load cannot be read or made, or no question reads one of its flags.
    """
    requests, reading, pacing = flags
    if flags == NO_FLAGS:
        return Subject(settings, None, mean_tokens), None
    inputs = Inputs(settings=settings, requests=requests, reading=reading, pacing=pacing)
    lengths = inputs.lengths()
    work = inputs.workload(lengths)
    refuse_unread([(inputs, work)], LOAD_FIELDS)
    return Subject(only_read(settings, work), work, mean_tokens, requests.n or SAMPLES), lengths


def answers(names: list[str], subject: Subject, trace: Trace | None, report: Report) -> dict[str, Any]:
    """Answer the questions; empty without a question.

    Raises:
        UserError: A question does not apply to the load.
    """
    if not names:
        return {}
    for text in left_out_lines(trace):
        report.print_line(text)
    return answer(names, subject, report)
