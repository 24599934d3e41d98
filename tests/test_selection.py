"""Dense selection first, then fewer entries: K follows from the step, and is the model's own when it is measured."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from small import GEOMETRY, K, W, build, comparators

from gsm.data.recall import Needle
from gsm.data.synthetic import SyntheticData
from gsm.models.checks import IGNORED
from gsm.models.schedule import local_reach
from gsm.training.callbacks.selection import DenseFirst, selecting
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW


def test_k_falls_from_all_entries_to_the_models_own_by_halves():
    schedule = DenseFirst(until=0.5, shrink=0.25)
    seen = [schedule.top_k(step / 100, own=16, slots=128) for step in range(100)]
    assert seen[:50] == [128] * 50 and seen[75:] == [16] * 25
    assert sorted(set(seen), reverse=True) == [128, 64, 32, 16]
    assert seen == sorted(seen, reverse=True)


def test_a_bank_smaller_than_k_leaves_k_alone():
    schedule = DenseFirst(until=0.5, shrink=0.25)
    assert {schedule.top_k(progress / 10, own=16, slots=9) for progress in range(10)} == {16}


class Spy(lightning.Callback):
    """Notes K of every module that selects, in training steps and in validation."""

    def __init__(self) -> None:
        self.training: list[set[int]] = []
        self.validation: list[set[int]] = []

    def on_before_zero_grad(self, trainer, pl_module: Any, optimizer) -> None:
        self.training.append({module.top_k for module in selecting(pl_module.model)})

    def on_validation_batch_start(self, trainer, pl_module, *_) -> None:
        self.validation.append({module.top_k for module in selecting(pl_module.model)})


@pytest.mark.parametrize("case", ["gsm-encoder_reading=window_only", "gsm-retriever=shared_topk"])
def test_training_steps_follow_the_schedule_and_validation_has_the_models_own_k(case, tmp_path):
    model, spy = build(case).float().train(), Spy()
    task = LanguageModeling(
        model,
        AdamW(learning_rate=1e-3, warmup_steps=1, final_fraction=0.1, weight_decay=0.0),
        measures_accuracy=True,
    )
    needle = Needle(keys=8, values=8, fillers=4, pairs=2, gap=10)
    data = SyntheticData(task=needle, vocabulary=GEOMETRY.vocabulary, context=24, batch_size=2, validation_sequences=5)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=8,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        callbacks=[DenseFirst(until=0.5, shrink=0.25), spy],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )
    trainer.fit(task, datamodule=data)
    slots = 24 // GEOMETRY.encoder_ratio
    assert spy.training[:4] == [{slots}] * 4 and spy.training[6:] == [{K}] * 2
    assert slots > max(spy.training[4]) > K
    assert spy.validation and all(seen == {K} for seen in spy.validation)
    assert 0 <= float(trainer.callback_metrics["val/accuracy"]) <= 1


@torch.no_grad()
def test_without_a_path_to_the_needle_it_cannot_be_seen():
    """Windows and state do not reach across the gap of the needle task: without a bank, the needle is lost."""
    layers = {"encoder_layers": GEOMETRY.encoder_layers, "decoder_layers": GEOMETRY.decoder_layers}
    gap = local_reach(**layers, window=W, state_size=W + K)
    needle = Needle(keys=8, values=8, fillers=4, pairs=2, gap=gap)
    data = SyntheticData(task=needle, vocabulary=GEOMETRY.vocabulary, context=48, batch_size=4)
    batch = data.validation_set.batch([0, 1, 2, 3])
    asked_BT = batch["targets"] != IGNORED
    changed = batch["tokens"].clone()
    changed[:, : 48 - 2 * needle.pairs - gap] = 19  # needles and all filler between them
    for case, sees in (("gsm-encoder_reading=window_only", True), ("gsm-stages=none", True), ("no road", False)):
        model = build("gsm-encoder_reading=window_only", stages=[]) if case == "no road" else build(case)
        moved = (model(batch["tokens"]).logits - model(changed).logits)[asked_BT].abs().max()
        assert (moved > 1e-6) == sees, f"{case}: {moved}"


@pytest.mark.parametrize("name", comparators())
def test_no_part_of_a_comparator_counts_as_a_selection_of_bank_entries(name: str):
    """Raven, which writes a token to its best slots, lost that number in runs with dense selection first, and broke."""
    assert not list(selecting(build(name)))
