"""Instructions of a main loop, counted in machine code."""

from __future__ import annotations

import pytest

from fragmeter.sim.types.errors import MissingExtra
from tools.kernels import instructions

SASS = """
	.section	.text.decode
.L_x_0:
        /*0000*/                   SHFL.BFLY PT, R1, R2, 0x4, 0x1f ;
        /*0010*/                   FFMA R1, R2, R3, R4 ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   IMAD R1, R2, R3, R4 ;
.L_x_2:
        /*0040*/                   LDGSTS.E.BYPASS.128 [R7], desc[UR16][R5.64] ;
        /*0050*/              @!P1 LDGSTS.E.BYPASS.128 [R8], desc[UR16][R6.64], P3 ;
        /*0060*/                   SHFL.IDX PT, R1, R2, R3, 0x1f ;
        /*0070*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0080*/               @P0 BRA `(.L_x_2) ;
        /*0090*/                   FADD R1, R2, R3 ;
        /*00a0*/               @P2 BRA `(.L_x_1) ;
        /*00b0*/                   BRA `(.L_x_9) ;
.L_x_9:
        /*00c0*/                   EXIT ;
"""


def test_the_main_loop_copies_and_multiplies():
    """Not the loop without copies, not the longer one around it, and no branch ahead."""
    assert instructions.main_loop(SASS) == instructions.Loop(instructions=5, shuffles=1, copies=2, products=1)


def test_loops_within_the_main_loop_are_listed():
    """Those behind its last copy, and not the loop around it nor one before it."""
    inner = ".L_x_3:\n        /*0075*/  HMMA.16816.F32 R4, R8, R10, R4 ;\n        /*0078*/  @P3 BRA `(.L_x_3) ;\n"
    ends = "        /*0080*/               @P0 BRA `(.L_x_2) ;\n"
    assert ends in SASS
    found = instructions.main_loop(SASS.replace(ends, inner + ends))
    assert found == instructions.Loop(instructions=7, shuffles=1, copies=2, products=2, inner=(2,))


def test_blocks_are_limited_by_registers_or_shared_memory():
    """168 registers are 21 units of 256 a warp, and 128 threads take 84 of 256 units."""
    assert instructions.resident_blocks(168, 1024, "sm_90a") == 3
    assert instructions.resident_blocks(40, 64 * 1024, "sm_90a") == 3
    assert instructions.resident_blocks(40, 64 * 1024, "sm_86") == 1


def test_without_a_disassembler_one_line_says_what_to_install(monkeypatch):
    pytest.importorskip("cupy", reason="CuPy is not installed (extra: kernels)")
    monkeypatch.setattr(instructions.shutil, "which", lambda *_, **__: None)
    from fragmeter.gpu.ops import source

    with pytest.raises(MissingExtra, match="pip install nvidia-cuda-nvdisasm"):
        instructions.disassembled(source.plain("copy_blocks"), "sm_90a")
