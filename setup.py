"""Builds the compiled core where there is a compiler; everything works without it. The rest is in setup.cfg."""

import ast
import hashlib
from pathlib import Path

from setuptools import Extension, find_packages, setup

#: The folders that are packages of ``fragmeter``; links in its folder lead to them, so that a checkout runs as it is.
ROOMS = ("sim", "traces", "gpu", "experiments", "reports")
FOLDER = Path("sim/engine")
SOURCES = sorted(FOLDER.glob("_core*.c"))
HEADER, COLUMNS = FOLDER / "_core.h", FOLDER / "_core_columns.h"


def declared(path: Path, names: set[str]) -> dict[str, object]:
    """Constants and classes of fields of a module, without its imports of other modules of this package."""
    found: dict[str, object] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module in ("__future__", "typing"):
            _run(node, found)
        elif isinstance(node, ast.Assign | ast.ClassDef | ast.FunctionDef):
            # What a module computes from what it imports is not asked for.
            try:
                _run(node, found)
            except NameError:
                continue
    return {name: found[name] for name in names}


def _run(node: ast.stmt, namespace: dict[str, object]) -> None:
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, node], []), "<declarations>", "exec"), namespace)


def columns_header() -> str:
    """``header()`` of core_header.py, which is run over the declarations that it imports."""
    path, namespace = FOLDER / "core_header.py", {"__name__": "core_header"}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = FOLDER.parents[node.level - 2] if node.level > 1 else FOLDER
            module = folder.joinpath(*node.module.split(".")).with_suffix(".py")
            namespace |= declared(module, {each.name for each in node.names})
        else:
            _run(node, namespace)
    return namespace["header"]()


if not COLUMNS.is_file() or COLUMNS.read_text(encoding="utf-8") != columns_header():
    COLUMNS.write_text(columns_header(), encoding="utf-8")
#: As ``source_sha256`` of core.py.
SHA256 = hashlib.sha256(b"".join(path.read_bytes() for path in (*SOURCES, HEADER, COLUMNS))).hexdigest()

setup(
    packages=["fragmeter", *(f"fragmeter.{package}" for package in find_packages() if package.split(".")[0] in ROOMS)],
    package_dir={"fragmeter": "fragmeter", **{f"fragmeter.{room}": room for room in ROOMS}},
    ext_modules=[
        Extension(
            "fragmeter.sim.engine._core",
            [str(path) for path in SOURCES],
            depends=[str(HEADER), str(COLUMNS)],
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
