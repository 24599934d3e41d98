"""How indexers learn. (That each parameter learns from what its variant says, and from nothing else: test_model.)"""

from __future__ import annotations

import lightning
import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from small import GEOMETRY, assert_same, build, random_tokens, variant
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gsm.layers.indexer_training as indexer_training
import gsm.layers.latent_attention as reader
from gsm.config.compose import compose
from gsm.data.recall import Needle
from gsm.data.synthetic import SyntheticData
from gsm.layers.indexer_training import KL, RUNS, ScoreBias, sampled_runs
from gsm.layers.projections import Indexer
from gsm.layers.residual import Plain
from gsm.paths import ROOT
from gsm.training.callbacks.selection import DenseFirst
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW
from gsm_kernels import listening, rotate

CASES = ("gsm-retriever=shared_topk", "gsm-retriever=separate_indexer", "baseline-pool")


def dense_scores(query_BRJI: Tensor, weight_BRJ: Tensor, key_BFI: Tensor, index_BRK: Tensor) -> Tensor:
    """Return the index scores of the selected slots, taken from the scores of all slots."""
    score_BRF = torch.einsum("brj,brjf->brf", weight_BRJ, torch.einsum("brji,bfi->brjf", query_BRJI, key_BFI).relu())
    return torch.where(index_BRK < 0, 0, score_BRF.gather(2, index_BRK.clamp(min=0)))


def dense_attend(query, window, position, width, sink, cos, sin, bank, index, bias=None) -> Tensor:
    """One softmax over the whole stream, the whole bank and the sink, under masks, left to autograd."""
    rows, entries, slots = query.shape[1], window.shape[1], bank.shape[1]
    back_RE = torch.arange(entries - rows, entries)[:, None] - torch.arange(entries)
    near = (back_RE >= 0) & (back_RE <= position.clamp(max=width - 1)[..., None])
    member = index[..., None] == torch.arange(slots)
    key = torch.cat([window, bank], dim=1)
    logit = torch.einsum("brhc,bec->brhe", rotate(query, cos, sin), key) * query.shape[-1] ** -0.5
    if bias is not None:
        logit = logit + F.pad((member * bias[..., None]).sum(2), (entries, 0))[:, :, None]
    logit = logit.masked_fill(~torch.cat([near, member.any(2)], dim=-1)[:, :, None], -torch.inf)
    logit = torch.cat([logit, sink[:, None].expand(*logit.shape[:3], 1)], dim=-1)
    mixed = torch.einsum("brhe,bec->brhc", logit.softmax(dim=-1)[..., :-1], key)
    return rotate(mixed, cos, -sin)


def taught(case: str, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a model with indexer_training=score_bias, and all gradients."""
    model, tokens = build(case, indexer_training=ScoreBias(), residual=Plain, **options).train(), random_tokens(2, 40)
    out = model(tokens, targets=tokens)
    assert not out.losses
    out.loss.backward()
    return out.loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_a_score_learns_as_if_it_were_part_of_the_logit(case, monkeypatch):
    loss, grads = taught(case)
    monkeypatch.setattr(reader, "attend", dense_attend)
    monkeypatch.setattr(indexer_training, "score_slots", dense_scores)
    dense_loss, dense_grads = taught(case)
    assert_same(loss, dense_loss, f"{case}: loss")
    assert any(".indexer." in name for name in grads) and grads.keys() == dense_grads.keys()
    for name, grad in grads.items():
        assert_same(grad, dense_grads[name], f"{case}: gradient of {name}")


@pytest.mark.parametrize("case", CASES)
def test_score_bias_changes_no_output_and_no_other_gradient(case):
    tokens = random_tokens(2, 40)
    model = build(case, residual=Plain).train()
    loss = model(tokens, targets=tokens).loss
    loss.backward()
    biased, grads = taught(case)
    assert_same(biased, loss.detach(), f"{case}: loss", 1e-12)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert_same(grads[name], parameter.grad, f"{case}: gradient of {name}", 1e-12)


@pytest.mark.parametrize(
    ("retriever", "teachers"),
    [("shared_topk", [0, 1, 1, 0, 1]), ("separate_indexer", [0, 1, 1, 2, 3]), ("random_topk", [0, 1, 1, -1, -1])],
)
def test_every_reader_of_a_selection_trains_its_indexer(retriever, teachers, monkeypatch):
    """The readers are layers 2, 3 and 4, where 4 reuses the selection of 3, then the stages on layers 2 and 4."""
    attend, biases, read = reader.attend, [None], []

    def watched(*arguments):
        bias = arguments[-1]
        if not any(bias is known for known in biases):
            biases.append(bias)
        read.append(next(place for place, known in enumerate(biases) if bias is known) - 1)
        return attend(*arguments)

    monkeypatch.setattr(reader, "attend", watched)
    taught(f"gsm-retriever={retriever}")
    assert read == teachers


def test_recomputing_activations_changes_no_gradient_of_a_score():
    kept, again = (taught("gsm-retriever=separate_indexer", recompute=recompute)[1] for recompute in (False, True))
    for name, grad in kept.items():
        assert_same(again[name], grad, f"gradient of {name}", 1e-12)


@pytest.mark.parametrize(
    ("case", "name", "learns"),
    [
        ("gsm-retriever=separate_indexer", "kl", True),
        ("gsm-retriever=separate_indexer", "score_bias", True),
        ("gsm-retriever=separate_indexer", "frozen", False),
        ("baseline-pool", "frozen", False),
    ],
)
def test_in_training_indexers_move_unless_they_are_frozen(case, name, learns, tmp_path):
    training = variant("indexer_training", name)
    model = build(case, indexer_training=training, residual=Plain).float().train()
    task = LanguageModeling(model, AdamW(learning_rate=1e-2, warmup_steps=1, final_fraction=0.1, weight_decay=0.1))
    needle = Needle(keys=8, values=8, fillers=4, pairs=2, gap=10)
    data = SyntheticData(task=needle, vocabulary=GEOMETRY.vocabulary, context=24, batch_size=2, validation_sequences=2)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        limit_val_batches=0,
        callbacks=[DenseFirst(until=0.5, shrink=0.25)],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.fit(task, datamodule=data)
    assert any(group["name"].startswith("indexer") for group in trainer.optimizers[0].param_groups) == learns
    for parameter_name, parameter in model.named_parameters():
        if ".indexer." in parameter_name:
            moved = not torch.equal(parameter, before[parameter_name])
            assert moved == learns, f"{parameter_name} under {name}"


TOKENS, LIMIT, ROWS = 60, 30, 16  # beyond the limit, in 16 runs of one row
DOCUMENTS = torch.tensor([[0] * 25 + [1] * 35, [0] * 41 + [1] * 12 + [-1] * 7])  # packed, with padding at the end


def watching(monkeypatch) -> list[dict]:
    """Return a list that later calls of ``indexer_kl`` fill: arguments, arguments for all rows in case of a sample, and
    result."""
    calls, kl, sample, whole = [], indexer_training.indexer_kl, indexer_training.sample, []

    def sampled(call, count, pieces):
        whole.append(call)
        return sample(call, count, pieces)

    def watched(**given):
        result = kl(**given)
        full = kl.inputs(**(whole.pop() if whole else given))
        calls.append({"given": given, "full": full, "result": result, "learns": torch.is_grad_enabled()})
        return result

    monkeypatch.setattr(indexer_training, "sample", sampled)
    monkeypatch.setattr(indexer_training, "indexer_kl", watched)
    return calls


def trained(case: str, **options):
    """A model, and its output in training on packed documents that are longer than the limit."""
    model = build(case, indexer_training=KL(dense_limit=LIMIT, sampled_rows=ROWS, **options), residual=Plain).train()
    tokens = random_tokens(2, TOKENS)
    return model, model(tokens, documents=DOCUMENTS, targets=tokens.where(DOCUMENTS >= 0, -100))


def brute_force(inputs) -> tuple[Tensor, Tensor]:
    """Loss and recall over all visible slots of the sampled rows, row by row, with autograd."""
    start_BN, length = sampled_runs(inputs.index_BRK, ROWS)
    losses, recalls, live = [], [], 0
    width, query = inputs.width, rotate(inputs.query_BRHC, inputs.cos_BRP, inputs.sin_BRP).detach()
    drawn_BN = start_BN.tolist()
    for b, r in [(seq, start + i) for seq in range(2) for start in drawn_BN[seq] for i in range(length)]:
        if DOCUMENTS[b, r] < 0:
            continue
        live += 1
        slots = torch.arange(int(inputs.first_BR[b, r]), int(inputs.last_BR[b, r]))
        if not len(slots):
            continue
        place = inputs.window_BEC.shape[1] - TOKENS + r
        near_EC = inputs.window_BEC[b, place - min(int(inputs.position_BR[b, r]), width - 1) : place + 1].detach()
        key_EC = torch.cat([inputs.bank_BFC[b, slots].detach(), near_EC])
        logit_HE = query[b, r] @ key_EC.T * query.shape[-1] ** -0.5
        softmax_HE = torch.cat([logit_HE, inputs.sink_H.detach()[:, None]], dim=1).softmax(dim=1)
        mass_F = softmax_HE[:, : len(slots)].sum(0)
        teacher_F = mass_F / mass_F.sum()
        fired_JF = (inputs.index_query_BRJI[b, r] @ inputs.index_key_BFI[b, slots].T).relu()
        score_F = inputs.index_weight_BRJ[b, r] @ fired_JF
        losses.append((teacher_F * (teacher_F.log() - score_F.log_softmax(0))).sum())
        recalls.append(teacher_F[torch.isin(slots, inputs.index_BRK[b, r])].sum())
    return sum(losses) / live, torch.stack(recalls).mean()


@pytest.mark.parametrize("case", ["gsm-retriever=separate_indexer", "baseline"])
def test_beyond_the_limit_the_loss_is_that_of_all_visible_slots_in_sampled_rows(case, monkeypatch):
    calls = watching(monkeypatch)
    with listening() as heard:
        model, out = trained(case)
    assert {impl for op, impl in heard if op == "indexer_kl"} == {"reference"}, "the operation of shorter lengths"
    indexers = sum(isinstance(part, Indexer) for part in model.modules())
    assert len(calls) == indexers == len([name for name in out.metrics if name.startswith("indexer_recall/")])
    for call in calls:
        learnt = (call["full"].index_query_BRJI, call["full"].index_weight_BRJ, call["full"].index_key_BFI)
        loss, recall = brute_force(call["full"])
        expected = torch.autograd.grad(loss, learnt, retain_graph=True)
        grads = torch.autograd.grad(call["result"].loss, learnt, retain_graph=True)
        assert abs(call["result"].loss - loss) < 1e-9 and abs(call["result"].recall - recall) < 1e-9
        for grad, wanted in zip(grads, expected, strict=True):
            assert grad.abs().max() > 0 and (grad - wanted).abs().max() < 1e-9


def test_recall_is_the_same_when_only_selected_slots_train(monkeypatch):
    calls = watching(monkeypatch)
    _, out = trained("gsm-retriever=separate_indexer", beyond="selected")
    measured, learning = calls[::2], calls[1::2]
    assert [call["learns"] for call in calls] == [False, True] * (len(calls) // 2)
    assert all("dense" not in call["given"] for call in measured) and not any(c["given"]["dense"] for c in learning)
    expected = torch.stack([brute_force(call["full"])[1] for call in measured])
    recalls = torch.stack([value for name, value in out.metrics.items() if name.startswith("indexer_recall/")])
    assert (recalls - expected).abs().max() < 1e-9 and abs(out.metrics["indexer_recall"] - expected.mean()) < 1e-9


@pytest.mark.parametrize("beyond", ["sampled", "selected"])
def test_only_a_sample_trains_slots_that_no_row_selects(beyond, monkeypatch):
    calls = watching(monkeypatch)
    trained("gsm-retriever=separate_indexer", beyond=beyond)
    for call in [call for call in calls if call["learns"]]:
        inputs, key_BFI = call["full"], call["full"].index_key_BFI
        (grad_BFI,) = torch.autograd.grad(call["result"].loss, key_BFI, retain_graph=True)
        chosen_BF = torch.zeros(grad_BFI.shape[:2], dtype=torch.bool)
        for b in range(2):
            chosen_BF[b, inputs.index_BRK[b].unique().clamp(min=0)] = True
        if not chosen_BF.all():
            assert (grad_BFI[~chosen_BF].abs().max() > 0) == (beyond == "sampled")


def test_up_to_the_limit_beyond_has_no_effect():
    tokens = random_tokens(2, LIMIT)
    losses = []
    for options in ({}, {"beyond": "selected"}, {"dense_limit": 4096}, {"sampled_rows": 1}):
        training = KL(**{"dense_limit": LIMIT, **options})
        out = build("baseline", indexer_training=training, residual=Plain).train()(tokens, targets=tokens)
        losses.append(torch.stack([out.loss, out.losses["indexer_kl"], out.metrics["indexer_recall"]]))
    assert all(torch.equal(one, losses[0]) for one in losses)


def test_a_sample_is_the_same_every_time_and_draws_no_random_numbers():
    model, tokens = trained("baseline")[0], random_tokens(2, TOKENS)
    before = torch.get_rng_state()
    first, second = (model(tokens, documents=DOCUMENTS).losses["indexer_kl"] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("rows", "count"), [(17, 16), (100, 1), (1000, 64), (1000, 999), (5000, 1024)])
def test_a_sample_takes_a_run_of_every_share_and_each_place_as_often(rows, count):
    chosen_BRK = torch.randint(-1, rows, (300, rows, 2))
    start_BN, length = sampled_runs(chosen_BRK, count)
    share = rows // RUNS
    assert start_BN.shape == (300, RUNS) and length == min(-(-count // RUNS), share)
    inside_BN = start_BN - torch.arange(RUNS) * share
    assert inside_BN.min() == 0 and inside_BN.max() == share - length, "from the first place to the last"
    mean, places = inside_BN.double().mean(), share - length + 1
    assert abs(mean - (places - 1) / 2) <= 5 * places / (12 * 300 * RUNS) ** 0.5
    assert torch.equal(start_BN, sampled_runs(chosen_BRK.flip(1), count)[0]), "of what is selected, wherever"


class Largest(TorchDispatchMode):
    """Remembers the number of elements in the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)), 0)
        return result


def long_call(rows: int, width: int = 16) -> dict:
    """Arguments of ``indexer_kl`` for one document, in which two tokens are a slot."""
    position, last = torch.arange(rows)[None], (torch.arange(rows)[None] + 1) // 2
    return {
        "query_BRHC": torch.randn(1, rows, 2, 8),
        "window_BEC": torch.randn(1, rows, 8),
        "position_BR": position,
        "width": width,
        "sink_H": torch.zeros(2),
        "cos_BRP": torch.ones(1, rows, 1),
        "sin_BRP": torch.zeros(1, rows, 1),
        "bank_BFC": torch.randn(1, rows // 2, 8),
        "first_BR": torch.zeros_like(last),
        "last_BR": last,
        "index_BRK": torch.randint(-1, rows // 2, (1, rows, 4)),
        "index_query_BRJI": torch.randn(1, rows, 2, 8, requires_grad=True),
        "index_weight_BRJ": torch.randn(1, rows, 2, requires_grad=True),
        "index_key_BFI": torch.randn(1, rows // 2, 8, requires_grad=True),
        "pool_BRN": None,
    }


def test_a_sample_holds_nothing_of_the_size_of_all_rows_times_slots():
    """Forward and backward."""
    rows, slots, count = 8192, 4096, 64
    call = long_call(rows)
    with Largest() as seen:
        indexer_training.indexer_kl(**indexer_training.sample(call, count)).loss.backward()
    assert seen.elements <= 1 << 21 < rows * slots // 8
    assert indexer_training.sample(call, count)["position_BR"].ge(0).sum() == count


def test_recomputing_activations_changes_no_gradient_of_a_sample():
    grads = []
    for recompute in (False, True):
        training = KL(dense_limit=LIMIT, sampled_rows=ROWS)
        model = build("baseline", indexer_training=training, residual=Plain, recompute=recompute).train()
        tokens = random_tokens(2, TOKENS)
        model(tokens, documents=DOCUMENTS).losses["indexer_kl"].backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and any(".indexer." in name for name in grads[0])
    for name, grad in grads[0].items():
        assert_same(grads[1][name], grad, f"gradient of {name}", 1e-12)


@pytest.mark.parametrize("name", ["paper_long_context", "paper_cot", "paper_ablate_indexer", "afternoon"])
def test_recipes_that_go_to_64k_train_indexers_on_a_sample_there_and_say_so(name):
    """As their comments tell: below, on every row."""
    lines = [f"experiment={name}", *([] if name == "afternoon" else ["size=0p5b"])]
    extend = compose(lines)["runs"]["extend"]
    given = [f"{key}={value}" for key, value in extend.items() if key != "after"]
    for model in ("gsm", "baseline"):
        config = compose([*lines, f"model={model}", "runs=null", *given])
        training, context = instantiate(config["model"]["indexer_training"]), config["data"]["context"]
        assert context == 65536 and training.slots_with_gradient(context) == "visible"
        assert sum(run.stop - run.start for run in training.rows_compared(context)) == 1024 == training.sampled_rows
        assert training.rows_compared(4096) == [slice(0, 4096)]
    file = "_paper_extension" if name.startswith("paper_") else name
    text = (ROOT / "configs" / "experiment" / f"{file}.yaml").read_text()
    assert "model.indexer_training.beyond: sampled" in text and "1,024 rows" in text
