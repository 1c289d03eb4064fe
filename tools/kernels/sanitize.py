"""Run Python with the kernels' CPU build under AddressSanitizer and UndefinedBehaviorSanitizer.

``python -m tools.kernels.sanitize PROGRAM ARGUMENTS`` runs ``python PROGRAM ARGUMENTS`` with sanitized kernels. An
access outside an array, of any size, ends the program and prints the kernel's line on standard error. It needs Linux and
gcc with its sanitizers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from fragmeter.gpu.ops.cpu_kernels import SANITIZE, compiler
from fragmeter.sim.types.errors import UserError


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` plus the variables that give a new Python process sanitized kernels.

    Raises:
        UserError: The compiler has no AddressSanitizer.
    """
    found = compiler()
    library = found and subprocess.run([found, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout
    # gcc prints the bare name if it has no such library.
    if not library or not Path(library.strip()).is_absolute():
        raise UserError("no libasan.so: install gcc's sanitizers, or name another compiler in CXX")
    return {
        **base,
        SANITIZE: "1",
        "LD_PRELOAD": library.strip(),  # must be the first library to load
        "ASAN_OPTIONS": "detect_leaks=0",  # would report Python's own leaks
        "PYTHONMALLOC": "malloc",
    }


def main() -> None:
    """Replace this process with the program."""
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment(os.environ))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
