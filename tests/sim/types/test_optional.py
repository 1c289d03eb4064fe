from __future__ import annotations

import pytest

from fragmeter.sim.types.optional import not_none


@pytest.mark.parametrize("value", [0, "", (), False])
def test_what_is_there_comes_back_as_it_is(value):
    assert not_none(value) is value


def test_none_is_a_defect():
    with pytest.raises(TypeError, match="None"):
        not_none(None)
