"""What every test needs before its first import, and the few fixtures they share."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gsm import threads  # which watches the machine during the imports below
from gsm.paths import hide_root

hide_root()  # before anything may look for the optional package `kernels` and find our folder of that name

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    # Read where a kernel is decorated, so it has to be set before the first module that holds one is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Share the cores among the test processes: more threads than cores make every test slower."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        threads.settle()
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))  # OMP_NUM_THREADS may say fewer


@pytest.fixture(autouse=True)
def no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that prepares a command leaves no process behind that takes itself for one."""
    monkeypatch.setattr("gsm.config.command_line.prepared", False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A kernel that ran astray has lost the GPU for its process: of several (pytest-xdist), that one is replaced."""
    if report.failed and torch.cuda.is_initialized() and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same numbers in every order of the tests and in every process."""
    torch.manual_seed(0)


@pytest.fixture
def float64() -> Iterator[None]:
    """Build and compute in float64 by default, for tests where equality is meant."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# For tests of how runs end and go on, with `short_runs`.


@pytest.fixture(scope="session")
def processes() -> Any:
    """Fresh processes that have their imports done already: to start one takes a tenth of a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gsm.training.run", "tensorboard.summary.writer.event_file_writer"])
    return context


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text that a run goes through more than once."""
    import tiny_text

    folder = tmp_path_factory.mktemp("home")
    (folder / "text").mkdir()
    for path in tiny_text.write(folder / "text").iterdir():
        path.write_text(path.read_text()[:150])
    return folder


@pytest.fixture(scope="session")
def straight(home: Path, processes: Any) -> Path:
    """The folder of a run that nothing happened to."""
    from short_runs import arguments, folder_of, no_death, started

    log = home / "straight.log"
    child = started(processes, arguments(home, "straight"), log, no_death)
    child.join()
    assert child.exitcode == 0, log.read_text()
    return folder_of(home / "logs/straight")
