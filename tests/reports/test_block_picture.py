"""The picture of a block map: its bytes, what it leaves out for them, and its colours."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from browser import as_new
from contrast import contrast
from fragmeter.reports.blockmap.palette import KIND_LABELS, KINDS, SHADES, indices, palette, plain_palette
from fragmeter.reports.blockmap.picture import mean_residency, middles, picture
from fragmeter.reports.blockmap.player import PlayedMap, Player
from fragmeter.reports.figures.figures import block_map
from fragmeter.reports.page.page import Section, write_page
from fragmeter.sim import Settings
from fragmeter.sim.recording.blocks import GIVEN_UP, NO_SEQUENCE, BlockMap, record
from fragmeter.traces import synthetic_pairs, workload
from played import PIXELS, play, set_time


def first_columns(found: BlockMap, count: int) -> BlockMap:
    """The map up to one of its moments: a run has as many columns as its grid leaves."""
    columns = ("at_ticks", "start_ticks", "bucket", "sequence", "live_slots", "references", "census_slots", "free_runs")
    assert found.num_columns >= count
    return replace(found, **{name: getattr(found, name)[:count] for name in (*columns, "largest_free_blocks")})


@pytest.fixture(scope="module")
def crowded() -> BlockMap:
    """A pool that runs short."""
    load = workload(synthetic_pairs("vllm_sosp23_sharegpt_opt", 60, seed=0, max_model_len=2048), request_rate=4)
    return first_columns(
        record(Settings(policy="vllm-sosp23", num_gpu_blocks_override=300), load, most_columns=800)[1], 400
    )


def busy(found: BlockMap, residency: int) -> tuple[BlockMap, np.ndarray]:
    """2048 blocks at 2000 moments, one in ``residency`` free and the others held; and the requests that hold them."""
    rng, shape = np.random.default_rng(0), (2000, 2048)
    is_free = rng.random(shape) < 1 / residency
    requests = np.where(is_free, NO_SEQUENCE, np.cumsum(is_free, axis=0) * 2048 + rng.permutation(2048))
    kind = np.where(is_free, KINDS.index("free"), 0).astype(np.uint8)
    ticks = np.arange(2000)
    return replace(found, at_ticks=ticks, start_ticks=ticks, block_ids=np.arange(2048), bucket=kind), requests


class TestBytes:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("residency", "columns", "is_shaded"), [(200, 2000, True), (18, 1000, True), (2, 1000, False)]
    )
    def test_a_full_map_takes_less_than_300_kb(self, crowded, residency, columns, is_shaded):
        """Shades where they can be seen, columns where they do not cost too much."""
        drawn = picture(*busy(crowded, residency))
        assert len(drawn.png) <= 300_000
        assert (len(drawn.columns), drawn.is_shaded) == (columns, is_shaded)

    @pytest.mark.slow
    def test_noise_takes_less_too(self, crowded):
        """Every block any of the ten kinds, at random, at every moment."""
        found, _ = busy(crowded, 5)
        found.bucket[:] = np.random.default_rng(1).integers(len(KINDS), size=found.bucket.shape)
        drawn = picture(found, np.random.default_rng(2).integers(10**6, size=found.bucket.shape))
        assert len(drawn.png) <= 300_000 and len(drawn.columns) >= 250 and not drawn.is_shaded

    def test_more_bytes_never_show_less(self, crowded):
        shown = [picture(crowded, crowded.sequence, most) for most in range(1_000, 8_000, 500)]
        assert sorted({len(drawn.columns) for drawn in shown}) == [25, 50, 100, 200, 400]
        finest = [(drawn.is_shaded, len(drawn.columns)) for drawn in shown]
        assert finest == sorted(finest) and {True, False} == {shaded for shaded, _ in finest}

    def test_mean_residency_of_a_block(self):
        """Row by row 3 and 1, 2 and 2, and 1: nine moments of five residencies."""
        holders = np.array([[7, 7, 7, NO_SEQUENCE, 8], [1, 1, 2, 2, NO_SEQUENCE], [NO_SEQUENCE] * 4 + [5]]).T
        assert mean_residency(holders) == 9 / 5
        assert mean_residency(np.full((4, 3), NO_SEQUENCE)) == 0

    def test_columns_are_those_in_the_middle_of_what_they_stand_for(self):
        assert middles(6, 6).tolist() == [0, 1, 2, 3, 4, 5]
        assert middles(9, 3).tolist() == [1, 4, 7]
        assert middles(7, 3).tolist() == [1, 3, 5]


@pytest.fixture(scope="module")
def coarse(crowded) -> PlayedMap:
    """Of 400 moments 50 are drawn, and no shades."""
    played = PlayedMap("vllm-sosp23", crowded, np.arange(60), most_bytes=1_500)
    assert not played.drawn.is_shaded and len(played.drawn.columns) == 50
    return played


@pytest.fixture(scope="module")
def page(coarse, tmp_path_factory) -> Path:
    sections = [Section("The block map", "One policy.", widgets=[Player([coarse])])]
    return write_page(tmp_path_factory.mktemp("page") / "page.html", "Blocks", "First paragraph.", sections)


@pytest.fixture(scope="module")
def driver(chromium):
    with as_new(chromium, 1400, 1300) as driver:
        yield driver


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pixels_of_a_coarse_picture_are_what_was_recorded_then(driver, page, coarse, scheme):
    """Each tells what kind of block it was at the moment in the middle of its column."""
    play(driver, page, scheme)
    draw, colours = random.Random(7), plain_palette(scheme == "dark")
    places = [[draw.randrange(50), draw.randrange(300)] for _ in range(1000)]
    size, found = driver.execute_async_script(PIXELS, ".player image", places)
    assert size == [50, 300]
    kinds = [colours.index("#" + "".join(f"{channel:02x}" for channel in colour)) for colour in found]
    assert kinds == [int(coarse.found.bucket[8 * column + 4, row]) for column, row in places]


@pytest.mark.slow
def test_a_coarse_picture_still_names_the_holder_of_each_block(driver, page, coarse):
    play(driver, page)
    driver.execute_script("document.querySelector('.time').step = 'any'")
    found, seen = coarse.found, set()
    for place in range(0, 50, 3):
        column = 8 * place + 4
        set_time(driver, (place + 0.5) / 50)
        for row in range(0, 300, 60):
            said = chosen(driver, row)
            kind, holder = int(found.bucket[column, row]), int(found.sequence[column, row])
            if kind == GIVEN_UP:
                holder = next(held for held in found.sequence[column::-1, row] if held != NO_SEQUENCE)
            assert KIND_LABELS[KINDS[kind]] in said
            assert re.findall(r"request (\d+)", said) == ([] if holder == NO_SEQUENCE else [str(holder)])
            seen.add(kind)
    assert len(seen) > 2


def chosen(driver, row: int) -> str:
    """What the page says of a block at its time."""
    return driver.execute_script(
        "const block = document.querySelector('.block'); block.value = arguments[0];"
        "block.dispatchEvent(new Event('input', { bubbles: true }));"
        "return document.querySelector('.chosen').textContent",
        row,
    )


def test_the_page_says_what_it_leaves_out(crowded, coarse):
    said = coarse.figure().layout.title.subtitle.text
    residency = f"{mean_residency(crowded.sequence):.1f}"
    assert "400 moments. Drawn: 50 of the moments" in said
    assert f"requests have no shades, as a block belongs to one for {residency} moments (mean)" in said
    whole = block_map(crowded, "All").layout.title.subtitle.text
    assert "Drawn" not in whole and "each request has its own shade" in whole


class TestColours:
    @pytest.mark.parametrize("is_dark", [False, True])
    def test_no_two_are_alike(self, is_dark):
        colours = palette(is_dark)
        assert len(set(colours)) == len(colours) == 6 * SHADES + 4 <= 256
        plain = plain_palette(is_dark)
        assert len(set(plain) | set(colours)) == len(colours) + 6 and plain[6:] == colours[-4:]

    @pytest.mark.parametrize("is_dark", [False, True])
    @pytest.mark.parametrize("blind", ["protan", "deutan"])
    def test_the_colour_blind_can_distinguish_use_and_waste(self, is_dark, blind):
        """Every shade of used or free slots against every shade of waste: as a dichromat sees them,
        six times farther apart than what is just noticeable (2.3 in CIE 1976 L*a*b*)."""
        useful = of_kinds(is_dark, blind, "live", "reserved", "free")
        wasted = of_kinds(is_dark, blind, "over_estimate", "block_tail", "round_up", "finished_hold", "given_up")
        assert min(np.linalg.norm(one - other) for one in useful for other in wasted) > 6 * 2.3

    def test_neighbours_in_order_of_arrival_differ(self):
        shades = indices(np.zeros(100, dtype=np.uint8), np.arange(100))
        colours = palette()
        apart = [contrast(colours[one], colours[other]) for one, other in zip(shades, shades[1:])]
        assert min(apart) > 1.05


#: Viénot, Brettel and Mollon, "Digital video colourmaps for checking the legibility of displays by dichromats" (1999).
DICHROMAT = {
    "protan": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
    "deutan": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
}


#: Linear sRGB to CIE XYZ with the white point at (1, 1, 1) (IEC 61966-2-1).
XYZ = np.array([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]])


def of_kinds(is_dark: bool, blind: str, *kinds: str) -> list[np.ndarray]:
    """Every shade of some kinds of block."""
    pixels = [indices(np.full(SHADES, KINDS.index(kind), np.uint8), np.arange(SHADES)) for kind in kinds]
    shades = [palette(is_dark)[index] for index in np.unique(np.concatenate(pixels))]
    return [seen(colour, blind) for colour in (*shades, *(plain_palette(is_dark)[KINDS.index(kind)] for kind in kinds))]


def seen(colour: str, blind: str) -> np.ndarray:
    """A colour as a dichromat sees it, in L*a*b*."""
    linear = (np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255) ** 2.2
    x, y, z = np.cbrt(XYZ @ np.clip(DICHROMAT[blind] @ linear, 0, 1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
