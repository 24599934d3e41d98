"""Explorer, Hugging Face, compiled loops and context parallelism can be deleted, all or each alone, and the rest works.

Every command that a run names afterwards can be called, and the command of a deleted part ends in one sentence.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gsm.paths import ROOT

COPIED = (
    "src",
    "kernels",
    "configs",
    "tests",
    "pyproject.toml",
    "train.py",
    *("evaluate.py", "generate.py", "explore.py", "export.py"),
)
# For each part its folder, the one line elsewhere that names it, and its command, where there are such.
PARTS = {
    "explorer": ("src/gsm/explorer", None, "explore.py"),
    "Hugging Face": ("src/gsm/hf", None, "export.py"),
    "compiled loops": ("kernels/gsm_kernels/cpu", ("kernels/gsm_kernels/__init__.py", "from . import cpu "), None),
    "context parallelism": ("src/gsm/context", None, None),
}
# By the package of each part, the tests that go with it.
OWN = {
    "gsm.explorer": {"test_explorer.py"},
    "gsm.hf": {"test_hf.py", "test_hf_calls.py"},
    "gsm.context": {"test_pieces.py"},
}
TESTS = ("test_prompts.py", "ops/test_dispatch.py")
TRAIN = "size=pico data=needle seeds=1 jobs=1 trainer=cpu trainer.max_steps=2 data.validation_sequences=2 sample=false"
TRAIN += " callbacks.pictures=null"
IMPORTED = "import gsm, gsm_kernels; print(gsm.__file__)"


@pytest.fixture(
    params=[tuple(PARTS), *(pytest.param((part,), marks=pytest.mark.nightly) for part in PARTS)], ids=" and ".join
)
def parts(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture
def rest(parts: tuple[str, ...], tmp_path: Path) -> Path:
    """A copy of the repository without these parts."""
    ignored = shutil.ignore_patterns("__pycache__", "logs", ".*")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / name)
    for folder, line, _ in (PARTS[part] for part in parts):
        shutil.rmtree(tmp_path / folder)
        if line is not None:
            path, start = tmp_path / line[0], line[1]
            lines = path.read_text().splitlines(keepends=True)
            others = [one for one in lines if not one.startswith(start)]
            assert len(others) == len(lines) - 1, f"{path} names the part in one line"
            path.write_text("".join(others))
    return tmp_path


def call(rest: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call Python in the copy."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment = {**kept, "PYTHONPATH": f"{rest / 'src'}:{rest / 'kernels'}", "GSM_CACHE": str(rest / "cache")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=rest, env=environment, capture_output=True, text=True, timeout=600, check=False)


def run(rest: Path, *arguments: str) -> str:
    """Return the output of Python in the copy; fail with it where the command fails."""
    done = call(rest, *arguments)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    return output


@pytest.mark.parametrize("package", OWN)
def test_only_a_part_s_own_tests_import_it(package: str) -> None:
    imports = re.compile(rf"^\s*(?:from|import) {re.escape(package)}\b", re.MULTILINE)
    assert {path.name for path in (ROOT / "tests").rglob("*.py") if imports.search(path.read_text())} == OWN[package]


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_parts_can_be_deleted_and_the_rest_works(rest: Path, parts: tuple[str, ...]) -> None:
    tests = [str(rest / "tests" / name) for name in TESTS]
    assert run(rest, "-c", IMPORTED).startswith(str(rest / "src")), "the copy is what runs"
    run(rest, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not nightly", *tests)
    _, _, following = run(rest, "train.py", *TRAIN.split()).partition("Next:\n")
    assert following, "a run names commands to go on with"
    for script in re.findall(r"python (\w+\.py)", following):
        run(rest, script, "--help")
    (checkpoint,) = rest.glob("logs/**/step_*")
    assert "nats per token" in run(rest, "evaluate.py", f"checkpoint={checkpoint}", "device=cpu")
    for folder, _, script in (PARTS[part] for part in parts):
        if script:
            done = call(rest, script, "checkpoint=nano")
            assert done.returncode == 1
            refusal = f"error: this command needs {folder}, which has been deleted. Use a whole copy of GSM.\n"
            assert done.stderr == refusal
