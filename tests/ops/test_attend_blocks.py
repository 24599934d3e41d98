"""attend_blocks: the choice of an implementation, a call without slots, and the form of flash-linear-attention."""

import pytest
import torch
from calls import blocks, cast
from closeness import relative_error

from gsm.layers.attend_blocks import attend_blocks
from gsm_kernels import listening, using


def test_what_is_gathered_and_what_is_masked():
    """Many rows make a mask, one gathers, and so do many where slots are many more than they see."""
    few, one, far = blocks(), blocks(rows=1, slots=40), blocks(rows=2, slots=600, block=2, chosen=1)
    for call, name in ((few, "sdpa"), (one, "reference"), (far, "reference")):
        with listening() as heard:
            attend_blocks(**call)
        assert heard == [("attend_blocks", name)]


def test_without_slots_nothing_is_seen():
    call = blocks()
    call |= {name: call[name][:, :0] for name in ("key_BFGC", "value_BFGC")}
    assert not attend_blocks(**call).any()


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_the_library_s_own_naive_form_agrees(name):
    pytest.importorskip("fla.ops")
    from fla.ops.nsa.naive import naive_nsa_selection

    call = cast(blocks(one_document=True, rows=17, groups=2), torch.float32)
    first = [call[name] for name in ("query_BRHC", "key_BFGC", "value_BFGC", "chosen_BRGN")]
    expected = naive_nsa_selection(*first, call["block"])
    with using(name):
        assert relative_error(attend_blocks(**call), expected) < 2e-6
