"""``fragmeter validate``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from ..gpu import devices
from ..sim.errors import SettingError, SimulationFault, UserError
from ..sim.plan import Plan, load
from ..sim.spec import model as model_spec
from .output import JsonTarget, Report, track

if TYPE_CHECKING:
    from ..gpu.replay import Checked

_PLAN = Group("Plan", sort_key=0)
#: A copy that leaves a layer out shows in two.
CHECKED_LAYERS = 2
#: Sequences that are named on the terminal.
MISMATCHES_SHOWN = 20


def validate(
    *,
    plan: Annotated[Path, Parameter(group=_PLAN)],
    check: Annotated[bool, Parameter(group=_PLAN, negative="")] = False,
    every: Annotated[int, Parameter(group=_PLAN)] = 1,
    device: str = "cpu",
    model: str = "toy-llama",
    dtype: str | None = None,
    json: JsonTarget = None,
) -> None:
    """Carry out on a device what was simulated, with the simulator's own block tables, and compare.

    Args:
        plan: A recorded plan, from fragmeter simulate --record-plan.
        check: Hold attention over the plan's tables, and what these hold, to what its sequences hold. Exit status 1
            where they differ.
        every: Look at every so many steps only; all are carried out.
        device: cpu; shim, the kernels' CPU build, slow; cuda, or cuda: and a number.
        model: Whose heads the caches have, in two layers.
        dtype: Of keys and values: fp32, fp16 or bf16. By default fp16 on a GPU, fp32 elsewhere.
    """
    report = Report(json)
    recorded = _loaded(plan)
    found = _checked(recorded, device, model, dtype, every)
    report.say(f"{plan.name}: {recorded.meta['policy']}, {found.steps:,} steps on {device}", style="bold")
    _tell(found, report)
    report.data({"plan": dict(recorded.meta), "device": device, **found.as_dict()})
    if found.wrong_rows:
        raise SimulationFault(f"{found.wrong_rows:,} of {found.checked_rows:,} rows are not what the plan says")


def _loaded(path: Path) -> Plan:
    try:
        return load(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from None


def _checked(plan: Plan, device: str, model: str, dtype: str | None, every: int) -> Checked:
    if every < 1:
        raise SettingError("every", every, "must be 1 or more")
    opened = devices.open(device)
    # These need torch, whose absence the device has told by now.
    from ..gpu.executor import Executor
    from ..gpu.replay import check

    shape = replace(model_spec(model), num_layers=CHECKED_LAYERS)
    executor = Executor(plan, shape, opened, dtype or ("fp16" if opened.torch_device.type == "cuda" else "fp32"))
    return check(executor, every, track(range(plan.num_steps), "steps", plan.num_steps))


def _tell(found: Checked, report: Report) -> None:
    looked_at = f"{found.checked_rows:,} rows of {found.checked_steps:,} steps"
    if not found.wrong_rows:
        worst = f"attention is off by {found.worst_error:.1g} at most"
        report.say(f"{looked_at}: what tables hold is what sequences hold; {worst}.")
        return
    report.say(f"{looked_at}: {found.wrong_rows:,} are wrong. The first of each sequence:")
    for mismatch in found.mismatches[:MISMATCHES_SHOWN]:
        report.console.print(f"  {mismatch}", markup=False, soft_wrap=True)
    if len(found.mismatches) > MISMATCHES_SHOWN:
        report.say(f"  and {len(found.mismatches) - MISMATCHES_SHOWN} more; --json has them all")
