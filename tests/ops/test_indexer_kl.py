"""indexer_kl against the formula, row by row."""

import pytest
import torch
from calls import cast, gradients, indexer
from oracles import naive_kl

from gsm_kernels import indexer_kl, listening
from gsm_kernels.indexer_kl import reference
from gsm_kernels.testing import assert_close

STUDENT = ("index_query_BRJI", "index_weight_BRJ", "index_key_BFI")
RAGGED = {
    "several documents": {},
    "one row": {"rows": 1, "padding": 0},
    "no bank": {"ratio": 50},
    "many rows": {"rows": 40, "entries": 43, "heads": 2, "ratio": 1},
    "sixteen heads": {"heads": 16, "channels": 64, "rows": 5},
    "more slots asked for than there are": {"k": 12},
}


def oracle(dense=True, pool_BRN=None, block=8, **call):
    return naive_kl(*call.values(), dense, pool_BRN, block)


def assert_agrees(call, **options):
    (loss, recall), grads = gradients(indexer_kl, {**call, **options})
    (expected_loss, expected_recall), expected = gradients(oracle, {**call, **options})
    assert_close(loss, expected_loss, name="loss")
    if options.get("dense", True):
        torch.testing.assert_close(recall, expected_recall.to(recall.dtype), equal_nan=True)
    for name, grad in grads.items():
        if name in STUDENT:
            wanted = torch.zeros_like(call[name]) if expected[name] is None else expected[name]
            assert_close(grad, wanted, name=f"gradient of {name}", gradient=True)
        else:
            assert grad is None, f"a gradient reached {name}"


def unique_selection(call):
    """Distinct visible slots, as a selection is: every second slot a row sees, at most four."""
    index = call["index_BRK"].clone().fill_(-1)
    for b, r in [(b, r) for b in range(index.shape[0]) for r in range(index.shape[1])]:
        slots = list(range(int(call["first_BR"][b, r]), int(call["last_BR"][b, r]), 2))[: index.shape[2]]
        index[b, r, : len(slots)] = torch.tensor(slots, dtype=torch.int64)
    return {**call, "index_BRK": index}


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("sizes", RAGGED.values(), ids=RAGGED.keys())
def test_loss_recall_and_gradients_equal_the_formula(sizes, dense):
    call = unique_selection(indexer(**sizes))
    if sizes.get("ratio") == 50:
        (loss, _), grads = gradients(indexer_kl, {**call, "dense": dense})
        assert loss == 0 and all((grads[name] == 0).all() for name in STUDENT)
        return
    with listening() as heard:
        assert_agrees(call, dense=dense)
    assert heard == [("indexer_kl", "reference")]


def test_a_pool_restricts_teacher_and_indexer():
    call = unique_selection(indexer(ratio=1, rows=20, entries=20))
    pool = torch.randint(-1, 3, (2, 20, 2), generator=torch.Generator().manual_seed(0))
    assert_agrees(call, pool_BRN=pool, block=3)


def test_chunks_of_rows_change_nothing(monkeypatch):
    call = unique_selection(indexer(rows=40, entries=43, heads=2))
    whole, whole_grads = gradients(indexer_kl, call)
    monkeypatch.setattr(reference, "scratch_elements", lambda device: 1)
    pieces, piece_grads = gradients(indexer_kl, call)
    assert_close(pieces[0], whole[0])
    for name in STUDENT:
        assert_close(piece_grads[name], whole_grads[name], name=name, gradient=True)


def test_selecting_everything_recalls_everything():
    call = indexer(k=20)
    slots = call["bank_BFC"].shape[1]
    call["index_BRK"] = torch.arange(20).where(torch.arange(20) < slots, -1).expand(2, 11, 20)
    assert_close(indexer_kl(**call).recall, torch.tensor(1.0))


def test_an_indexer_that_equals_its_teacher_has_no_loss_and_no_gradient():
    """One attention head, a sink far away and an index score that is that head's logit."""
    call = unique_selection(indexer(heads=1, pairs=0, k=4))
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
