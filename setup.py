"""Builds the compiled core where there is a compiler; everything works without it. The rest is in setup.cfg."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("sim/engine")
SOURCE = FOLDER / "_core.c"
HEADERS = sorted(FOLDER.glob("_core_*.h"))
#: As ``source_sha256`` of core.py.
SHA256 = hashlib.sha256(b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))).hexdigest()

setup(
    # The repository is the package: this file would be a module of it.
    script_name="setup.py",
    ext_modules=[
        Extension(
            "fragmeter.sim.engine._core",
            [str(SOURCE)],
            depends=[str(path) for path in HEADERS],
            # The loader refuses a core that was compiled from another source than the one beside it.
            define_macros=[("SOURCE_SHA256", f'"{SHA256}"')],
            # Without debugging symbols, which have the path of the folder: the same source gives the same bytes.
            extra_compile_args=["-O2", "-g0"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
