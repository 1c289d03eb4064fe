"""The program ``fragmeter``, and ``python -m fragmeter``, which is the same."""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point: load the program, and run the command line."""
    # It takes a second to load; until then Ctrl-C just ends it, without the traceback of an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fragmeter.experiments.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
