"""The first steps of a training by `train.py`'s own path, with the kernels beside PyTorch's operations.

Mixed precision, recomputed blocks, the indexers' loss, cross-entropy, clipping and AdamW come together here alone.
Without a GPU, a small model stands in, in Triton's interpreter, and ranks that talk by gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import torch
from short_runs import NO_PICTURES, TINY
from torch import Tensor

from gsm.config.compose import compose
from gsm.paths import ROOT
from gsm.training.callbacks.metrics_file import read_metrics
from gsm.training.module import LanguageModeling
from gsm.training.run import train
from gsm_kernels import listening, using

TRAINING = (
    "optimizer=adamw model.recompute=true trainer.log_every_n_steps=1 data.tokenizer=bytes ngrams=false sample=false"
)
WIDE = [  # four layers at the widths of 1p5b, on a GPU in bfloat16
    *"size=1p5b size.encoder_layers=4 size.bank_layers=[1,2,3] size.stages=[2,3,4] size.decoder_layers=3".split(),
    *"size.decoder_full=5 size.decoder_reindex=[6] data=folder data.batch_size=1 global_batch=1".split(),
    *"data.validation_sequences=1 trainer.devices=1 trainer.max_steps=10".split(),
    *(NO_PICTURES, *TRAINING.split()),
]
SMALL = [  # what the interpreter computes in a minute or two
    *(*TINY, "model/residual=mhc", *TRAINING.split()),
    *"size.context=16 size.entry_dim=16 size.index_dim=16 size.encoder_layers=2 size.bank_layers=[1,2]".split(),
    *"size.stages=[2] size.decoder_layers=2 size.decoder_full=3 size.decoder_reindex=[]".split(),
    *"data.batch_size=1 global_batch=1 data.validation_sequences=1 trainer.max_steps=2".split(),
]


def first_steps(words: list[str], home: Path, implementation: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Train by these words; return the loss of every step, the gradients of the first, and what ran."""
    gradients: dict[str, Tensor] = {}
    clip = LanguageModeling.configure_gradient_clipping

    def keep(task: LanguageModeling, *given: Any, **named: Any) -> None:
        if not gradients:
            named_gradients = ((name, p.grad) for name, p in task.model.named_parameters() if p.grad is not None)
            gradients.update({name: grad.float().cpu() for name, grad in named_gradients})
        clip(task, *given, **named)

    with monkeypatch.context() as patch, using(implementation), listening() as heard:
        patch.setattr(LanguageModeling, "configure_gradient_clipping", keep)
        logs = home / implementation
        train(compose([*words, f"data.path={home / 'text'}", f"data.cache_dir={home / 'cache'}", f"logs={logs}"]))
    (folder,) = logs.glob("*/*-seed0-*")
    return {"loss": read_metrics(folder / "metrics.jsonl")["train/loss"], "gradients": gradients, "ran": set(heard)}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("words", "of_loss", "of_gradients"),
    [
        pytest.param(SMALL, 1e-4, 1e-3, id="interpreted"),
        pytest.param(WIDE, 2e-2, 0.1, id="bfloat16", marks=pytest.mark.gpu),
    ],
)
def test_the_first_steps_with_kernels_are_those_of_pytorchs_operations(
    words: list[str], of_loss: float, of_gradients: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "text").mkdir()
    tiny_text.write(tmp_path / "text")
    fast, slow = (first_steps(words, tmp_path, name, monkeypatch) for name in ("triton", "reference"))
    assert {implementation for _, implementation in slow["ran"]} == {"reference"}
    assert {"attend", "attend_band", "index_top_k", "indexer_kl", "linear_cross_entropy", "mhc_boundary"} <= {
        op for op, implementation in fast["ran"] if implementation == "triton"
    }
    assert fast["loss"].keys() == slow["loss"].keys() and len(fast["loss"]) >= 2
    for step, loss in slow["loss"].items():
        assert fast["loss"][step] == pytest.approx(loss, rel=of_loss), f"step {step}"
    norm = torch.stack([gradient.norm() for gradient in slow["gradients"].values()]).norm()
    apart = [(fast["gradients"][name] - gradient).norm() for name, gradient in slow["gradients"].items()]
    assert torch.stack(apart).norm() < of_gradients * norm


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words",
    [
        pytest.param([*SMALL, "trainer=fsdp", "trainer.accelerator=cpu"], id="gloo", marks=pytest.mark.nightly),
        pytest.param([*WIDE, "trainer=fsdp", "trainer.devices=2"], id="nccl", marks=pytest.mark.gpu),
    ],
)
def test_torchrun_trains_on_two_devices(words: list[str], tmp_path: Path):
    if "trainer.accelerator=cpu" not in words and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (tmp_path / "text").mkdir()
    places = [f"data.path={tiny_text.write(tmp_path / 'text')}", f"data.cache_dir={tmp_path / 'cache'}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(ROOT / "train.py")]
    # A step has two batches on each rank, so that gradients are averaged once for both.
    done = subprocess.run(
        [*command, *words, *places, "global_batch=4", f"logs={tmp_path}"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        **{"capture_output": True, "text": True, "timeout": 800, "check": False},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (summary,) = tmp_path.glob("default/*-seed0-*/summary.json")
    assert json.loads(summary.read_text())["status"] == "finished" and "device   2 x " in done.stdout
    assert len(list(summary.parent.glob("checkpoints/*/model-*-of-00002.safetensors"))) >= 2
