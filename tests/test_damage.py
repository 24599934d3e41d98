"""Files that are not what was written: one flipped bit, a missing moment, one of another shape. Each is named."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adversary.damage import same
from short_runs import arguments, assemble, composed_in, no_death, started
from small import mostly_slow

import gsm
from gsm.config.compose import compose
from gsm.config.load import CheckpointError, read_checkpoint
from gsm.training.folder import prepare


@pytest.fixture(scope="module")
def stopped(home: Path, processes: Any) -> Path:
    """A run that was interrupted after its last step: its command would go on."""
    log = home / "damage.log"
    child = started(processes, arguments(home, "damage", "optimizer=adamw", "trainer.max_steps=6"), log, no_death)
    child.join()
    assert child.exitcode == 0, log.read_text()
    folder = home / "logs/damage/gsm/seed0"
    (folder / "summary.json").unlink()
    return folder


def going_on(home: Path, folder: Path) -> Callable[[], object]:
    """What the run's own command does before its first step."""
    words = arguments(home, "damage", "optimizer=adamw", "trainer.max_steps=6", f"folder={folder}")
    config = composed_in(folder)(words)
    return lambda: assemble(config, prepare(config))


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "copy")
    last = tmp_path / "copy/checkpoints/last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    checkpoint["hyper_parameters"]["config"]["folder"] = str(tmp_path / "copy")
    torch.save(checkpoint, last)
    return tmp_path / "copy"


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_flipped_bit_of_a_checkpoint_is_never_taken_for_what_was_written(copy: Path):
    """Where it changes nothing, as in what fills the file up to the next tensor, nothing is refused."""
    last, draw = copy / "checkpoints/last.ckpt", random.Random(0)
    written, meant, refused = last.read_bytes(), torch.load(last, weights_only=True), 0
    assert same(read_checkpoint(last), meant)
    for _ in range(30):
        flip(last, draw.randrange(8 * len(written)))
        try:
            assert same(read_checkpoint(last), meant)
        except CheckpointError as error:
            assert str(last) in str(error)
            refused += 1
        last.write_bytes(written)
    assert refused > 20, "most of a checkpoint are tensors"


def test_a_flipped_bit_in_a_weight_is_found_wherever_a_checkpoint_is_used(home: Path, copy: Path):
    last = copy / "checkpoints/last.ckpt"
    weight = max(torch.load(last, weights_only=True)["state_dict"].values(), key=torch.numel)
    flip(last, 8 * last.read_bytes().find(weight.numpy().tobytes()) + 5)
    said = r"last.ckpt is truncated or damaged, or no checkpoint: Bad CRC-32 for file .*/data/\d+"
    for use in (lambda: gsm.load_model(copy), going_on(home, copy)):
        with pytest.raises(CheckpointError, match=said):
            use()


STATE = "optimizer_states"
CHANGES: dict[str, tuple[Callable[[dict], object], str]] = {
    "a moment of another shape": (
        lambda saved: saved[STATE][0]["state"][0].update(exp_avg=torch.zeros(3)),
        r"the optimiser's exp_avg of model\..* is float32 \[3\], but has to be float32 \[\d+.*\]",
    ),
    "a moment in half precision": (
        lambda saved: saved[STATE][0]["state"][1].update(exp_avg_sq=saved[STATE][0]["state"][1]["exp_avg_sq"].half()),
        r"the optimiser's exp_avg_sq of model\..* is float16 .*, but has to be float32",
    ),
    "a missing moment": (
        lambda saved: saved[STATE][0]["state"][2].pop("exp_avg"),
        r"the optimiser's exp_avg of model\..* is missing",
    ),
    "no state of a parameter": (
        lambda saved: saved[STATE][0]["state"].pop(3),
        r"the optimiser's exp_avg of model\..* is missing, the optimiser's exp_avg_sq of",
    ),
    "state of a parameter that is not there": (
        lambda saved: saved[STATE][0]["state"].update({999: saved[STATE][0]["state"][0]}),
        "holds no state of this model's optimiser",
    ),
    "a missing moment, and no list of entries that names it": (
        lambda saved: (saved.pop("optimizer_entries"), saved[STATE][0]["state"][2].pop("exp_avg")),
        "does not say where its training stood: KeyError.'optimizer_entries'",
    ),
    "a moment that the optimiser does not have": (
        lambda saved: saved[STATE][0]["state"][2].update(momentum=saved[STATE][0]["state"][2]["exp_avg"]),
        r"the optimiser's momentum of model\..* is not what it keeps",
    ),
    "a count of steps of another shape": (
        lambda saved: saved[STATE][0]["state"][0].update(step=torch.zeros(7)),
        r"the optimiser's step of model\..* is float32 \[7\], but has to be float32 \[\]",
    ),
    "no schedule": (lambda saved: saved.pop("lr_schedulers"), "lr_schedulers is missing"),
    "no counters": (lambda saved: saved.pop("loops"), "loops is missing"),
    "a weight in half precision": (
        lambda saved: saved["state_dict"].update(
            {"model.embedding.weight": saved["state_dict"]["model.embedding.weight"].half()}
        ),
        r"model\.embedding\.weight is float16 .*, but has to be float32",
    ),
    "a weight of another shape": (
        lambda saved: saved["state_dict"].update({"model.embedding.weight": torch.zeros(2, 2)}),
        r"model\.embedding\.weight is float32 \[2, 2\], but has to be",
    ),
    "a weight that is not finite": (
        lambda saved: saved["state_dict"]["model.embedding.weight"][0].fill_(torch.nan),
        r"weights/model\.(embedding|head)\.weight is not finite",
    ),
    "a moment that is not finite": (
        lambda saved: saved[STATE][0]["state"][0]["exp_avg_sq"].fill_(torch.inf),
        r"optimizer/model\..*/exp_avg_sq is not finite",
    ),
    "a missing weight": (
        lambda saved: saved["state_dict"].pop("model.embedding.weight"),
        r"model\.embedding\.weight is missing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", mostly_slow(CHANGES, *list(CHANGES)[::5]))
def test_state_that_does_not_fit_is_named_before_anything_is_loaded(name: str, home: Path, copy: Path):
    """A moment of another shape used to end the process by a segmentation fault; half precision trained on."""
    change, said = CHANGES[name]
    last = copy / "checkpoints/last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, last)
    with pytest.raises(CheckpointError, match=said):
        going_on(home, copy)()


@pytest.mark.parametrize("missing", ["hyper_parameters", "global_step", "state_dict"])
def test_a_file_of_another_program_is_refused_wherever_it_is_read(home: Path, copy: Path, missing: str):
    last = copy / "checkpoints/last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    del checkpoint[missing]
    torch.save(checkpoint, last)
    for use in (lambda: gsm.load_model(last), lambda: gsm.load_model(copy), going_on(home, copy)):
        with pytest.raises(CheckpointError, match=re.escape(str(last))):
            use()


@pytest.mark.parametrize("value", [7, [], "text", None, torch.ones(2)])
def test_what_is_no_mapping_is_no_checkpoint(value: object, tmp_path: Path):
    torch.save(value, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="last.ckpt"):
        read_checkpoint(tmp_path / "last.ckpt")


def test_a_model_alone_can_be_loaded_but_not_gone_on_from(home: Path, copy: Path):
    last = copy / "checkpoints/last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    del checkpoint["hyper_parameters"]["config"]["trainer"]
    torch.save(checkpoint, last)
    assert gsm.load_model(last)
    with pytest.raises(CheckpointError, match=r"cannot go on from .* because its trainer\.max_steps is missing"):
        going_on(home, copy)()


def test_a_model_that_broke_is_named_where_it_is_loaded(copy: Path):
    last = copy / "checkpoints/last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    checkpoint["state_dict"]["model.embedding.weight"][0] = torch.inf
    torch.save(checkpoint, last)
    with pytest.raises(CheckpointError, match="are of a model that broke: .*embedding.weight"):
        gsm.load_model(copy)


def test_what_is_sound_goes_on(home: Path, copy: Path):
    assert going_on(home, copy)() is not None


def test_ids_of_another_number_than_the_index_has_are_made_again(home: Path, copy: Path):
    (index, *_) = sorted((home / "cache").glob("tokens-*/train/index.json"))
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "tokens": content["tokens"] - 8}))
    data = gsm.config.load.instantiate(compose(arguments(home, "damage"))["data"], "data")
    data.prepare_data()
    assert json.loads(index.read_text())["tokens"] == content["tokens"]
