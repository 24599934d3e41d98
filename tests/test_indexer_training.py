"""How indexers learn. (That each parameter learns from what its variant says, and from nothing else: test_model.)"""

from __future__ import annotations

import lightning
import pytest
import torch
import torch.nn.functional as F
from small import GEOMETRY, assert_same, build, random_tokens, variant
from torch import Tensor

import gsm.layers.indexer_training as indexer_training
import gsm.layers.latent_attention as reader
from gsm.data.recall import Needle
from gsm.data.synthetic import SyntheticData
from gsm.layers.indexer_training import ScoreBias
from gsm.layers.residual import Plain
from gsm.training.callbacks.selection import DenseFirst
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW
from gsm_kernels import rotate

CASES = ("gsm-retriever=shared_topk", "gsm-retriever=separate_indexer", "baseline-pool")


def dense_scores(query_BRJI: Tensor, weight_BRJ: Tensor, key_BFI: Tensor, index_BRK: Tensor) -> Tensor:
    """Index scores of all slots, of which the selected ones are taken."""
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
    """Loss of a model whose indexers learn by score_bias, and all gradients."""
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
def test_nothing_else_computes_or_learns_otherwise(case):
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
def test_everyone_who_reads_a_selection_teaches_its_indexer(retriever, teachers, monkeypatch):
    """Layers 2, 3 and 4, of which the last reuses what the third has selected, then the stages on layers 2 and 4."""
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


def test_scores_are_computed_in_training_and_not_in_evaluation(monkeypatch):
    score, calls = indexer_training.score_slots, []
    monkeypatch.setattr(indexer_training, "score_slots", lambda *arguments: calls.append(1) or score(*arguments))
    model = build("gsm-writer=additive", indexer_training=ScoreBias())
    model(random_tokens(1, 20))
    assert not calls
    model.train()(random_tokens(1, 20))
    assert calls


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
