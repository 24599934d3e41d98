"""indexer_kl against the formula, row by row."""

import torch
from calls import cast, gradients, indexer
from closeness import assert_close

from gsm_kernels import indexer_kl

STUDENT = ("index_query_BRJI", "index_weight_BRJ", "index_key_BFI")


def test_selecting_everything_recalls_everything():
    call = indexer(k=20)
    slots = call["bank_BFC"].shape[1]
    call["index_BRK"] = torch.arange(20).where(torch.arange(20) < slots, -1).expand(2, 11, 20)
    assert_close(indexer_kl(**call).recall, torch.tensor(1.0))


def test_an_indexer_that_equals_its_teacher_has_no_loss_and_no_gradient():
    """One attention head, a sink far away and an index score that is that head's logit."""
    call = indexer(heads=1, pairs=0, k=4)
    bank = call["bank_BFC"].abs()
    query = call["query_BRHC"].abs()
    call |= {"bank_BFC": bank, "query_BRHC": query, "index_query_BRJI": query, "index_key_BFI": bank}
    call["index_weight_BRJ"] = torch.full((2, 11, 1), 32**-0.5, dtype=torch.float64)
    (loss, _), grads = gradients(indexer_kl, call)
    assert abs(loss) < 1e-12 and all(grads[name].abs().max() < 1e-12 for name in STUDENT)


def test_nothing_is_computed_for_a_gradient_nobody_wants():
    call = cast(indexer(), torch.float32)
    call["index_key_BFI"].requires_grad_()
    with torch.no_grad():
        assert not indexer_kl(**call).loss.requires_grad
    assert indexer_kl(**call).loss.requires_grad
