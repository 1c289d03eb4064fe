"""Tables of aiconfigurator-core: a wheel, or the folder that it was unpacked to."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath

from ...sim.output import frames as pd
from ...sim.types.errors import UserError

FRAMEWORK = "vllm"


def newest_table(tables: Path, system: str, kind: str, name: str) -> tuple[str, pd.DataFrame] | None:
    """The newest table of vLLM's kernels on a system, e.g. ``h100_sxm``, and its path below ``systems/data``; None if there is
    none.

    Raises:
        UserError: ``tables`` is neither a folder nor a wheel.
    """
    found = [
        path for path in _files(tables) if path.match(f"systems/data/{system}/{kind}/{FRAMEWORK}/*/{name}.parquet")
    ]
    if not found:
        return None
    path = max(found, key=lambda path: [int(part) for part in path.parts[-2].split(".") if part.isdecimal()])
    return "/".join(path.parts[-5:]), pd.read_parquet(BytesIO(_bytes(tables, path)))


def _files(tables: Path) -> Iterator[PurePosixPath]:
    if tables.is_dir():
        yield from (PurePosixPath(path.as_posix()) for path in tables.rglob("*.parquet"))
    elif zipfile.is_zipfile(tables):
        with zipfile.ZipFile(tables) as wheel:
            yield from map(PurePosixPath, wheel.namelist())
    else:
        raise UserError(
            f"{tables}: is neither a folder nor a wheel; pip download aiconfigurator-core==0.12.0 --no-deps"
        )


def _bytes(tables: Path, path: PurePosixPath) -> bytes:
    if tables.is_dir():
        return Path(path).read_bytes()
    with zipfile.ZipFile(tables) as wheel:
        return wheel.read(str(path))
