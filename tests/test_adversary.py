"""The attack of tests/adversary, in samples; and what is known to fail, each by the number of its class.

``make adversary ARGS="cases=2000"`` is the whole of it; ``ARGS="class=2 seed=123"`` tries one case again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_text
import torch
from adversary.kills import KINDS, difference
from short_runs import arguments, lines, no_death, started

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.evaluation import ngrams, task_files
from gsm.evaluation.task_files import find, read_task
from gsm.experiments.fit import train
from gsm.paths import ROOT
from gsm.training.module import LanguageModeling

DANGEROUS = ("1", "2", "4", "5", "10")
OTHERS = ("7", "11", "12", "13")  # 8 and 9 are tried with 7


def in_its_own_process(*words: str) -> subprocess.CompletedProcess[str]:
    """A module of the attack, as a command: it forks, which a process with threads must not."""
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command, there = [sys.executable, "-m", *words], os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=ROOT, env=there, capture_output=True, text=True, check=False)


def attack(folder: Path, *words: str, classes: Sequence[str] = DANGEROUS) -> list[dict[str, Any]]:
    """What became of a sample's cases."""
    done = in_its_own_process("adversary", f"class={','.join(classes)}", *words, f"json={folder / 'ends.json'}")
    assert (folder / "ends.json").is_file(), done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "ends.json").read_text().splitlines()]


def failures(ends: list[dict[str, Any]], number: str) -> list[str]:
    """The cases of a class that failed, and how to see them again."""
    found = [end for end in ends if end["number"] == number]
    assert found, f"class {number} was not tried"
    return [
        f"class={number} seed={end['seed']}: {end['title']}: {end['said']}" for end in found if end["end"] == "failed"
    ]


def test_the_judge_sees_what_it_is_there_for():
    done = in_its_own_process("adversary.canaries")
    assert done.returncode == 0, done.stderr
    for name, (end, said) in json.loads(done.stdout).items():
        assert end == "failed" and said.startswith(name), f"{name}: {end}, {said}"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return attack(tmp_path_factory.mktemp("sample"), "cases=90", "seed=5000")


@pytest.mark.parametrize("number", DANGEROUS)
def test_no_case_of_a_dangerous_class_fails(number: str, sample: list[dict[str, Any]]):
    assert not failures(sample, number)


@pytest.fixture(scope="module")
def other_sample(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return attack(tmp_path_factory.mktemp("others"), "cases=60", "seed=5000", classes=OTHERS)


@pytest.mark.parametrize("number", OTHERS)
def test_nor_does_one_of_the_others(number: str, other_sample: list[dict[str, Any]]):
    assert not failures(other_sample, number)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a busy machine is no mistake of a case
def test_nor_of_a_larger_sample(tmp_path: Path):
    ends = attack(tmp_path, "cases=300", "seed=6000")
    assert not [failure for number in DANGEROUS for failure in failures(ends, number)]


def test_the_judge_of_kills_sees_what_it_is_there_for():
    curve = ["step,name,value", "3,val/loss,2.0", "6,train/loss,1.5", "6,val/loss,1.0"]
    whole = {
        "a/metrics.csv": curve,
        "a/last.ckpt": {"state_dict": torch.zeros(2)},
        "results.png": b"a",
        "results.md": b"a",
    }
    lost = {"a/metrics.csv": curve[:-1], "results.png": b"b"}
    assert difference(whole, whole) == ("kills", "")
    assert difference({**whole, **lost}, whole) == ("3", "the last step's lines are missing, 1 of a/metrics.csv")
    for other in (
        {**whole, "results.png": b"b"},
        {**whole, **lost, "results.md": b"b"},
        {**whole, **lost, "a/last.ckpt": {"state_dict": torch.ones(2)}},
        {**whole, "a/metrics.csv": [curve[0], *curve[2:]]},
        {**whole, "a/metrics.csv": [*curve, curve[-1]]},
        {**whole, "a/.last.ckpt.1.partial": b""},
        {name: value for name, value in whole.items() if name != "results.md"},
    ):
        number, said = difference(other, whole)
        assert number == "kills" and said, other.keys()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_kill_loses_nothing(tmp_path: Path):
    """One of each kind."""
    ends = attack(tmp_path, "cases=0", "kills=5", "seed=20")
    assert [end["title"].partition(":")[0] for end in ends] == list(KINDS)
    assert not [end for end in ends if end["end"] == "failed"]


@pytest.mark.slow
def test_a_kill_in_the_last_validation_loses_nothing(home: Path, processes: Any, straight: Path):
    """What is expected to fail is the curve alone: everything before has another error."""
    log = home / "last_step.log"
    for death, code in ((killed_in_the_last_validation, -signal.SIGKILL), (no_death, 0)):
        child = started(processes, arguments(home, "last_step"), log, death)
        child.join()
        if child.exitcode != code:
            raise RuntimeError(log.read_text())
    assert lines(home / "logs/last_step/gsm/seed0") == lines(straight)


def killed_in_the_last_validation() -> None:
    """In the last validation, of which nothing is written yet."""

    def step(self: Any, *given: Any, whole: Callable[..., None] = LanguageModeling.validation_step) -> None:
        if self.trainer.global_step == self.trainer.max_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, *given)

    LanguageModeling.validation_step = step


GROUPS = ("optimizer", "model", "data", "trainer", "size")


@pytest.mark.parametrize("word", [word.format(group) for group in GROUPS for word in ("{}=null", "~{}")])
def test_a_group_that_a_run_needs_is_named_where_it_is_left_out(word: str):
    group = word.strip("~").partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{group} is (null|left out), but a run needs one of "):
        compose([word] if group == "size" else ["size=pico", word])


@pytest.mark.parametrize("word", ["model/writer=null", "model/residual=null", "model/feed_forward=null"])
def test_so_is_a_part_that_is_null(word: str):
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        compose(["size=pico", word])


@pytest.mark.parametrize("key", ["model.geometry", "data.context", "optimizer.learning_rate"])
def test_what_a_part_needs_is_named_where_it_is_left_out(key: str):
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} has no value, but gsm\.[\w.]+ needs one"):
        compose(["size=pico", f"~{key}"])


def test_a_run_may_do_without_loggers_and_callbacks(tmp_path: Path):
    """No curve and no checkpoint are left then, as was asked for."""
    with pytest.raises(ConfigError, match="^logger is null: write ~logger to do without"):
        compose(["size=pico", "logger=null"])
    given = arguments(home_of(tmp_path), "bare", "trainer.max_steps=2", "~logger", "~callbacks")
    config = compose([word for word in given if not word.startswith("callbacks.")])
    assert config["logger"] == config["callbacks"] == {}
    facts = train(config)
    assert facts["status"] == "finished" and facts["steps"] == 2
    assert {path.name for path in Path(config["folder"]).rglob("*") if path.is_file()} == {"summary.json", ".lock"}


def home_of(folder: Path) -> Path:
    """A folder with text to train on."""
    (folder / "text").mkdir()
    tiny_text.write(folder / "text")
    return folder


NOT_A_NAME = ("../../x", "..", ".", ".replaced", "null", "''", "' '", "a/b", "/x", "'a\u202eb'", "x" * 300, "[a,b]")


@pytest.mark.parametrize("word", [f"{key}={value}" for key in ("name", "arm") for value in NOT_A_NAME])
def test_a_name_is_one_folder(word: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"^{word.partition('=')[0]} is "):
        compose(["size=pico", f"logs={tmp_path / 'logs'}", word])


@pytest.mark.parametrize(
    "word", [f"{key}={value}" for key in ("logs", "folder") for value in ("''", "null", "/", "3", "[a]")]
)
def test_logs_are_somewhere(word: str):
    with pytest.raises(ConfigError, match=f"^{word.partition('=')[0]} is "):
        compose(["size=pico", word])


@pytest.mark.parametrize(
    "word", ["name='größer'", "arm=a-b.c", "name='two words'", "name=3", "logs=.", "folder=../beside"]
)
def test_other_names_and_places_are_as_good_as_before(word: str):
    assert compose(["size=pico", word])


@pytest.mark.parametrize("word", ["logs=''", "name=../../x", "folder=/", "data.path=/tmp/\udcff"])
def test_nothing_is_written_before_a_place_was_looked_at(word: str, tmp_path: Path):
    """Hydra makes the folder of a run itself, before the configuration is checked as a whole."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    command = [sys.executable, str(ROOT / "train.py"), f"logs={tmp_path / 'a/b'}", word]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
    assert not list(tmp_path.iterdir())


TASK = "documents: rows\nprompt: '{prompt}'\nchoices: '[a, b]'\ngold: '0'\nmetrics: [acc]\n"


def task(folder: Path, prompt: str = "Q", **more: str) -> Path:
    """A task file with this prompt and these fields, beside a document."""
    (folder / "rows.jsonl").write_text('{"a": "x", "b": "y"}\n')
    added = "".join(f"{key}: {value}\n" for key, value in more.items())
    (folder / "task.yaml").write_text(TASK.replace("{prompt}", prompt) + added)
    return folder / "task.yaml"


@pytest.mark.parametrize(
    "line",
    [
        "!!python/object/apply:os.getcwd []",
        "!own x",
        "!!timestamp soon",
        "2001-99-99",
        "'\\u0001'",
        "&rows [*rows]",
        "[" * 5000,
    ],
)
def test_a_task_file_that_yaml_stumbles_on_is_named(line: str, tmp_path: Path):
    path = tmp_path / "task.yaml"
    path.write_text(f"documents: {line}\n")
    with pytest.raises(ValueError, match=r"task\.yaml, line \d+: ") as said:
        read_task(path)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/../../secret", ".hidden", "x" * 300])
def test_the_documents_of_a_task_lie_in_its_folder(name: str, tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="have to be the name of a file in"):
        find(tmp_path / "data", name)
    path = task(tmp_path)
    for field in ("documents", "shot_documents"):
        kept = "".join(f"{line}\n" for line in TASK.splitlines() if not line.startswith(f"{field}:"))
        path.write_text(f"{kept}{field}: {name}\n")
        with pytest.raises(ValueError, match=f"{field} is .* but has to be the name of a file in data="):
            read_task(path)


@pytest.mark.parametrize(
    "text", ["a", '"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"'], ids=["of a field", "constant"]
)
def test_a_regular_expression_without_an_end_is_ended(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where it meets nothing but constants, it is computed when the file is read."""
    monkeypatch.setattr(task_files, "SECONDS", 0.5)
    path, before = task(tmp_path, f'{{{{ {text} | regex_replace("(a+)+$", "") }}}}'), signal.getsignal(signal.SIGVTALRM)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"a": "a" * 50 + "!", "b": "y"}))
    with pytest.raises(ValueError, match=r", line \d: prompt .* takes more than 0.5 seconds"):
        task_files.samples(read_task(path), tmp_path)
    assert signal.getsignal(signal.SIGVTALRM) == before and signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


def test_so_is_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(task_files, "SECONDS", 0.5)
    prompt = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: prompt of task task, .* takes more than 0.5 seconds"):
        task_files.samples(read_task(task(tmp_path, prompt)), tmp_path)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("{{ 10 ** 10 ** 9 }}", "a power has no place in a task"),
        ("{{ 99999999999 * a }}", "so long a repetition has no place in a task"),
        ("{{ [a] * 99999999999 }}", "so long a repetition has no place in a task"),
        ("{{ range(99999999999) | list }}", "Range too big"),
        ("{{ a.__class__.__mro__ }}", "access to attribute '__class__' .* is unsafe"),
        ('{{ a | regex_replace("(", "") }}', "unterminated subpattern"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_what_no_template_needs_is_one_sentence(prompt: str, said: str, tmp_path: Path):
    with pytest.raises(
        ValueError, match=f"prompt (of task task, .* cannot be made of it|is no template of Jinja): .*{said}"
    ):
        task_files.samples(read_task(task(tmp_path, prompt)), tmp_path)


def test_products_of_numbers_and_short_repetitions_stay(tmp_path: Path):
    (sample, *_) = task_files.samples(read_task(task(tmp_path, "{{ 3 * 4 }}{{ a * 3 }}{{ 2.5 * 2 }}")), tmp_path)
    assert sample.pairs[0][0] == "12xxx5.0"


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"a": "' + b"a" * (33 << 20) + b'"}'])
def test_a_document_that_is_none_is_named(line: bytes, tmp_path: Path):
    path = task(tmp_path)
    with (tmp_path / "rows.jsonl").open("ab") as file:
        file.write(line)
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: (this is no JSON|a document is an object)"):
        task_files.samples(read_task(path), tmp_path)


@pytest.mark.parametrize("subtask", ["../../x", "a/b", "\0"])
def test_a_subtask_names_no_place(subtask: str, tmp_path: Path):
    path = task(tmp_path, subtask="kind")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"a": "x", "b": "y", "kind": subtask}))
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: kind is .* but has to be a name without slashes"):
        task_files.samples(read_task(path), tmp_path)


def test_documents_that_are_fractions_are_not_cut_off():
    """0.2 and 0.7 would be the same document."""
    row = {name: np.array([1, 2, 3]) for name in ("tokens", "targets")} | {"documents": np.array([0.2, 0.7, 1.0])}
    with pytest.raises(ValueError, match="documents must be whole numbers, got float64"):
        ngrams.measure([row], [row], order=2, vocabulary=5, bytes_per_token=1.0)
