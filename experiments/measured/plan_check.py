"""``fragmeter validate --check``: compare the KV contents of a recorded plan's block tables with the expected tokens."""

from __future__ import annotations

from dataclasses import replace

from ...gpu.check.replay import Checked, check
from ...gpu.devices.devices import Device, usual_dtype
from ...gpu.model.executor import Executor
from ...sim.recording.plans import Plan
from ...sim.spec import model as model_spec
from ...sim.types.errors import SettingError, SimulationFault
from ..runs.output import Report, track

#: Layers of the model: with two, a copy that omits a layer is detected.
CHECKED_LAYERS = 2
#: Sequences that the terminal names.
MISMATCHES_SHOWN = 20


def check_plan(
    plan: Plan,
    name: str,
    device: Device,
    model: str,
    dtype: str | None,
    kv_cache_dtype: str,
    every: int,
    report: Report,
) -> None:
    """Execute the plan in caches of two layers of the model, and report the differences.

    Raises:
        SettingError: ``every`` is below 1, or the plan uses blocks outside of its pool.
        SimulationFault: A row has unexpected contents.
    """
    if every < 1:
        raise SettingError("every", every, "must be 1 or more")
    shape = replace(model_spec(model), num_layers=CHECKED_LAYERS)
    executor = Executor(plan, shape, device, dtype or usual_dtype(device), kv_cache_dtype)
    found = check(executor, every, track(range(plan.num_steps), "steps", plan.num_steps))
    report.print_line(f"{name}: {plan.meta['policy']}, {found.steps:,} steps on {device.name}", style="bold")
    _print(found, report)
    report.data({"plan": dict(plan.meta), "device": device.describe(), **found.as_dict()})
    if found.wrong_rows:
        raise SimulationFault(f"{found.wrong_rows:,} of {found.checked_rows:,} rows are not what the plan says")


def _print(found: Checked, report: Report) -> None:
    looked_at = f"{found.checked_rows:,} rows of {found.checked_steps:,} steps"
    if not found.wrong_rows:
        worst = f"attention is off by {found.worst_error:.1g} at most"
        report.print_line(f"{looked_at}: what tables hold is what sequences hold; {worst}.")
        return
    report.print_line(f"{looked_at}: {found.wrong_rows:,} are wrong. The first of each sequence:")
    for mismatch in found.mismatches[:MISMATCHES_SHOWN]:
        report.console.print(f"  {mismatch}", markup=False, soft_wrap=True)
    if len(found.mismatches) > MISMATCHES_SHOWN:
        report.print_line(f"  and {len(found.mismatches) - MISMATCHES_SHOWN} more; --json has them all")
