"""The program ``fragmeter``, and ``python -m fragmeter``, which is the same."""

from __future__ import annotations

import gc
import signal
import sys


def main() -> None:
    """Entry point: load the program, and run the command line."""
    if sys.argv[1:] == ["--version"]:
        # Without loading the program.
        from fragmeter import __version__

        print(__version__)
        return
    # It takes a second to load; until then Ctrl-C just ends it, without the traceback of an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Loading creates many objects that stay; looking for cycles among them takes a seventh of the time.
    gc.disable()
    from fragmeter.experiments.cli.app import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
