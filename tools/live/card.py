"""A real vLLM server on the card of this machine, beside the simulator: ``python -m tools.live.card --out DIR``.

1. An environment of its own in ``DIR/venv``: vLLM from the index of packages, and the probe of this checkout; or ``--python``.
2. A Llama with random weights, the usual one for the card's memory but for its vocabulary. Nothing but packages is downloaded.
3. One server serves the short session of ``loads``. A burst tells its speed, and the rates of all other loads follow.
4. Step times are fitted to the ramp; all other loads are predicted from what was sent. Every decision is compared, and throughput,
   TPOT and TTFT, beside null models of the same calibration. Throughput must be nearer than by each of them where the server is full.

``--device cpu`` is the rehearsal: the same on one core, with the small model of ``server``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from fragmeter.gpu.devices.devices import usual_model
from fragmeter.sim.output.files import as_json, write_whole
from fragmeter.sim.recording.probe import ProbedStep, read_probe
from fragmeter.sim.spec import model as model_spec
from fragmeter.sim.types.errors import UserError

from .loads import CALIBRATION, PACE_TOKENS_PER_S, SPEED, Session, at_rates, short
from .prediction import NULL_MODELS
from .record import serve_all
from .results import results, table
from .server import Server, write_model

#: Sequences and requests of a card's server, over those of a CPU's.
TIMES = 8
#: Largest errors without a repetition; twice the noise is no excuse here.
LIMITS = {"output_throughput": 0.03, "mean_tpot_ms": 0.03, "mean_ttft_ms": 0.10}
#: Largest change of the machine's own pace; seconds of a window, steps of one shape in it at least, and context tokens of one shape.
PACE, _WINDOW_S, _LEAST_ALIKE, _ALIKE_TOKENS = 0.10, 20.0, 5, 512
#: Ends of the names of loads in which a server is full.
FULL = ("-saturated", "-closed")
_ROOT = Path(__file__).parents[2]


def own_python(folder: Path) -> Path:
    """The interpreter of an environment in a folder, with vLLM and the probe; made if missing.

    Raises:
        UserError: vLLM cannot be installed; pip has said why.
    """
    python = folder / "bin" / "python"
    if (folder / ".installed").exists():
        return python
    steps = (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "vllm"],
        [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--editable", str(_ROOT)],
    )
    for step in steps:
        if subprocess.run(step).returncode:
            raise UserError(
                f"{folder}: {' '.join(step)} failed; install vLLM in an environment and name its interpreter by --python"
            )
    (folder / ".installed").touch()
    return python


def shapes_of_card() -> dict[str, int]:
    """Shapes of the model that the card's memory has room for, as entries of a configuration.

    Raises:
        UserError: There is no card.
    """
    line = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()
        memory_bytes = int(found[0]) << 20
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        raise UserError("nvidia-smi: tells of no card; --device cpu rehearses without one") from None
    spec = model_spec(usual_model(memory_bytes))
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "num_hidden_layers": spec.num_layers,
    }


def record(session: Session, python: Path, folder: Path, shapes: Mapping[str, int] | None) -> None:
    """Serve a short session at the speed of its server.

    Args:
        folder: Gets the results; made if missing.
        shapes: Of the model, on a card; None on a CPU.

    Raises:
        UserError: The server or a load failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    write_model(model, shapes or {})
    first, rest = (replace(session, loads=loads) for loads in (session.loads[:1], session.loads[1:]))
    with Server(python, model, session.flags, folder, on_cpu=shapes is None) as server:
        serve_all(first, server.url, python, model, folder, server.start_s)
        # It is there when all are served.
        (folder / "session.json").unlink()
        speed = json.loads((folder / f"{SPEED}.json").read_text())["output_throughput"]
        serve_all(at_rates(rest, speed / PACE_TOKENS_PER_S), server.url, python, model, folder, server.start_s)


def pace(steps: Sequence[ProbedStep]) -> dict[str, float] | None:
    """How much the machine changed its own pace: the same step at different times.

    Steps that only decode are alike if they have as many sequences and about as many context tokens. Their medians in windows of 20 s are
    compared.

    Returns:
        Of the shape with the largest quotient of two medians: the quotient, sequences, and both medians in ms. None if no shape is in
        two windows.
    """
    alike: dict[tuple[int, int], dict[int, list[int]]] = {}
    for step in steps[:-1]:
        if step.tokens and not step.prefill_tokens:
            windows = alike.setdefault((len(step.tokens), step.decode_context // _ALIKE_TOKENS), {})
            window = int((step.start_ns - steps[0].start_ns) / (_WINDOW_S * 1e9))
            windows.setdefault(window, []).append(step.end_ns - step.start_ns)
    found = []
    for (sequences, _), windows in alike.items():
        medians_ms = [median(times) / 1e6 for times in windows.values() if len(times) >= _LEAST_ALIKE]
        if len(medians_ms) > 1:
            found.append((max(medians_ms) / min(medians_ms), sequences, min(medians_ms), max(medians_ms)))
    return dict(zip(("times", "sequences", "least_ms", "most_ms"), max(found), strict=True)) if found else None


def verdict(found: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the server is predicted, and each reason why not.

    Args:
        found: Of ``results``.
    """
    reasons = [
        f"{each['session']}: decisions differ, {each['difference']}"
        for each in found["decisions"]
        if each["difference"]
    ]
    judged = {name: load["metrics"] for name, load in found["loads"].items() if name != "/".join(CALIBRATION)}
    for name, metrics in judged.items():
        reasons += [
            f"{name}: {metric} is off by {metrics[metric]['simulated_error']:+.1%}, allowed are {limit:.0%}"
            for metric, limit in LIMITS.items()
            if abs(metrics[metric]["simulated_error"]) > limit
        ]
        row = metrics["output_throughput"]
        best = min(NULL_MODELS, key=lambda null: abs(row[f"{null}_error"]))
        if name.endswith(FULL) and abs(row["simulated_error"]) >= abs(row[f"{best}_error"]):
            errors = f"{row['simulated_error']:+.1%}, and by {row[f'{best}_error']:+.1%}"
            reasons.append(f"{name}: output_throughput is off by {errors} with the null model {best}")
    return {"passes": not reasons, "reasons": reasons, "limits": dict(LIMITS)}


def text(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines for a terminal."""
    yield from table(found)
    yield f"Within its limits: {'yes' if found['acceptance']['passes'] else 'no'}."
    own = found["pace"]
    if own is not None and own["times"] > 1 + PACE:
        alike = f"decode steps of {own['sequences']} sequences, and alike, took {own['least_ms']:.1f} to {own['most_ms']:.1f} ms"
        yield f"The machine changed its own pace: {alike} in windows of {_WINDOW_S:.0f} s. Errors of that size are the machine's."
    for reason in found["acceptance"]["reasons"]:
        yield f"  {reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 1 if a decision differs, 2 for an error."""
    parser = argparse.ArgumentParser(prog="python -m tools.live.card", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the environment, recordings and results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses on one core")
    parser.add_argument("--python", type=Path, help="interpreter that has vLLM and fragmeter; by default one is made")
    chosen = parser.parse_args(arguments)
    on_cpu, began = chosen.device == "cpu", time.monotonic()
    session = short(1 if on_cpu else TIMES)
    folder = chosen.out / "1" / session.name
    try:
        if not (folder / "session.json").exists():
            # Before anything is installed.
            shapes = None if on_cpu else shapes_of_card()
            python = chosen.python.absolute() if chosen.python else own_python(chosen.out.absolute() / "venv")
            print(f"recording {folder}", flush=True)
            record(session, python, folder, shapes)
        found = results(chosen.out, 1, [session], None)
        found |= {"acceptance": verdict(found), "pace": pace(read_probe(folder / "probe.jsonl.gz").steps)}
        write_whole(chosen.out / "results.json", as_json(found))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for line in text(found):
        print(line)
    print(f"{time.monotonic() - began:.0f} s. Results: {chosen.out / 'results.json'}")
    return int(any(each["difference"] for each in found["decisions"]))


if __name__ == "__main__":
    sys.exit(main())
