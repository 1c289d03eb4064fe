"""``fragmeter validate``."""

from __future__ import annotations

import gc
import json as json_module
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from ...gpu.devices import devices
from ...gpu.devices.devices import Device
from ...sim.cost.calibration import read
from ...sim.output.files import as_json, require_apart, require_writable_file, write_whole
from ...sim.output.folders import FolderKind, OutputFolder
from ...sim.recording.plans import Plan, load
from ...sim.spec import model as model_spec
from ...sim.spec.deployment import dtype_bits
from ...sim.types.bounds import Seed
from ...sim.types.errors import SettingError, UserError
from ...sim.types.optional import not_none
from ..runs.inputs import named_files
from ..runs.output import RESULTS, JsonTarget, Report, track
from ..runs.unread import refuse_flags
from .replica_flags import REPLICA, ReplicaFlags

if TYPE_CHECKING:
    from ...gpu.model.skeleton import Skeleton

_PLAN = Parameter(group=Group("A recorded plan", sort_key=0))
_DEVICE = Parameter(group=Group("Device", sort_key=1))
_SERVER = Parameter(group=Group("A real server", sort_key=2))
SCHEMA_VERSION = 1
VALIDATION = FolderKind("validation", ("validation.json", "steps.csv", "calibration.json"))


def validate(
    *,
    plan: Annotated[Path | None, _PLAN] = None,
    check: Annotated[bool, Parameter(group=_PLAN.group, negative="")] = False,
    every: Annotated[int | None, _PLAN] = None,
    device: Annotated[str | None, _DEVICE] = None,
    calibration: Annotated[Path | None, _DEVICE] = None,
    model: Annotated[str | None, _DEVICE] = None,
    dtype: Annotated[Literal["fp32", "fp16", "bf16"] | None, _DEVICE] = None,
    quick: Annotated[bool, Parameter(group=_DEVICE.group, negative="")] = False,
    predict: Annotated[Path | None, _DEVICE] = None,
    seed: Annotated[Seed | None, _DEVICE] = None,
    against: Annotated[Path | None, _SERVER] = None,
    metrics: Annotated[Path | None, _SERVER] = None,
    serve: Annotated[str | None, _SERVER] = None,
    vllm: Annotated[str | None, _SERVER] = None,
    startup_log: Annotated[str | None, _SERVER] = None,
    save_server: Annotated[Path | None, _SERVER] = None,
    replica: REPLICA = ReplicaFlags(),
    out: Annotated[Path | None, RESULTS] = None,
    json: JsonTarget = None,
) -> None:
    """Compare the simulation with a device, or with a benchmark of a real server.

    On a device: runs of several policies and loads are predicted from a calibration and replayed step by step, with the
    simulator's block tables, through a model with random weights, beside null models fitted to the same calibration. With
    --against: the requests of a benchmark are simulated, and the setting to calibrate first is found by trial.

    Args:
        plan: Recorded plan, from fragmeter simulate --record-plan. Only its steps are timed or checked.
        check: Compare attention over the plan's block tables, and their contents, with the tokens of each sequence.
            Exit status 1 if they differ.
        every: Check only every n-th step. By default all; the moves and writes of all steps are carried out.
        device: cpu (default), cuda, or cuda:N. To check a plan also shim: the CPU build of the kernels, slow.
        calibration: Calibration that predicts the step times, from fragmeter calibrate. By default the device is
            calibrated first. On a GPU its whole steps are measured again beside the runs.
        model: Preset, org/name on the Hugging Face hub, or path of a config.json or its folder. By default toy-llama; on a
            GPU llama-3.1-8b, with less than 60 GB llama-3.2-3b, with less than 30 GB llama-3.2-1b; for timing a plan the
            plan's model; for checking a plan toy-llama; for a server the model that the benchmark names.
        dtype: Number format of weights and KV. By default the calibration's; fp16 on a GPU, fp32 elsewhere.
        quick: Short runs, for a first try.
        predict: File for predictions of requests/s, TPOT, TTFT and preemptions by --calibration, written before the device runs.
            Then static, orca-max and vllm-sosp23 serve these requests on the device's own clock.
        seed: Seed of requests, block tables and weights, by default 1. It does not affect the calibration.
        against: Result file of vllm bench serve --save-result, SGLang's bench_serving, AIPerf, GuideLLM, inference-perf or
            InferenceX. Single requests are compared where it has them (--save-detailed, --output-details).
        metrics: File with the server's /metrics: one scrape, or several in sequence.
        serve: Command line of the server as pasted into a shell, or a file with it. Flags of this command override it.
        vllm: Release of the server, such as 0.16. By default the one in the container's tag, or the latest known
            release.
        startup_log: Start-up log of the server, or a file with it; sets the size of the KV cache.
        save_server: File for the server's constants, fitted to this benchmark: an argument of --server, here and of simulate,
            sweep, compare and plan.
        out: Folder for the report, the steps of every run and the calibration; for a server, its requests, simulated
            beside measured.
    """
    report = Report(json)
    if against is not None:
        of_device = {"device": device, "calibration": calibration, "dtype": dtype, "quick": quick, "predict": predict}
        remedy = "has no effect with --against; leave it out"
        refuse_flags(remedy, plan=plan, check=check, every=every, **of_device)
        from ..measured.run import AGAINST, validate_against
        from ..measured.start import Server

        given = replica.given() | ({} if seed is None else {"seed": seed})
        read = named_files(
            against=against, metrics=metrics, serve=serve, model=model, startup_log=startup_log, given=replica
        )
        require_apart({"out": out, "json": json, "save_server": save_server}, read)
        folder = None if out is None else OutputFolder(out, AGAINST)
        server = Server(serve, model, replica.gpu, vllm, startup_log, given)
        validate_against(against, metrics, server, folder, report, save_server)
        return
    kept = _kv_cache_dtype(replica.kv_cache_dtype)
    remedy = "applies only to a real server; give its benchmark by --against"
    refuse_flags(f"{remedy}; fragmeter diagnose reads metrics alone", metrics=metrics)
    of_a_server = replica.given() | {"kv_cache_dtype": None}
    refuse_flags(remedy, serve=serve, vllm=vllm, startup_log=startup_log, save_server=save_server, **of_a_server)
    if plan is None:
        refuse_flags("applies only to a recorded plan; give --plan", check=check)
    else:
        own = "a recorded plan has its own prediction; leave it out, or record the plan with this as --cost"
        refuse_flags(own, calibration=calibration)
        refuse_flags("a recorded plan leaves no folder; leave it out, or take --json", out=out)
        refuse_flags("has no effect on a recorded plan; leave it out", quick=quick, predict=predict, seed=seed)
    if not check:
        refuse_flags("applies only to --check; add it", every=every)
    recorded = None if plan is None else _loaded(plan)
    require_apart(
        {"out": out, "json": json, "predict": predict}, named_files(plan=plan, calibration=calibration, model=model)
    )
    folder = None if out is None else OutputFolder(out, VALIDATION)
    opened = (devices.open if check else devices.open_timed)(device or "cpu")
    if check:
        from ..measured.plan_check import check_plan

        rows = 1 if every is None else every
        shown = not_none(recorded), not_none(plan).name
        check_plan(*shown, opened, model or "toy-llama", dtype, kept or "auto", rows, report)
        return
    if plan is not None and recorded is not None:
        _time_plan(recorded, plan.name, opened, model, dtype, _of_plan(recorded, plan.name, kept), report)
        return
    chosen = 1 if seed is None else seed
    if predict is not None:
        _serve(opened, predict, calibration, model, dtype, kept, quick, chosen, out, report)
        return
    _validate(opened, calibration, model, dtype, kept, quick, chosen, folder, report)


def _kv_cache_dtype(given: str | None) -> str | None:
    """The number format of the KV cache on a device.

    Raises:
        SettingError: Only a simulation has it.
    """
    if given in (None, "auto", "fp8"):
        return given
    raise SettingError("kv_cache_dtype", given, "a device has auto, which is the dtype, or fp8")


def _of_plan(plan: Plan, name: str, given: str | None) -> str:
    """The number format of the KV cache over which a plan is timed: that of its prediction. Plans of earlier versions do not say it.

    Raises:
        SettingError: Another one is given, or a device has none like it.
    """
    recorded = plan.meta.get("kv_dtype")
    if recorded is None:
        return given or "auto"
    own = "auto" if dtype_bits(recorded) == 16 else recorded
    if own not in ("auto", "fp8"):
        remedy = f"was recorded with a KV cache of {recorded}; a device has 16 bits, or fp8"
        raise SettingError("plan", name, remedy)
    if given not in (None, own):
        raise SettingError("kv_cache_dtype", given, f"{name} was recorded with {recorded}; leave it out")
    return own


def _loaded(path: Path) -> Plan:
    try:
        plan = load(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if not plan.num_steps:
        raise UserError(f"{path}: has no steps, of which nothing can be said; record others with --record-steps")
    return plan


def _watch(items: Any, subject: str, total: int) -> Any:
    return track(items, subject, total)


def _time_plan(
    plan: Plan, name: str, device: Device, model: str | None, dtype: str | None, kv_cache_dtype: str, report: Report
) -> None:
    from ...gpu.calibrate.fitting import require_scipy
    from ..measured.validation import plan_timed, print_plan

    require_scipy()
    spec = model_spec(model or plan.meta["model"])
    found = plan_timed(plan, spec, device, dtype or devices.usual_dtype(device), _watch, kv_cache_dtype)
    print_plan(name, found, report)
    report.data({"device": device.describe(), "plan": dict(plan.meta), **found})


def _serve(
    device: Device,
    predict: Path,
    calibration: Path | None,
    model: str | None,
    dtype: str | None,
    kv_cache_dtype: str | None,
    quick: bool,
    seed: int,
    out: Path | None,
    report: Report,
) -> None:
    """Serve requests on a device's own clock.

    Raises:
        SettingError: There is no calibration, or a folder for results.
    """
    from ...gpu.calibrate.fitting import require_scipy
    from ..measured import serving
    from ..measured.validation_runs import scale_of

    if calibration is None:
        remedy = "predicts before the device runs, by a calibration; give --calibration, from fragmeter calibrate"
        raise SettingError("predict", str(predict), remedy)
    refuse_flags("has no effect with --predict; leave it out, or take --json", out=out)
    require_writable_file(predict)
    require_scipy()
    scale = scale_of(device, quick, model)
    predicting = serving.predicting_on(device, calibration, scale, dtype, kv_cache_dtype, seed)
    document = serving.served_on(device, predicting, scale, predict, _watch)
    serving.print_served(document, report)
    report.data(document)


def _validate(
    device: Device,
    calibration: Path | None,
    model: str | None,
    dtype: str | None,
    kv_cache_dtype: str | None,
    quick: bool,
    seed: int,
    out: OutputFolder | None,
    report: Report,
) -> None:
    from ...gpu.calibrate.fitting import require_scipy
    from ..measured import validation
    from ..measured.validation_runs import scale_of

    require_scipy()
    scale = scale_of(device, quick, model)
    with _calibrated(device, calibration, scale, dtype, kv_cache_dtype, quick, seed, out) as (path, again):
        running = validation.Validation(device, path, scale, dtype, seed, _watch, again, kv_cache_dtype)
        document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "model": scale.model, "seed": seed}
        for name, part in running.parts():
            document[name] = part
            # Finished results are kept.
            report.data_so_far(document)
            if out is not None:
                out.write("validation.json", as_json(document))
                out.write("steps.csv", running.steps_csv())
    validation.print_document(document, report)
    if out is not None:
        report.point_to("Results", out.path)
    report.data(document)


@contextmanager
def _calibrated(
    device: Device,
    given: Path | None,
    scale: Any,
    dtype: str | None,
    kv_cache_dtype: str | None,
    quick: bool,
    seed: int,
    out: OutputFolder | None,
) -> Iterator[tuple[Path, Callable[[Skeleton], Path | None] | None]]:
    """The path of a calibration, and a function that measures more of it: the given file, or a new one in ``out``, or in a temporary
    folder if ``out`` is None.

    A new calibration uses a different seed from ``seed``, the seed of the validation. On a CPU it has a part before the first
    pass over the runs and one after each, because other load on the machine changes its speed within a minute; a given one is
    complete. Of a GPU the whole steps are measured again before, between and after the passes, on the skeleton of the runs: the host's share of
    them changes as quickly. Its operations do not, and the memory has no room for the skeletons of both.
    """
    if given is not None and device.torch_device.type == "cpu":
        yield given, None
        return
    from ...gpu.calibrate.calibrate import Measuring, calibrate

    model, watch = model_spec(scale.model), partial(track, subject="Calibrating")
    of_cache = kv_cache_dtype or "auto"
    with TemporaryDirectory() as folder:

        def kept(found: Mapping[str, Any]) -> Path:
            if out is not None:
                return out.write("calibration.json", as_json(found))
            path = Path(folder) / "calibration.json"
            write_whole(path, as_json(found))
            return path

        if device.torch_device.type != "cpu":
            if given is None:
                found = calibrate(
                    model, device, dtype, quick=quick, seed=seed + 1, watch=watch, kv_cache_dtype=of_cache
                )
                # A skeleton and its graphs reference each other; the next one needs their memory.
                gc.collect()
            path = given or kept(found)
            yield path, _steps_again(path, device, scale.rounds + 1, kept)
            return
        measuring = Measuring(model, device, dtype, quick=quick, seed=seed + 1, kv_cache_dtype=of_cache)
        rounds = -(-measuring.grid.rounds // (scale.rounds + 1))

        def measured(_: Skeleton | None = None) -> Path:
            measuring.measure(rounds, watch)
            return kept(measuring.document())

        yield measured(), measured


def _steps_again(
    path: Path, device: Device, parts: int, kept: Callable[[Mapping[str, Any]], Path]
) -> Callable[[Skeleton], Path | None] | None:
    """A function that measures one part of a calibration's steps again, and returns None where the file has none of them; None if the
    file is not a calibration of this device.

    Args:
        parts: How often it will be called.
        kept: Writes a calibration file.
    """
    from ...gpu.calibrate.steps_again import StepsAgain

    then = read(path)
    if then.kind != "calibration" or then.device.get("name") != device.describe()["name"]:
        return None
    known: list[StepsAgain] = []

    def measured(skeleton: Skeleton) -> Path | None:
        if not known:
            known.append(StepsAgain(skeleton, json_module.loads(path.read_bytes())))
        if not known[0].count:
            return None
        known[0].measure(parts, partial(track, subject="Steps again"))
        return kept(known[0].document())

    return measured
