"""Which policies of other packages ``fragmeter check-policy`` has passed: a stamp for each in the user's cache.

The name of a stamp is a hash of the files of user code that the policy is made of, and of the files of ``sim``: an edit of one of
them, or another release, asks for another check.
"""

from __future__ import annotations

import os
from functools import cache
from hashlib import sha256
from pathlib import Path

from ..types.user_code import imported_files
from ..types.user_files import user_cache

_SIM = Path(__file__).parents[1]


def stamp(kind: type) -> Path:
    """The file that says that a class of policies has passed; it need not exist."""
    found = sha256(f"{kind.__module__}:{kind.__qualname__}\0{_simulator()}".encode())
    for name, path in imported_files(kind.__module__).items():
        found.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return user_cache() / "checked-policies" / found.hexdigest()


@cache
def _simulator() -> str:
    """A hash of the code of the simulator."""
    found = sha256()
    for path in sorted(_SIM.rglob("*.py")):
        found.update(path.relative_to(_SIM).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def is_stamped(kind: type) -> bool:
    """Whether a class of policies has passed as it is now."""
    return os.path.isfile(stamp(kind))
