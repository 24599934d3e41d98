"""A run that starts from the weights of another: what it takes over, what may differ, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import torch
from short_runs import BY_MODEL, BYTES, TINY, assemble, folder_of

from gsm import checkpoint
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import CheckpointError, instantiate, instantiate_model, load_tokenizer
from gsm.config.stored import checkpoint_folder, digest
from gsm.data.tokenizer import Tokenizer
from gsm.training.module import LanguageModeling
from gsm.training.run import open_data, train
from gsm.training.weights import take


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a text and of a run of one step."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    tiny_text.write(folder / "text")
    train(compose(given(folder, "name=first", "trainer.max_steps=1")))
    return folder


def given(home: Path, *more: str) -> list[str]:
    places = [f"data.path={home / 'text'}", f"data.cache_dir={home / 'cache'}", f"logs={home / 'logs'}"]
    return [*TINY, *places, BY_MODEL, *more]


def first(home: Path) -> str:
    return str(folder_of(home / "logs/first"))


def composed(home: Path, *more: str) -> dict[str, Any]:
    return compose(given(home, f"start_from={first(home)}", "trainer.max_steps=1", *more))


def test_it_has_the_weights_and_neither_steps_nor_optimiser(home: Path, capsys: pytest.CaptureFixture[str]):
    config = composed(home, "name=second", "optimizer.learning_rate=0.0", "seed=5")
    train(config)
    one, two = (checkpoint.read(checkpoint_folder(folder)) for folder in (first(home), config["folder"]))
    torch.testing.assert_close(two["state_dict"], one["state_dict"], rtol=0, atol=0)
    assert two["global_step"] == 1
    moments, others = (
        [moment for state in each["optimizer_states"][0]["state"].values() for moment in state.values()]
        for each in (two, one)
    )
    assert not all(torch.equal(mine, theirs) for mine, theirs in zip(moments, others, strict=True))
    assert "Starting from the weights of" in capsys.readouterr().out
    assert json.loads((Path(config["folder"]) / "summary.json").read_text())["start_from"] == first(home)


def test_what_changes_no_parameter_may_differ(home: Path):
    more = ("data.context=64", "size.yarn_factor=2", "size.yarn_mscale=1", "model.state_size=11", "size.window=5")
    facts = train(composed(home, "name=longer", *more))
    assert facts["status"] == "finished" and facts["memory_after_tokens"] == 64


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["size.dim=24"], r"model.geometry.dim \(16 there, 24 here\)"),
        (["model/writer=gated"], r"model.writer._target_ \(.*Additive there, .*Gated here\)"),
        (["model=baseline"], "model._target_"),
    ],
)
def test_another_model_is_refused_with_the_fields_that_differ(home: Path, more: list[str], said: str):
    with pytest.raises(CheckpointError, match=f"^start_from .*{said}"):
        train(composed(home, f"name={'-'.join(more).replace('/', '_').replace('=', '_')}", *more))


@pytest.mark.parametrize("named", ["bpe", "/no/such/tokenizer.json", "{home}/another.json"])
def test_another_tokenizer_than_the_checkpoint_s_is_refused(home: Path, named: str):
    """It was ignored, also the path of a file that is not there; the weights mean nothing with other ids."""
    Path(home / "another.json").write_text(Tokenizer.train(["some text"], 257).to_state()["json"] or "")
    with pytest.raises(ConfigError, match=r"tokenizer"):
        open_data(composed(home, f"data.tokenizer={named.format(home=home)}"))


@pytest.mark.parametrize("learned", ["bpe", "file"])
def test_the_checkpoint_s_own_tokenizer_is_taken(home: Path, learned: str):
    """A BPE is the one that was learned then, whatever the new text; a file is known by its content, in any place."""
    description = home / f"{learned}.json"
    description.write_text(Tokenizer.train(["some other text"] * 9, 257).to_state()["json"] or "")
    for name in ("one", "two"):
        shutil.copy(description, home / f"{name}.json")
    words = [
        f"data.tokenizer={'bpe' if learned == 'bpe' else home / 'one.json'}",
        f"name={learned}",
        "trainer.max_steps=1",
    ]
    train(compose(given(home, *words)))
    (home / "one.json").unlink()
    start = f"start_from={folder_of(home / 'logs' / learned)}"
    words = [f"data.tokenizer={'bpe' if learned == 'bpe' else home / 'two.json'}", start, "data.files=[module_1*.py]"]
    data = open_data(compose(given(home, *words)))
    assert (
        data.tokenizer is not None and data.tokenizer.digest == load_tokenizer(start.removeprefix("start_from=")).digest
    )


@pytest.mark.parametrize(
    ("more", "original"),
    [
        (["size.context=64"], None),
        (["size.context=64", "size.yarn_original=32"], 32),
        (["size.context=64", "size.yarn_original=16"], 16),
        (["data.context=64"], 32),
        (["size.context=64", "size.yarn_factor=1"], 64),
    ],
)
def test_yarn_extends_the_context_of_the_checkpoint(home: Path, more: list[str], original: int | None):
    """It started from the new one."""
    config = composed(home, "size.yarn_factor=2", *more)
    model, geometry = instantiate_model(config), instantiate(config["size"], "size")
    if original is None:
        with pytest.raises(ConfigError, match="size.yarn_original"):
            take(model, first(home), config)
    else:
        take(model, first(home), config)
        assert geometry.bank_rope().original == original


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sequences that training takes, in order."""
    sequences: list[tuple[int, ...]] = []

    def step(self: LanguageModeling, batch: Any, *given: Any, whole: Any = LanguageModeling.training_step) -> Any:
        sequences.extend(map(tuple, batch["tokens"].tolist()))
        return whole(self, batch, *given)

    monkeypatch.setattr(LanguageModeling, "training_step", step)
    return sequences


def made(home: Path, *more: str) -> list[str]:
    """Words of a run on sequences that are made, not read."""
    words = [word for word in TINY if word not in BYTES]
    return [*words, "data=recall", "data.task.pairs=2", f"logs={home / 'logs'}", BY_MODEL, *more]


@pytest.mark.parametrize("data", [given, made])
def test_later_phases_read_on_behind_the_sequences_of_earlier_ones(
    home: Path, read: list[tuple[int, ...]], data: Callable[..., list[str]]
):
    """Each began at the first sequence again."""
    start, name = "start_fresh=true", f"phases_{data.__name__}"
    for phase in range(3):
        train(compose(data(home, f"name={name}", f"arm=phase{phase}", "trainer.max_steps=2", start)))
        start = f"start_from={home}/logs/{name}/phase{phase}-seed0"
    assert len(read) == len(set(read)) == 3 * 2 * 8
    branch = [f"name={name}", "arm=branch", f"start_from={home}/logs/{name}/phase1-seed0", "start_fresh=false"]
    train(compose(data(home, *branch, "trainer.max_steps=4")))
    assert read[48:] == read[32:48], "the steps of phase 1 go on as those of phase 2 did"


@pytest.mark.parametrize(
    ("more", "place"), [([], 8), (["data.batch_size=2"], 8), (["seed=1"], 0), (["data.context=16"], 0)]
)
def test_other_sequences_are_read_from_the_first(home: Path, more: list[str], place: int):
    data = assemble(composed(home, "name=place", *more)).data
    consumed = [row["tokens"].tolist() for row in data.consumed(2) or ()]
    assert data.first_sequence == place
    assert next(iter(data.train_dataloader()))["tokens"][:2].tolist() == consumed
    assert consumed == [data.train_set[int(index)]["tokens"].tolist() for index in data.order.indices(place, place + 2)]


def test_the_run_that_weights_come_from_is_a_part_of_what_a_run_is(home: Path):
    """Its path is none: by the folder, by its step, or without its address it is the same run."""
    one = composed(home, "name=third")
    step = checkpoint.newest(Path(first(home)))
    for path in (str(step), first(home).rpartition("-")[0]):
        assert (
            compose(given(home, f"start_from={path}", "trainer.max_steps=1", "name=third"))["folder"] == one["folder"]
        )
    train(compose(given(home, "name=another", "trainer.max_steps=1", "seed=1")))
    for other in (f"start_from={home}/logs/another/gsm-seed1", "start_from=null"):
        assert compose(given(home, other, "trainer.max_steps=1", "name=third"))["folder"] != one["folder"]


def test_a_finished_run_stays_finished_when_its_parent_is_gone(home: Path, capsys: pytest.CaptureFixture[str]):
    train(compose(given(home, "name=gone", "trainer.max_steps=1", "seed=4")))
    words = given(home, f"start_from={home}/logs/gone/gsm-seed4", "trainer.max_steps=1", "name=orphan")
    train(compose(words))
    shutil.rmtree(home / "logs/gone")
    train(compose(words))
    assert "is finished already" in capsys.readouterr().out
    for other in ([f"start_from={home}/logs/gone/gsm-seed", "name=orphan"], ["name=other"]):
        (home / "logs/orphan/results.csv").write_text("beside the runs")
        with pytest.raises(ConfigError, match="^start_from "):
            compose([*words, *other])


def test_what_is_no_checkpoint_is_said(tmp_path: Path):
    (tmp_path / "old.ckpt").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="old.ckpt"):
        digest(tmp_path / "old.ckpt")
    with pytest.raises(FileNotFoundError, match="lost"):
        digest(tmp_path / "lost")
    assert digest(None) is None
