"""Builds the compiled core where there is a compiler; everything works without it. The rest is in setup.cfg."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "sim/engine/_core.c"

setup(
    # The repository is the package: this file would be a module of it.
    script_name="setup.py",
    ext_modules=[
        Extension(
            "fragmeter.sim.engine._core",
            [SOURCE],
            # The loader refuses a core that was compiled from another source than the one beside it.
            define_macros=[("SOURCE_SHA256", f'"{hashlib.sha256(Path(SOURCE).read_bytes()).hexdigest()}"')],
            # Without debugging symbols, which have the path of the folder: the same source gives the same bytes.
            extra_compile_args=["-O2", "-g0"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
