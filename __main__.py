"""``python -m fragmeter``: the same program as ``fragmeter``."""

from fragmeter.experiments.cli import main

if __name__ == "__main__":
    main()
