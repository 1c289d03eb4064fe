"""Prices of GPUs: a JSON or TOML file that the user edits.

    currency = "USD"
    [per_gpu_hour]
    h200 = 4.59

``facts/prices.json`` has examples, each with source and date.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ...sim.types.errors import SettingError
from ...sim.types.user_files import json_value, text_of, toml_value

#: Seconds of an hour, and number of tokens that a price refers to.
HOUR_S, MILLION = 3600, 1_000_000
#: Largest price of one GPU for an hour, in any currency.
MOST_PRICE = 10**12
#: Origin of the prices in the package.
EXAMPLES = "examples"


@dataclass(frozen=True)
class Prices:
    """Prices of one GPU for an hour.

    Attributes:
        origin: The price file, or a note that the prices are examples.
        sources: Source of each price, if the file gives one.
    """

    origin: str
    currency: str
    per_gpu_hour: dict[str, float]
    sources: dict[str, str]

    def of(self, gpu: str) -> float:
        """Price of one GPU for an hour; raises SettingError if it has none."""
        if gpu not in self.per_gpu_hour:
            remedy = "add it under per_gpu_hour"
            if self.origin == EXAMPLES:
                content = json.dumps({"per_gpu_hour": {gpu: 2.5}})
                remedy = f"write a price for an hour into a file, such as {content}, and give it with --prices"
            raise SettingError("prices", self.origin, f"has no price of {gpu}; {remedy}")
        return self.per_gpu_hour[gpu]


def prices(path: Path | None) -> Prices:
    """The prices in a file; None takes the examples.

    Raises:
        SettingError: The file cannot be read, or a price is not a positive number.
    """
    if path is None:
        text = resources.files(__package__).joinpath("facts/prices.json").read_text("utf-8")
        return _checked(json_value(text), EXAMPLES)
    try:
        text = text_of(path, "prices")
        found = toml_value(text) if path.suffix == ".toml" else json_value(text)
    except ValueError as error:
        raise SettingError(
            "prices", str(path), f"is neither JSON nor TOML ({' '.join(str(error).split())}); correct it"
        ) from None
    return _checked(found, str(path))


def _checked(found: Any, origin: str) -> Prices:
    listed = found.get("per_gpu_hour") if isinstance(found, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise SettingError("prices", origin, "must have per_gpu_hour, a price for each GPU, such as h200 = 4.59")
    sources = found.get("sources", {})
    if not isinstance(sources, dict):
        raise SettingError("prices", origin, f"sources is {sources!r}; it must name the source of each GPU's price")
    currency = found.get("currency", "USD")
    if not isinstance(currency, str) or not currency.strip():
        raise SettingError("prices", origin, f"currency is {currency!r}; it must be a name, such as EUR")
    for gpu, price in listed.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price <= MOST_PRICE:
            remedy = f"a price must be a number above 0, and at most {MOST_PRICE:,}"
            raise SettingError("prices", origin, f"{gpu} costs {price!r}; {remedy}")
    return Prices(origin, currency, dict(listed), dict(sources))
