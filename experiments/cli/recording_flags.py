"""The flags of ``simulate`` that record a plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ...sim.output.files import require_writable_file
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none


class WantedPlan(NamedTuple):
    """What is to be recorded.

    Attributes:
        file: Where it goes; None for ``plan.npz`` in the folder of the results.
        first_step, num_steps, shuffle_ids: See ``sim.recording.plans.record``.
    """

    file: Path | None
    first_step: int
    num_steps: int | None
    shuffle_ids: bool

    def path(self, out: Path | None) -> Path:
        """Where it lies in the end, with results in ``out``."""
        return not_none(out) / "plan.npz" if self.file is None else self.file


def wanted_plan(
    record_plan: bool | Path | None, record_steps: str | None, shuffle_ids: bool, out: Path | None
) -> WantedPlan | None:
    """The plan that the flags ask for, if they ask for one.

    Raises:
        SettingError: There is no place for it, or nothing to record.
        UserError: The file cannot be written.
    """
    if not record_plan:
        for field, value in (("record_steps", record_steps), ("shuffle_ids", shuffle_ids)):
            if value:
                raise SettingError(field, value, "is of a recorded plan; give --record-plan")
        return None
    file = None if record_plan is True else record_plan
    if file is not None:
        require_writable_file(file)
    elif out is None:
        raise SettingError("record_plan", True, "has no place; name a file, or give --out")
    return WantedPlan(file, *_steps(record_steps), shuffle_ids)


def _steps(record_steps: str | None) -> tuple[int, int | None]:
    """First step and number of steps."""
    if record_steps is None:
        return 0, None
    found = re.fullmatch(r"(\d{1,12}):(\d{1,12})?", record_steps)
    if found is None or found[2] and not int(found[2]):
        remedy = "must be START:COUNT in whole steps, or START: for all that follow"
        raise SettingError("record_steps", record_steps, remedy)
    return int(found[1]), int(found[2]) if found[2] else None
