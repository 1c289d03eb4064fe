"""A real vLLM server beside the simulator, in one command: ``python -m tools.live --out DIR``.

Starts vLLM servers on the CPU of this machine, sends the loads of ``loads``, and compares decisions, memory and times with
the simulator's. Writes ``results.json`` and the page ``server.html``. What is recorded already is not recorded again. With
``--url`` the loads go to a server that runs, with the probe, somewhere else; ``--rate-factor`` fits them to its speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fragmeter.sim.output.files import as_json, write_whole
from fragmeter.sim.types.errors import UserError

from .loads import SESSIONS, Session, at_rates
from .page import block_pictures, load_pictures, write_live_page
from .record import record, serve_all
from .results import results, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 1 if a decision differs, 2 for an error."""
    parser = argparse.ArgumentParser(prog="python -m tools.live", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for recordings and results")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter that has vLLM")
    parser.add_argument("--repetitions", type=int, default=3, help="servers that serve each load, one after the other")
    parser.add_argument("--url", help="a server that runs already, with the probe and without other users")
    parser.add_argument("--model", type=Path, help="folder with config.json and the tokenizer of the server's model")
    parser.add_argument("--probe", type=Path, help="the file that the server's probe writes, with --url")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="factor on all request rates, with --url")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.url:
            if chosen.model is None or chosen.probe is None:
                parser.error("--url needs --model and --probe")
            sessions: tuple[Session, ...] = (at_rates(SESSIONS[0], chosen.rate_factor),)
            folder = chosen.out / "1" / sessions[0].name
            if not (folder / "session.json").exists():
                serve_all(sessions[0], chosen.url, chosen.python, chosen.model, folder)
                (folder / "probe.jsonl.gz").write_bytes(chosen.probe.read_bytes())
            repetitions, model = 1, chosen.model / "config.json"
        else:
            sessions, repetitions, model = SESSIONS, chosen.repetitions, None
            for repetition in range(1, chosen.repetitions + 1):
                for session in SESSIONS:
                    folder = chosen.out / str(repetition) / session.name
                    if not (folder / "session.json").exists():
                        print(f"recording {folder}", flush=True)
                        record(session, chosen.python.absolute(), folder)
        found = results(chosen.out, repetitions, sessions, model)
        write_whole(chosen.out / "results.json", as_json(found))
        loads = load_pictures(chosen.out, sessions, model)
        write_live_page(chosen.out / "server.html", found, loads, block_pictures(chosen.out, sessions, model))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for line in table(found):
        print(line)
    return int(any(each["difference"] for each in found["decisions"]))


if __name__ == "__main__":
    sys.exit(main())
