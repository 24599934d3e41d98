"""Every command of README.md and docs/commands.md runs: here with a small model, few steps and few examples.

What needs a GPU, or data that is not here, is composed alone, or says in one sentence what it needs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tiny_text
from short_runs import NO_PICTURES, typed

from gsm.paths import ROOT

PAGES = ("README.md", "docs/commands.md")
# Not run here: the shell's own, what other tests run (test_packaging, test_notebooks), and servers.
ELSEWHERE = ("git ", "make ", "source ", "jupyter ", "tensorboard ", "pip ")
# Who leaves what lies in a folder that is read: what has to be there, and the command.
BEFORE = {
    "logs/default": ("logs/default/gsm-seed0-*", "python train.py"),
    "logs/needle": ("logs/needle/results.md", "python train.py experiment=needle"),
}
# Processes from nothing, a sample; the others are forked from a process that has its imports done.
ALONE = (
    "python train.py",
    "python explore.py checkpoint=nano text_file=README.md",
    "python train.py trainer=ddp trainer.devices=2",
)
SAID = {"ruler=true": "ruler.lengths", "tasks=paper": "tasks"}  # in the one sentence of what cannot run here
LONG = ("size=1p5b", "benchmark.size=1p5b", "benchmark=inference", "benchmark=paper")  # takes a GPU, or half an hour
SMALL = {
    **{"size=tiny": "size=pico", "max_steps=1000": "max_steps=3", "max_steps=960": "max_steps=4"},
    **{"/path/to/texts": "texts", "seeds=3": "seeds=1"},
    **{"lengths=256:1024": "lengths=96:192", "ruler.lengths=160,256": "ruler.lengths=256"},
}
FEWER = {
    **{"data=ruler": "data.context=256", "ruler.template=short": "ruler.examples=2", "lengths=96:192": "windows=2"},
    "answers=96,1536,24576": "sequences=2",
    "benchmark=step": "benchmark.rounds=1",
    "experiment=needle": "arm=[shared_topk,stages_only]",
    "experiment=ablate_indexer": "arm=[shared_topk]",
}

TRAIN = (
    "size=pico",
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "data.validation_sequences=2",
    "ngrams=false",
    NO_PICTURES,
)
FEW: dict[str, tuple[str, ...]] = {
    "train.py": (*TRAIN, "sample=false", "logs=logs"),
    "generate.py": ("max_new_tokens=4",),
    "evaluate.py": ("device=cpu",),
    "explore.py": ("device=cpu", "tokens=64"),
    "compare.py": (),
    "export.py": (),
    "benchmark.py": (),
}


def commands() -> list[str]:
    """The lines of all blocks of shell, each once, without comments."""
    pages = [(ROOT / page).read_text() for page in PAGES]
    lines = [
        line for page in pages for block in re.findall(r"```bash\n(.*?)```", page, re.S) for line in block.split("\n")
    ]
    bare = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines]
    return list(dict.fromkeys(line for line in bare if line and not line.startswith(ELSEWHERE)))


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory, processes: Any) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a command in a folder with a few texts, after those whose runs it reads."""
    folder = tmp_path_factory.mktemp("walk")
    (folder / "texts").mkdir()
    tiny_text.write(folder / "texts")
    shutil.copy(ROOT / "README.md", folder)

    def run(line: str) -> subprocess.CompletedProcess[str]:
        for place, (left, command) in BEFORE.items():
            if place in line and not list(folder.glob(left)):
                assert run(command).returncode == 0, place
        script, *words = shorter(line)
        if script.endswith(".py") and line not in ALONE:
            return typed(processes, folder, script, *words)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        whole = [sys.executable, str(ROOT / script) if script.endswith(".py") else script, *words]
        return subprocess.run(
            whole, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )

    return run


def shorter(line: str) -> list[str]:
    """Return the words of a command after ``python``, with values that end it soon."""
    _, script, *words = shlex.split(line)
    if not script.endswith(".py") or (words and words[0].startswith("--")):
        return [script, *words]
    for long, short in SMALL.items():
        words = [word.replace(long, short) for word in words]
    if any(word in LONG for word in words):
        return [script, *words, "--cfg", "job"]
    few = [word for word in FEW[script] if word.partition("=")[0] not in {own.partition("=")[0] for own in words}]
    experiment = next((word.partition("=")[2] for word in words if word.startswith("experiment=")), None)
    few += [f"name={experiment}", "seeds=1"] if experiment else []
    few += [fewer for word, fewer in FEWER.items() if word in words]
    if script == "train.py" and not words:
        # The folder of the run without any of these, and steps that no other command has: it would rename the folder.
        few = [word for word in few if word not in (NO_PICTURES, "trainer.max_steps=2")] + [
            "arm=gsm",
            "trainer.max_steps=1",
        ]
    return [script, *words, *few]


def of_the_night(line: str) -> list[pytest.MarkDecorator]:
    """Another variant in the command of the first: test_configs composes it, and test_three_ways computes with it."""
    another = re.fullmatch(r"python train\.py '?(model|optimizer)[./]?\w*=\S+( model/\S+)?", line)
    return [pytest.mark.nightly] if another and "model=baseline" not in line else []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "line", ["python train.py", *(pytest.param(one, marks=of_the_night(one)) for one in commands())]
)
def test_a_command_of_the_documentation_runs(line: str, walk: Callable[[str], subprocess.CompletedProcess[str]]):
    done = walk(line)
    said = done.stdout + done.stderr
    refused = next((what for word, what in SAID.items() if word in line.split()), None)
    if refused:
        assert done.returncode != 0 and refused in done.stderr, said
        assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1, said
    else:
        assert done.returncode == 0, said
        assert not done.stderr, f"warnings: {done.stderr}"


def test_there_are_commands_on_both_pages():
    assert len(commands()) > 30 and any(line.startswith("python train.py experiment=") for line in commands())
