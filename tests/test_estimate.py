"""What asks for more than a machine has is one sentence before the run begins; what could be trained is let through."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gsm import paths
from gsm.config.check import ConfigError
from gsm.config.command_line import errors_as_sentences
from gsm.config.compose import compose
from gsm.experiments import estimate, trainers
from gsm.experiments.estimate import refuse_endless
from gsm.experiments.fit import train

GIVEN = ["size=pico", "data=needle", "trainer=cpu", "trainer.max_steps=1"]


@pytest.mark.parametrize(
    "word",
    [
        "data.batch_size=1000000000",
        "size.dim=1000000000",
        "size.vocabulary=10000000000",
        "size.window=1000000000",
        "size.feed_forward_dim=4611686018427387903",
        "size.context=1000000000000",
        "model.state_size=1000000000000000000",
    ],
)
def test_what_no_machine_has_is_refused(word: str, tmp_path: Path):
    config = compose([*GIVEN, f"logs={tmp_path / 'logs'}", word])
    with pytest.raises(
        ConfigError, match="takes at least .* GiB, but .* are there|asks for what no machine has"
    ) as said:
        train(config)
    assert "\n" not in str(said.value)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.residual.sinkhorn_rounds=1000000000000", "has to be from 1 to 1000"),
        ("size.encoder_layers=1000000000", "has to be from 1 to 1000"),
        ("size.vocabulary=9223372036854775808", "whole number of at most 62 bits"),
        ("data.num_workers=1000000000", "has to be from 0 to 1024"),
        ("data.validation_sequences=1000000000", "has to be from 1 to 1e\\+07"),
    ],
)
def test_what_is_built_or_counted_one_by_one_has_a_range(word: str, said: str):
    data = "stdlib" if "workers" in word else "needle"
    with pytest.raises(ConfigError, match=f"^{word.partition('=')[0]} is .*{said}"):
        compose(["size=pico", f"data={data}", "model/residual=mhc", word])


def test_a_run_of_months_says_so_and_one_of_centuries_is_refused():
    short, long, endless = (compose([*GIVEN, f"trainer.max_steps={10**power}"]) for power in (6, 11, 18))
    assert not refuse_endless(short)
    assert "take at least" in refuse_endless(long) and "days" in refuse_endless(long)
    with pytest.raises(ConfigError, match=r"^trainer\.max_steps 1000000000000000000 of 1 batches .* years"):
        refuse_endless(endless)


def test_devices_that_divide_sequences_take_less_memory_each(monkeypatch: pytest.MonkeyPatch):
    """A sequence too long for one device was refused where four were to divide it."""
    asked: list[float] = []

    def room(_: bool) -> float:
        return asked[-1]

    monkeypatch.setattr(estimate, "_there", room)
    words = ["size=tiny", "data.context=65536", "data.batch_size=1", "trainer.accelerator=cpu"]
    alone, four = (compose([*words, *more]) for more in ([], ["trainer=context", "trainer.context=4"]))
    model = estimate.instantiate_model(alone)
    activations = estimate._activations(alone, trainers.settings(alone), model, gpu=False)
    weights = 12 * sum(parameter.numel() for parameter in model.parameters())
    asked.append((weights + activations) / 3)
    with pytest.raises(ConfigError, match="takes at least"):
        estimate.refuse_endless(alone, 1)
    assert estimate.refuse_endless(four, 1) == ""


def test_nothing_trained_is_not_a_run():
    with pytest.raises(ConfigError, match=r"^trainer\.limit_train_batches is 0, but then nothing is trained"):
        refuse_endless(compose([*GIVEN, "+trainer.limit_train_batches=0"]))


@pytest.mark.parametrize("model", paths.variants("model"))
def test_no_model_of_the_project_is_refused_and_none_is_made(model: str, monkeypatch: pytest.MonkeyPatch):
    """On a machine that holds one of the largest measured size."""
    monkeypatch.setattr(estimate, "available_bytes", lambda device: 640 << 30)
    state = torch.random.get_rng_state()
    assert not refuse_endless(compose([f"model={model}", "size=1p5b", "recipe=nano", "data=needle", "trainer=cpu"]))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_is_refused_takes_more_than_there_is(monkeypatch: pytest.MonkeyPatch):
    """A bound from below: the run of the test before this limit was measured to take twice as much."""
    monkeypatch.setattr(estimate, "available_bytes", lambda device: 3 * 4 * 1_000_000)
    with pytest.raises(ConfigError, match=r"a model of [\d,]+ parameters takes at least"):
        refuse_endless(compose(["size=nano", "data=needle", "trainer=cpu"]))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 4.58 GiB for an array"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_what_was_not_foreseen_is_a_sentence_too(error: BaseException):
    with pytest.raises(SystemExit) as said, errors_as_sentences():
        raise error
    assert str(said.value).startswith("error: out of memory (") and "\n" not in str(said.value)


def test_another_error_stays_what_it_is():
    with pytest.raises(RuntimeError, match="^a bug$"), errors_as_sentences():
        raise RuntimeError("a bug")


@pytest.mark.parametrize(("trainer", "world"), [("default", 1), ("default", 8), ("fsdp", 2)])
def test_a_model_that_gpus_could_share_says_how_many_it_takes(
    monkeypatch: pytest.MonkeyPatch, trainer: str, world: int
):
    """Eight billion parameters: with gradients and one moment 96 GB, of which one GPU has 80."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(estimate, "_there", lambda gpu: (80 if trainer == "default" else 40) * 2**30)
    given = ["model=gsm", "size=8b_a1p5b", "data=needle", "data.context=4096", "data.batch_size=4", "global_batch=128"]
    config = compose([*given, f"trainer={trainer}", "trainer.precision=bf16-mixed", "model.recompute=true"])
    with pytest.raises(ConfigError, match=r"trainer=fsdp on [23] such GPUs at the very least"):
        refuse_endless(config, world)
    monkeypatch.setattr(estimate, "_there", lambda gpu: 2**20)
    with pytest.raises(ConfigError, match="or smaller numbers of model, size or data$"):
        refuse_endless(config, world)
