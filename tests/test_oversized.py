"""A run that is too large for this machine ends with one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from small import mostly_nightly

from gsm import paths
from gsm.config.command_line import errors_as_sentences
from gsm.config.compose import compose
from gsm.config.load import sketch
from gsm.training.run import train

GIVEN = ["size=pico", "data=needle", "trainer=cpu", "trainer.max_steps=1"]


@pytest.mark.parametrize(
    "word",
    [
        "size.dim=1000000000",
        "size.vocabulary=10000000000",
        "size.feed_forward_dim=4611686018427387903",
        "size.context=1000000000000",
        "model.state_size=1000000000000000000",
    ],
)
def test_sizes_beyond_memory_are_one_sentence(word: str, tmp_path: Path):
    with (
        pytest.raises(SystemExit, match="^error: (model|data|out of memory|size)") as refusal,
        errors_as_sentences(),
    ):
        train(compose([*GIVEN, f"logs={tmp_path / 'logs'}", word]))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("model", mostly_nightly(paths.variants("model"), "gsm", "mamba3"))
def test_a_sketch_draws_no_random_numbers(model: str):
    state = torch.random.get_rng_state()
    sketch(compose([f"model={model}", "size=1p5b", "recipe=nano", "data=needle", "trainer=cpu"]))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_memory_that_runs_out_is_one_line():
    with pytest.raises(SystemExit, match="^error: out of memory [^\n]*$"), errors_as_sentences():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has")


def test_output_without_a_reader_is_no_file():
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(SystemExit, match="^error: .*pipe") as refusal, errors_as_sentences():
        os.write(writer, b"a table")
    os.close(writer)
    assert "file" not in str(refusal.value)


def test_another_error_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="^a bug$"), errors_as_sentences():
        raise RuntimeError("a bug")
