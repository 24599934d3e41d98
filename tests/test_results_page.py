"""The page of an experiment's results: its content, that it loads nothing, and hostile names."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from records import write_trial
from short_runs import folder_of
from test_board import read
from test_compare import experiment, write_run
from test_experiment import ask, fake, toy
from test_explorer import browser

from gsm import plots
from gsm.config.check import ConfigError
from gsm.config.command_line import command
from gsm.experiments.compare import compare
from gsm.experiments.execute import train_all
from gsm.experiments.page import Report, _commands, _question

__all__ = ["browser", "experiment", "fake"]  # fixtures

HOSTILE = "<img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "img", "wbr"}


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text; elements that are not closed are an error."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(self.source)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.said += [" "] if tag in {"th", "td", "li", "a", "p", "summary"} else []

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.said).split())


def test_every_number_of_the_tables_is_on_the_page_too(experiment: Path):
    compare(str(experiment), columns="accuracy,val_loss,steps,cache_bytes")
    page, markdown = Page(experiment / "comparison.html"), (experiment / "comparison.md").read_text()
    rows = [
        line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("|") and "---" not in line
    ]
    assert len(rows) == 8, "means, seeds, differences"
    for row in rows:
        assert " ".join(row).replace("+-", "±") in page.text
    assert "mean and 95 % interval (paired Student's t) over the seeds that both arms have" in page.text


def test_arms_and_columns_have_names_for_readers_there_and_keys_elsewhere(experiment: Path):
    labels = {"paper": "GSM & state", "accuracy": "answers", "idle": "never trained"}
    told = {"labels": labels, "arms": {"paper": ["seed=0"], "control": [], "idle": ["seed=7"]}}
    (experiment / "experiment.json").write_text(json.dumps({**told, "table": ["accuracy", "val_loss"]}))
    compare(str(experiment))
    page, markdown = Page(experiment / "comparison.html").text, (experiment / "comparison.md").read_text()
    loss = plots.label("val_loss")
    assert f"arm runs answers {loss} GSM & state 3 0.9000" in page and f"minus GSM & state seeds answers {loss}" in page
    assert f"| arm | runs | answers | {loss} |\n" in markdown and "| GSM & state | 3 | 0.9000" in markdown
    for said in (page, markdown):
        assert "paper is GSM & state" in said and "val_loss: " in said, "as the command line has them"
        assert "never trained" not in said and "seed=7" not in said, "an arm without a run"
    assert "GSM & state seed=0" in page.partition("What the arms differ in")[2]
    assert (experiment / "comparison.csv").read_text().startswith("arm,seed,accuracy,val_loss\npaper,0,0.9,")
    assert json.loads((experiment / "comparison.json").read_text())["arms"].keys() == {"paper", "control"}
    assert "minus_paper/loss" in read(experiment / "control-seed-mean").Tags()["scalars"], (
        "as TensorBoard's runs are called"
    )


def test_what_is_printed_has_the_names_of_the_commands(experiment: Path, capsys: pytest.CaptureFixture[str]):
    (experiment / "experiment.json").write_text(json.dumps({"labels": {"control": "GSM"}}))
    for path in experiment.glob("control-seed*/metrics.jsonl"):
        path.unlink()
    compare(str(experiment))
    said = capsys.readouterr().out
    assert said.count("control") > 1 and "GSM" not in said


def test_the_labels_of_an_experiment_are_those_of_its_yaml(tmp_path: Path, fake: None):
    train_all(toy(tmp_path, "seeds=1", "labels={mhc: several streams}"))
    assert "several streams 1 " in Page(tmp_path / "logs/toy/results.html").text


def test_a_page_of_several_experiments_has_the_names_of_the_commands(tmp_path: Path):
    for folder, arm in (("a", "paper"), ("b", "control")):
        write_run(tmp_path / folder, arm, 0, 0.5)
        told = {"arms": {arm: ["seed=0"]}, "labels": {arm: "GSM"}}
        (tmp_path / folder / "experiment.json").write_text(json.dumps(told))
    compare(str(tmp_path / "a"), str(tmp_path / "b"), output=str(tmp_path))
    text = Page(tmp_path / "comparison.html").text
    assert "paper 1 " in text and "b/control seed=0" in text and "GSM" not in text


@pytest.mark.parametrize("width", [500, 1400])
def test_the_page_is_no_wider_than_its_window(width: int, experiment: Path, browser: Any):
    write_run(experiment, "an_arm_with_a_long_name_" * 5, 0, accuracy=0.5)
    compare(str(experiment))
    browser.set_window_size(width, 900)
    browser.get((experiment / "comparison.html").as_uri())
    wide, window = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= window


def test_nothing_is_loaded_from_elsewhere(experiment: Path):
    compare(str(experiment), x="cache_bytes", y="accuracy")
    page = Page(experiment / "comparison.html")
    for tag, attributes in page.elements:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base", "foreignobject"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in {"src", "href", "xlink:href", "action", "srcset", "poster"}:
                assert not re.match(r"\w+:|//", value or "") or (value or "").startswith("data:image/png;"), value
    assert not re.search(r"@import|url\((?!#)", page.source)
    (policy,) = (one["content"] for tag, one in page.elements if tag == "meta" and "http-equiv" in one)
    assert policy is not None and policy.startswith("default-src 'none'"), "nor could it be"


def test_names_that_are_code_elsewhere_are_text_here(experiment: Path):
    """Arms, notes, summaries, overrides, configurations and evaluations are from files that anyone may have made."""
    facts: dict[str, Any] = {"commit": HOSTILE, "device": HOSTILE, "versions": {HOSTILE: HOSTILE}, "data": {HOSTILE: 1}}
    facts |= {"kernels": {"attend": HOSTILE}, "choices": {"experiment": "../../train", HOSTILE: HOSTILE}}
    write_run(experiment, HOSTILE, 0, 0.5, **facts, config={"overrides": [HOSTILE], "a": HOSTILE})
    write_run(experiment, "javascript:alert(1)", 0, 0.25, status="failed", reason=HOSTILE)
    told = {"arms": {"paper": [], "control": [HOSTILE]}, "table": ["accuracy"], "overrides": [HOSTILE]}
    (experiment / "experiment.json").write_text(json.dumps(told))
    said = {"tables": [[[HOSTILE, "b"], [HOSTILE, HOSTILE]], "no table", [[]]], "notes": [HOSTILE]}
    (experiment / f"{HOSTILE}.json").write_text(json.dumps(said))
    compare(str(experiment))
    page = Page(experiment / "comparison.html")
    assert "<img src=x" not in page.source
    assert page.text.count(HOSTILE) > 12
    assert not [value for _, one in page.elements for value in one.values() if str(value).startswith("javascript:")]
    assert "javascript%3Aalert%281%29-seed0-" in page.source


def test_damaged_files_leave_out_what_they_would_have_said(experiment: Path):
    (experiment / "gone.json").symlink_to("nowhere")
    (experiment / "other.json").write_text('{"tables": 5}')
    compare(str(experiment))
    assert "0.9000" in Page(experiment / "comparison.html").text


@pytest.mark.parametrize("damaged", ["[1, 2]", "{a: b: c}", "\x00", "- {a: 1}\n- ["])
def test_a_damaged_configuration_is_named(experiment: Path, damaged: str):
    (folder_of(experiment, "paper-seed0") / "config.yaml").write_text(damaged)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        compare(str(experiment))


def test_an_arm_without_a_run_is_named(tmp_path: Path, fake: None, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "logs/toy/results.html"
    train_all(toy(tmp_path, "arm=mhc", "seeds=1"))
    assert "plain" not in Page(page).text.partition("Commands")[0], "it was not chosen"
    ask(tmp_path, "plain", "fails").touch()
    with pytest.raises(SystemExit):
        train_all(toy(tmp_path, "seeds=1"))
    assert "No finished run: plain" in Page(page).text
    ask(tmp_path, "plain", "fails").unlink()
    assert str(page) in "".join(capsys.readouterr().out.split()).replace("browser:", "browser: "), "and where it is"
    train_all(toy(tmp_path))
    assert "4 of 4 runs finished" in Page(page).text and "No finished run" not in Page(page).text


def test_it_says_what_was_asked_what_differs_and_how_to_do_it_again(experiment: Path):
    for arm, width in (("paper", 3), ("control", 4)):
        for seed in range(3):
            facts = {"choices": {"experiment": "recall", "model": arm}, "train_seconds": 60.0, "commit": f"c{seed}"}
            overrides = ["experiment=recall", f"arm={arm}", "model.stages=[1, 2]"]
            config = {"model": {"width": width, "depth": 2}, "overrides": overrides}
            shutil.rmtree(folder_of(experiment, f"{arm}-seed{seed}"))
            write_run(experiment, arm, seed, 0.5, config=config, **facts)
    told = {"arms": {"paper": [], "control": []}, "overrides": ["experiment=recall", "size=nano"]}
    (experiment / "experiment.json").write_text(json.dumps(told))
    compare(str(experiment))
    text = Page(experiment / "comparison.html").text
    assert "How much can each model recall, and how many bytes does it store for that?" in text
    assert "model paper control" in text and "model.width 3 4" in text
    assert "model.depth 2 2" not in text and "arm paper control" not in text, "what is alike or follows from the arm"
    assert "python train.py experiment=recall size=nano" in text
    assert "python train.py experiment=recall arm=paper 'model.stages=[1, 2]'" in text
    assert "trained for 6:00, all runs together" in text
    assert re.search("commit c1 paper-seed1-[0-9a-f]{8}, control-seed1-[0-9a-f]{8}", text)


def test_a_page_that_cannot_be_made_costs_only_itself(experiment: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Report, "html", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare(str(experiment))
    assert {file.suffix for file in experiment.glob("comparison*")} == {".md", ".csv", ".json", ".png"}


def test_runs_after_one_another_show_each_configuration_and_all_of_their_time(tmp_path: Path):
    for arm, context in (("a", 64), ("b", 128)):
        train = {"config": {"data": {"context": 32}, "arm": arm}, "train_seconds": 50}
        extend = {"config": {"data": {"context": context}}, "train_seconds": 14, "val_loss": 1.5}
        parts = {"train": train, "extend": extend, "ppl": {"metrics": {"accuracy": 0.5}}}
        write_trial(tmp_path / "long", arm, 0, **parts)
    compare(str(tmp_path / "long"))
    text = Page(tmp_path / "long/comparison.html").text
    assert "extend: data.context 64 128" in text
    assert "a, its run train, as composed" in text and "data: context: 32" in text
    assert "trained for 2:08" in text


def test_what_evaluations_concluded_is_there(experiment: Path):
    said = {"tables": [[["length", "paper"], ["4,096", "9.66 +- 0.10"]]], "notes": ["16 windows of each"], "arms": {}}
    (experiment / "ppl.json").write_text(json.dumps(said))
    (experiment / "ppl.png").write_bytes(b"\x89PNG of a curve")
    compare(str(experiment))
    page = Page(experiment / "comparison.html")
    assert "ppl length paper 4,096 9.66 ± 0.10 16 windows of each All numbers: ppl.json" in page.text
    assert "data:image/png;base64,iVBORyBvZiBhIGN1cnZl" in page.source


def test_pictures_are_drawn_in_the_page_once_for_light_and_dark(experiment: Path):
    pytest.importorskip("matplotlib")
    compare(str(experiment), columns="accuracy,val_loss")
    page = Page(experiment / "comparison.html")
    drawings = [one for tag, one in page.elements if tag == "svg"]
    assert len(drawings) == 2 and all("viewbox" in one for one in drawings)
    assert "held-out loss (nats per token)" in page.text and "optimizer step" in page.text, "letters are letters"
    assert "currentColor" in page.source and "#000000" not in page.source
    ids = [one["id"] for _, one in page.elements if "id" in one]
    assert len(ids) == len({*ids}), "clips and markers of one picture are not another's"
    named = {
        value[1:]
        for _, one in page.elements
        for name, value in one.items()
        if name == "href" and value and value[0] == "#"
    }
    assert named <= {*ids}


def test_the_page_says_what_is_missing(experiment: Path):
    write_run(experiment, "paper", 3, 0.0, status="failed", steps=4, reason="FloatingPointError: the loss is nan")
    write_run(experiment, "paper", 4, 0.0, status="running", steps=2)
    compare(str(experiment))
    text = Page(experiment / "comparison.html").text
    assert "6 of 8 runs finished" in text
    assert re.search("paper-seed3-[0-9a-f]{8} failed at step 4: FloatingPointError: the loss is nan", text)
    assert re.search("paper-seed4-[0-9a-f]{8} unfinished at step 10", text)
    assert "These runs were not started by one command" in text


def test_commands_name_the_folders_of_yamls_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "others").mkdir()
    told = {"overrides": ["experiment=mine"]}
    monkeypatch.setenv("GSM_CONFIGS", str(tmp_path))
    assert _commands(told) == [f"python train.py --config-dir {tmp_path} experiment=mine"]
    assert command("generate", "prompt=a b").endswith(f"generate.py --config-dir {tmp_path} 'prompt=a b'")
    folders = f"{tmp_path}:{tmp_path / 'others'}"
    monkeypatch.setenv("GSM_CONFIGS", folders)
    assert _commands(told) == [f"GSM_CONFIGS={folders} python train.py experiment=mine"], "a flag is for one"
    assert command("evaluate").startswith(f"GSM_CONFIGS={folders} ") and "--config-dir" not in command("evaluate")


def test_the_question_of_a_finished_experiment_does_not_say_how_long_it_takes():
    assert _question("ablate_indexer").startswith("Should") or _question("ablate_indexer").endswith("?")
    assert "minutes" not in _question("ablate_indexer") + _question("state_tracking")
