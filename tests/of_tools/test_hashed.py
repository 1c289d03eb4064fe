"""Traces that name their blocks: JSON lines with hash_ids."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.sim.types.errors import TraceError
from hashed_files import MOONCAKE, SIZED, put
from tools.prefix_cache import prefix_trace, read_hashed


class TestTheReader:
    def test_blocks_of_one_size_and_what_the_prompt_leaves_for_the_last(self, tmp_path):
        read = read_hashed(put(tmp_path, MOONCAKE, "day.jsonl.gz"))
        assert (read.trace.name, len(read)) == ("day", 3)
        assert read.trace.prompt_tokens.tolist() == [1100, 1024, 600]
        assert read.offsets.tolist() == [0, 3, 5, 7]
        assert read.hash_ids.tolist() == [0, 1, 2, 0, 1, 0, 7]
        assert read.block_tokens.tolist() == [512, 512, 76, 512, 512, 512, 88]
        assert read.block_tokens.dtype == read.hash_ids.dtype == read.offsets.dtype == np.int64
        assert not read.hash_ids.flags.writeable

    def test_another_block_size(self, tmp_path):
        row = {"input_length": 33, "output_length": 1, "hash_ids": [5, 6, -(2**63)]}
        assert read_hashed(put(tmp_path, [row]), block_size=16).block_tokens.tolist() == [16, 16, 1]

    def test_blocks_of_their_own_sizes(self, tmp_path):
        read = read_hashed(put(tmp_path, SIZED))
        assert read.offsets.tolist() == [0, 3, 3, 5]
        assert read.block_tokens.tolist() == [10, 12, 3, 12, 18]
        assert prefix_trace(read).paths == [[1, 2, 3], [], [4, 5]]

    BROKEN = {
        "no ids": ({"hash_ids": None}, "hash_ids = None: is missing; give a list, one whole number a block"),
        "a number": ({"hash_ids": 7}, "hash_ids = 7: must be a list, one whole number a block; correct the row"),
        "a fraction": ({"hash_ids": [0, 1.5]}, "hash_ids = 1.5: must hold whole numbers from -9223372036854775808 to "),
        "a bool": ({"hash_ids": [0, True]}, "hash_ids = True: must hold whole numbers from"),
        "text": ({"hash_ids": ["a", 1]}, "hash_ids = 'a': must hold whole numbers from"),
        "too large": ({"hash_ids": [2**63, 1]}, "hash_ids = 9223372036854775808: must hold whole numbers from"),
        "too few": (
            {"hash_ids": [4]},
            "hash_ids = [4]: 1 ids where 600 tokens of prompt are 2 blocks of 512; correct the row, or give",
        ),
        "too many": ({"hash_ids": [4, 5, 6]}, "hash_ids = [4, 5, 6]: 3 ids where 600 tokens of prompt are 2 blocks"),
        "an older check": ({"input_length": -1}, "input_length = -1: must be 1 or more; correct or drop the row"),
    }

    @pytest.mark.parametrize(("change", "complaint"), BROKEN.values(), ids=BROKEN)
    def test_a_row_that_cannot_be(self, change, complaint, tmp_path):
        path = put(tmp_path, [*MOONCAKE[:2], "", "", MOONCAKE[2] | change])
        with pytest.raises(TraceError) as caught:
            read_hashed(path)
        assert str(caught.value).startswith(f"{path}, line 5: {complaint}"), (
            "lines are counted as an editor counts them"
        )

    def test_sizes_of_some_rows_only(self, tmp_path):
        path = put(tmp_path, [*MOONCAKE[:2], MOONCAKE[2] | {"block_tokens": [512, 88]}])
        with pytest.raises(TraceError, match="line 1: block_tokens = None: is missing; give a list"):
            read_hashed(path)

    BROKEN_SIZES = {
        "none": ({"block_tokens": [10, 0]}, "block_tokens = 0: must hold whole numbers from 1 to 9223372036854775807"),
        "too few": ({"block_tokens": [9]}, "block_tokens = [9]: must have a value for each of the 2 hash_ids"),
        "too much": ({"block_tokens": [12, 19]}, "block_tokens = [12, 19]: adds up to 31, more than the prompt's 30"),
    }

    @pytest.mark.parametrize(("change", "complaint"), BROKEN_SIZES.values(), ids=BROKEN_SIZES)
    def test_sizes_that_cannot_be(self, change, complaint, tmp_path):
        path = put(tmp_path, [*SIZED[:2], SIZED[2] | change])
        with pytest.raises(TraceError) as caught:
            read_hashed(path)
        assert str(caught.value).startswith(f"{path}, line 3: {complaint}")

    @pytest.mark.parametrize("ids", ["9" * 5000, "[" * 100_000 + "]" * 100_000], ids=["digits", "brackets"])
    def test_a_value_that_python_cannot_hold(self, ids, tmp_path):
        row = f'{{"timestamp": 9999, "input_length": 1, "output_length": 1, "hash_ids": [{ids}]}}'
        path = put(tmp_path, [MOONCAKE[0], row])
        with pytest.raises(
            TraceError, match="line 2: row = .*: is not a JSON object; give one object a line"
        ) as caught:
            read_hashed(path)
        assert len(str(caught.value)) < 400

    def test_a_format_without_ids(self, tmp_path):
        path = tmp_path / "pairs.csv"
        path.write_text("input,output\n1,2\n")
        with pytest.raises(TraceError, match="pairs.csv: has no hash_ids; give JSON lines"):
            read_hashed(path)
