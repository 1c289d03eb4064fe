"""The program ``fragmeter``, and ``python -m fragmeter``, which is the same."""

from __future__ import annotations

import gc
import os
import signal
import sys


def _open_streams() -> None:
    """Open what was closed at the start (``>&-``), so that no result file gets its number, and printing goes nowhere."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def main() -> None:
    """Entry point: load the program, and run the command line."""
    _open_streams()
    if sys.argv[1:] == ["--version"]:
        # Without loading the program.
        from fragmeter import __version__

        try:
            print(__version__, flush=True)
        except OSError as error:
            print(f"fragmeter: standard output: {error.strerror}; make room", file=sys.stderr)
            sys.exit(2)
        return
    # It takes a second to load; until then Ctrl-C just ends it, without the traceback of an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # OpenBLAS would start a thread for each core with numpy, which spins for a tenth of a second, and divide a sum of floats among
    # them: its last bits would follow the number of cores. Nothing here multiplies large matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Loading creates many objects that stay; looking for cycles among them takes a seventh of the time.
    gc.disable()
    from fragmeter.experiments.cli.app import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
