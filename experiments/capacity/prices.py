"""What GPUs cost: a file of prices that its user edits, JSON or TOML.

    currency = "USD"
    [per_gpu_hour]
    h200 = 4.59

``facts/prices.json`` has examples, each with source and date.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ...sim.types.errors import SettingError

#: Seconds of an hour, and tokens to which a price refers.
HOUR_S, MILLION = 3600, 1_000_000
#: Of an hour of one GPU, in any currency.
MOST_PRICE = 10**12


@dataclass(frozen=True)
class Prices:
    """Prices of an hour of one GPU.

    Attributes:
        origin: The file, or that they are examples.
        sources: Where each is from, as far as the file says so.
    """

    origin: str
    currency: str
    per_gpu_hour: dict[str, float]
    sources: dict[str, str]

    def of(self, gpu: str) -> float:
        """An hour of one GPU; raises SettingError where it has no price."""
        if gpu not in self.per_gpu_hour:
            raise SettingError("prices", self.origin, f"has no price of {gpu}; add it under per_gpu_hour")
        return self.per_gpu_hour[gpu]


def prices(path: Path | None) -> Prices:
    """The prices in a file; None takes the examples.

    Raises:
        SettingError: It cannot be read, or a price is no positive number.
    """
    if path is None:
        text = resources.files(__package__).joinpath("facts/prices.json").read_text("utf-8")
        return _checked(json.loads(text), "examples")
    try:
        text = path.read_text("utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise SettingError("prices", str(path), f"cannot be read ({error.strerror}); name a file") from None
    except (ValueError, RecursionError) as error:
        raise SettingError(
            "prices", str(path), f"is no JSON or TOML ({' '.join(str(error).split())}); correct it"
        ) from None
    return _checked(found, str(path))


def _checked(found: Any, origin: str) -> Prices:
    listed = found.get("per_gpu_hour") if isinstance(found, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise SettingError("prices", origin, "must have per_gpu_hour, a price for each GPU, such as h200 = 4.59")
    sources = found.get("sources", {})
    if not isinstance(sources, dict):
        raise SettingError("prices", origin, f"sources is {sources!r}; it must say of each GPU where its price is from")
    for gpu, price in listed.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price <= MOST_PRICE:
            remedy = f"a price must be a number above 0, and at most {MOST_PRICE:,}"
            raise SettingError("prices", origin, f"{gpu} costs {price!r}; {remedy}")
    return Prices(origin, str(found.get("currency", "USD")), dict(listed), dict(sources))
