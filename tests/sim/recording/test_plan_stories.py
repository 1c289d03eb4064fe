"""Plans worked out by hand, and names of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from family_runs import CopyCost
from fragmeter.sim import Settings, Workload
from fragmeter.sim.recording.plans import Plan, load, record
from fragmeter.sim.recording.plans.names import TokenNames
from fragmeter.sim.types.errors import SettingError, UserError
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.dialogue import Dialogue
from plan_cases import swapping_plan


def plan_of(
    policy: str, prompts: list[int], outputs: list[int], blocks: int, size: int = 2, columns=None, **switches
) -> Plan:
    """The plan of requests that arrive together, over a pool of ``blocks`` of ``size``."""
    pool = {"block_size": size, "num_gpu_blocks_override": blocks, "watermark": 0}
    settings = Settings(policy=policy, model="toy-opt", max_model_len=32, **pool, **switches)
    arrivals = np.zeros(len(prompts), dtype=np.int64)
    workload = Workload("story", arrivals, np.array(prompts), np.array(outputs), **(columns or {}))
    return record(settings, workload, step_cost=CopyCost())[1]


def log(plan: Plan) -> list[str]:
    """A line a step: moves, then each row as sequence, table or first slot, slots written, and tokens held."""
    lines = []
    for number in range(plan.num_steps):
        step, parts = plan.step(number), []
        for sign, moves in (("out", step.swap_outs), ("in", step.swap_ins), ("copy", step.copies)):
            parts += [f"{sign} {source}>{target}" for source, target in moves.tolist()]
        for row, sequence in enumerate(step.sequence.tolist()):
            new = slice(*step.query_start_loc[row : row + 2])
            where = plan.block_table(number, row).tolist()
            if not plan.is_paged:
                where = plan.slot_starts[plan.row_offsets[number] + row]
            held = "".join(letter(token) for token in plan.logical_tokens(number, row).tolist())
            parts.append(f"{sequence} {where} {step.slot_mapping[new].tolist()} {held}")
        lines.append("; ".join(parts))
    return lines


def letter(token: int) -> str:
    """The first run is a b c ..., the second A B C ..., the third digits."""
    run, place = divmod(token, 1 << 32)
    return chr(ord("aA0"[run]) + place)


def test_one_request_in_blocks_of_two():
    """Three tokens of prompt, three of output; the last is never stored."""
    assert log(plan_of("vllm-sosp23", [3], [3], blocks=4)) == [
        "0 [0, 1] [0, 1, 2] abc",
        "0 [0, 1] [3] abcd",
        "0 [0, 1, 2] [4] abcde",
    ]


def test_two_samples_share_a_prompt_and_copy_its_last_block_on_the_first_write():
    """The sibling begins a step later, and has a first token of its own; the leader, first in order, copies."""
    columns = {"n": np.array([2])}
    assert log(plan_of("vllm-sosp23", [3], [2], blocks=6, columns=columns)) == [
        "0 [0, 1] [0, 1, 2] abc",
        "copy 1>2; 0 [0, 2] [5] abcd; 1 [0, 1] [3] abcA",
    ]


def test_in_contiguous_memory_the_prompt_is_copied():
    """Each sample reserves 3 + 2 slots; the second piece begins where the first ends."""
    columns = {"n": np.array([2]), "max_tokens": np.array([2])}
    assert log(plan_of("orca", [3], [2], blocks=8, columns=columns)) == [
        "0 0 [0, 1, 2] abc",
        "copy 0>5; 0 0 [3] abcd; 1 5 [8] abcA",
    ]


def test_a_group_is_swapped_out_and_comes_back():
    """Five blocks. Two samples would need two free blocks to begin, and one is left: their prompt goes to the host,
    and request 0 takes block 3, which was freed last. When it is done blocks 3, 2 and 0 are taken in this order: two
    for the prompt, and one for the leader's copy of its last block. Then each takes a block for its fifth token."""
    columns = {"n": np.array([1, 2])}
    found = log(plan_of("vllm-sosp23", [3, 3], [3, 3], blocks=5, columns=columns, swap_space=0.001))
    assert found == [
        "0 [0, 2] [0, 1, 4] abc; 1 [1, 3] [2, 3, 6] ABC",
        "out 1>0; out 3>1; 0 [0, 2] [5] abcd",
        "0 [0, 2, 3] [6] abcde",
        "in 0>3; in 1>2; copy 2>0; 1 [3, 0] [1] ABCD; 2 [3, 2] [5] ABC0",
        "1 [3, 0, 1] [2] ABCDE; 2 [3, 2, 4] [8] ABC01",
    ]


def test_a_static_batch_lies_in_rows():
    """Two prompts, padded to three tokens, each with room for two more; one ends a step early."""
    columns = {"max_tokens": np.array([2, 1])}
    plan = plan_of("static", [3, 2], [2, 1], blocks=8, columns=columns, max_num_seqs=2)
    assert log(plan) == ["0 0 [0, 1, 2] abc; 1 5 [5, 6] AB", "0 0 [3] abcd"]
    # The end of the short prompt, and the row that has ended.
    assert plan.padding_tokens.tolist() == [1, 1]


def test_a_request_that_begins_alike_finds_its_prefix():
    """Under vllm-v1 the second request names the first block of the first, which is computed in the same step."""
    content = PromptContent(np.array([0, 1, 2]), np.array([7, 7]), np.array([2, 2]))
    assert log(plan_of("vllm-v1", [3, 3], [1, 1], blocks=8, columns={"content": content})) == [
        "0 [0, 1] [0, 1, 2] abA; 1 [0, 2] [4] ab0"
    ]


def names_of(workload: Workload, prefix_tokens: int = 0) -> list[str]:
    """The strings of all sequences, a letter a token."""
    names, sequences = TokenNames(workload.sequences, prefix_tokens), workload.sequences
    rows = [Sequence(i, p, o, 0) for i, (p, o) in enumerate(zip(sequences.prompt_tokens, sequences.output_tokens))]
    return ["".join(map(letter, names.of(row).tolist())) for row in rows]


def workload(prompts: list[int], outputs: list[int], **columns) -> Workload:
    return Workload("names", np.zeros(len(prompts), dtype=np.int64), np.array(prompts), np.array(outputs), **columns)


class TestNames:
    def test_a_request_that_shares_nothing_has_tokens_of_its_own(self):
        assert names_of(workload([2, 1], [1, 2])) == ["abc", "ABC"]

    def test_samples_share_their_prompt(self):
        assert names_of(workload([2], [2], n=np.array([2]))) == ["abcd", "abAB"]

    def test_a_turn_begins_with_all_that_was_said(self):
        content = PromptContent.of_sessions(np.array([4, 4]))
        assert names_of(workload([2, 5], [2, 1], content=content)) == ["abcd", "abcdAB"]

    def test_a_fork_begins_amid_the_output(self):
        dialogue = Dialogue(np.array([-1, 0]), np.array([0, 3]), np.array([False, False]))
        assert names_of(workload([2, 4], [3, 1], dialogue=dialogue)) == ["abcde", "abcAB"]

    def test_a_piece_is_another_behind_another_prefix(self):
        """Both prompts end in piece 8; what precedes it differs, so its keys and values do."""
        content = PromptContent(np.array([0, 1, 3]), np.array([8, 9, 8]), np.array([2, 1, 2]))
        names = TokenNames(workload([2, 3], [1, 1], content=content))
        first, second = (names.of(Sequence(row, 2 + row, 1, 0)) for row in (0, 1))
        assert not set(first.tolist()) & set(second.tolist())

    def test_all_prompts_begin_with_the_prefix(self):
        strings = names_of(workload([3, 3], [1, 1]), prefix_tokens=2)
        assert strings == ["abAB", "ab01"]

    def test_a_beam_goes_on_as_a_copy(self):
        work = workload([2], [4], n=np.array([2]))
        names = TokenNames(work.sequences)
        leader, sibling = Sequence(0, 2, 4, 0), Sequence(1, 2, 4, 0)
        names.replace(sibling, leader, 4)
        assert names.of(sibling)[:4].tolist() == names.of(leader)[:4].tolist()
        assert not set(names.of(sibling)[4:].tolist()) & set(names.of(leader).tolist())
        assert len(names.of(sibling)) == 6


class TestWhatCannotBe:
    def test_layers_with_a_window(self):
        settings = Settings(policy="vllm-v1", model="gemma-3-27b", gpu="h200")
        with pytest.raises(SettingError, match="give --disable-hybrid-kv-cache-manager"):
            record(settings, workload([2], [2]))

    def test_shuffled_pieces(self):
        with pytest.raises(SettingError, match="orca hands out no block ids; leave it out"):
            record(Settings(policy="orca"), workload([2], [2]), shuffle_ids=True)

    @pytest.mark.parametrize(("window", "field"), [((-1, 2), "first_step"), ((0, 0), "num_steps")])
    def test_a_window_of_nothing(self, window, field):
        with pytest.raises(SettingError, match=f"{field} = "):
            record(Settings(), workload([2], [2]), *window)

    def test_a_file_that_is_no_plan(self, tmp_path):
        (tmp_path / "text.npz").write_text("no")
        np.savez(tmp_path / "arrays.npz", rows=np.zeros(3))
        np.save(tmp_path / "array.npy", np.zeros(3))
        for name in ("text.npz", "arrays.npz", "array.npy"):
            with pytest.raises(UserError, match="is not a recorded plan; record it anew"):
                load(tmp_path / name)

    def test_a_plan_of_another_schema(self, tmp_path):
        plan = swapping_plan(num_steps=2)
        plan.meta["schema_version"] = 2
        plan.save(tmp_path / "plan.npz")
        with pytest.raises(UserError, match="schema_version = 2: this version reads 1"):
            load(tmp_path / "plan.npz")
