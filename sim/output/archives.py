"""Recordings in one ``.npz`` file: named arrays, and ``meta``, a JSON document with a schema version."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import numpy as np

from ..types.errors import UserError
from ..types.user_files import json_value
from .files import write_whole

#: Level of deflate, the same as in ``numpy.savez_compressed``.
_LEVEL = 6


def save_archive(
    path: str | PathLike[str], meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray], level: int = _LEVEL
) -> None:
    """Write an archive. Equal content gives equal bytes.

    Args:
        level: Level of deflate, from 1 (fast) to 9 (small).

    Raises:
        UserError: The file cannot be written.
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        for name, array in {"meta": np.array(json.dumps(dict(meta))), **arrays}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    write_whole(path, content.getvalue())


def load_archive(
    path: str | PathLike[str], kind: str, names: Iterable[str], schema_version: int, remedy: str, most_bytes: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read ``meta`` and the arrays that ``save_archive`` wrote.

    Args:
        kind: Expected kind of recording, for errors.
        names: Names of all its arrays.
        most_bytes: Size of the largest recording, unpacked. A larger file is refused before it is unpacked: deflate
            packs up to a thousand bytes into one.

    Raises:
        UserError: The file is not such a recording, is larger, or has another schema version.
        OSError: The file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as packed:
            # Reading stops at the size that the directory states, whatever follows.
            unpacked_bytes = sum(member.file_size for member in packed.infolist())
        if unpacked_bytes > most_bytes:
            size = f"has {unpacked_bytes:,} bytes unpacked, and a {kind} at most {most_bytes:,}"
            raise UserError(f"{path}: {size}; {remedy}")
        with np.load(path, allow_pickle=False) as archive:
            meta = json_value(str(archive["meta"]))
            version = meta["schema_version"]
            if version != schema_version:
                raise UserError(f"{path}: schema_version = {version}: this version reads {schema_version}; {remedy}")
            if odd := set(archive.files) ^ {*names, "meta"}:
                raise UserError(f"{path}: array {min(odd)} is missing, or too many; {remedy}")
            return meta, {name: archive[name] for name in names}
    except (ValueError, KeyError, TypeError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        raise UserError(f"{path}: is not a {kind}; {remedy}") from None
