"""``fragmeter check-policy``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ...sim.output.files import write_whole
from ...sim.policy.registry import policy
from ...sim.policy.stamps import stamp
from ...sim.types.bounds import Count, Seed
from ...sim.types.errors import UserError, user_paths
from ...sim.types.plugins import is_plugin
from ..runs.output import JsonTarget, Report
from ..runs.policy_check import check_policy as checks


def check_policy(
    name: Annotated[str, Parameter(name="POLICY")], /, *, loads: Count = 10, seed: Seed = 0, json: JsonTarget = None
) -> None:
    """Check that the leaps of a policy are what its steps are, on drawn loads under every option that it declares.

    A policy that passes is not checked in later runs, until it or fragmeter changes.

    Args:
        name: package.module:ClassName, or the name of a policy.
        loads: Loads for the defaults, and for each option.
        seed: Seed of the draws.
    """
    report, kind = Report(json), policy(name)
    served: dict[str, int] = {}
    refused: dict[str, str] = {}
    for found in checks(name, loads, seed):
        option = found.option or "defaults"
        if found.chosen is None:
            refused[option] = found.why
        else:
            served[option] = served.get(option, 0) + 1
    for option, count in served.items():
        report.line(f"{option}: {count} loads, each step by step and with leaps, are the same")
    unread = {option: why for option, why in refused.items() if option not in served}
    report.data({"policy": name, "served": served, "unread": unread})
    for option, why in unread.items():
        remedy = "give its Field examples that a load reads"
        raise UserError(
            f"{option}: no drawn load reads it ({why or 'no other value than the default is known'}); {remedy}"
        )
    if is_plugin(kind):
        path = stamp(kind)
        with user_paths(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, "")
        report.point_to("stamp", path)
