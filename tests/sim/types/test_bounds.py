"""Numbers with a suffix, as vLLM reads them."""

from __future__ import annotations

import pytest

from fragmeter.sim import settings
from fragmeter.sim.types.bounds import human_readable_int
from fragmeter.sim.types.errors import SettingError

READ = {
    "16384": 16_384, "007": 7, "16K": 16_384, "16k": 16_000, "25.6k": 25_600, "1m": 10**6, "1M": 2**20, "0.5k": 500,
    "2g": 2 * 10**9, "2G": 2**31, "1t": 10**12, "1T": 2**40,
}  # fmt: skip
REFUSED = ("", "K", "1.5K", "1.5", "16Q", "16 K", "-16K", "+1k", "1_0K", "16KK", "1e3k", "\N{SUPERSCRIPT TWO}K")


@pytest.mark.parametrize(("text", "number"), READ.items())
def test_a_suffix_in_lower_case_is_decimal_and_in_upper_case_binary(text, number):
    assert human_readable_int(text) == number


@pytest.mark.parametrize("text", [*REFUSED, "9" * 5000, "9" * 5000 + "k"], ids=lambda text: repr(text[:9]))
def test_nothing_else_is_a_number(text):
    assert human_readable_int(text) is None


@pytest.mark.parametrize("name", ["max_model_len", "max_num_batched_tokens"])
def test_settings_take_it_as_text(name):
    """As the values of ``sweep --grid`` are."""
    assert getattr(settings(**{name: "2K"}), name) == 2048
    with pytest.raises(SettingError, match="must be a whole number"):
        settings(**{name: "2Q"})
    with pytest.raises(SettingError, match="must be at most 2147483648"):
        settings(**{name: "4G"})


def test_settings_that_vllm_reads_without_a_suffix_take_none():
    with pytest.raises(SettingError, match="must be a whole number"):
        settings(max_num_seqs="1K")
