"""One case in a process of its own, and what became of it: the judge of the attack."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gsm_kernels
from gsm.paths import PACKAGE, ROOT
from gsm_kernels.cpu import native

RIGHT, NAMED, REFUSED, FAILED = "done right", "named error", "refused", "failed"
ENDS = (RIGHT, NAMED, REFUSED, FAILED)
WITHOUT_BOUND = "without bound"  # how a failure begins that is of memory or time
ROOM = 3 << 30  # bytes that a case may take besides what the process has
MARKER = "strangers_module"  # which no case may import
OURS = (PACKAGE, Path(gsm_kernels.__file__).resolve().parent)  # not known by a name, since a clone may lie anywhere
STARTED = (["git", "-C", str(ROOT)],)  # for its commit
STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.startfile", "pty.spawn", "subprocess.Popen", "socket.connect"}
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}


class Wrong(Exception):
    """Something was accepted, or computed, that is not right."""


class Caught(BaseException):
    """A case was about to do what none may do; it is not done."""


@dataclass(frozen=True)
class Case:
    """One attempt.

    Attributes:
        run: what is tried, given a folder of its own; returns where all went well.
        title: what it is, in a few words.
        names: one of these an error has to contain; none: an error may name anything.
        seconds: that it may take.
        outside: folders besides its own that it may write to.
    """

    run: Callable[[Path], object]
    title: str
    names: tuple[str, ...] = ()
    seconds: float = 30
    outside: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Result:
    """The end of a case. ``kind``: its class. ``said``: the error, or the fault."""

    kind: str
    seed: int
    title: str
    end: str
    said: str
    seconds: float


def attempt(case: Case, kind: str, seed: int, keep: Path | None = None) -> Result:
    """Try one case in a forked process, with limits of time and memory. ``keep``: a place for its folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"case-{kind}-{seed}-")).resolve()
    begun = time.monotonic()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking beside threads: none of them is needed there
        child = os.fork()
    if not child:
        os.close(reader)
        _be_a_case(case, folder, writer)
    os.close(writer)
    said, patience = b"", begun + case.seconds
    while select.select([reader], [], [], max(0.0, patience - time.monotonic()))[0]:
        more = os.read(reader, 1 << 16)
        said += more
        if not more:
            break
    hangs = not said and time.monotonic() >= patience
    _end(child)
    status = os.waitpid(child, 0)[1]
    os.close(reader)
    if hangs:
        end, words = FAILED, f"{WITHOUT_BOUND}: it had not ended after {case.seconds:g} seconds"
    elif said:
        end, words = json.loads(said)
    else:
        by = (
            signal.Signals(os.WTERMSIG(status)).name
            if os.WIFSIGNALED(status)
            else f"exit {os.waitstatus_to_exitcode(status)}"
        )
        end, words = FAILED, f"the process was ended by {by}"
    result = Result(kind, seed, case.title, end, words, time.monotonic() - begun)
    if keep:
        shutil.move(folder, keep)
    shutil.rmtree(folder, ignore_errors=True)
    return result


def _end(child: int) -> None:
    """The case and whatever it has started."""
    for send in (os.killpg, os.kill):
        try:
            send(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def _be_a_case(case: Case, folder: Path, writer: int) -> None:
    """Runs it, in the child, which never returns."""
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ["GSM_CACHE"] = str(folder / "cache")
        with open("printed.txt", "wb") as printed:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
        sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.dont_write_bytecode = True
        torch.set_num_threads(1)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        seen = _watch((folder, *case.outside))
        end, said = _judged(case, folder)
        if seen:
            end, said = FAILED, f"it was about to {seen[0]}"
        elif (folder / "mark").exists() or MARKER in sys.modules:
            end, said = FAILED, "code of a stranger's choosing ran"
        os.write(writer, json.dumps([end, said[:2000]]).encode())
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    os._exit(0)


def _watch(folders: tuple[Path, ...]) -> list[str]:
    """Stops what leaves these folders or starts a program, and notes it: an exception could be swallowed."""
    seen: list[str] = []
    compiled = native.cache_folder()  # made by whoever computes first
    allowed = tuple(os.path.realpath(folder) for folder in (*folders, compiled, "/dev", "/proc"))

    def inside(path: Any) -> bool:
        if isinstance(path, int) or path is None:
            return True
        real = os.path.realpath(os.fsdecode(path))
        return any(real == folder or real.startswith(f"{folder}/") for folder in allowed)

    def stop(what: str) -> None:
        seen.append(what)
        raise Caught(what)

    def hook(event: str, given: tuple) -> None:
        if event == "open":
            path, mode, flags = given
            writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if (writes or (isinstance(mode, str) and set(mode) & set("wax+"))) and not inside(path):
                stop(f"open {path!r} for writing")
        elif event in CHANGES:
            for path in given[:2]:
                if isinstance(path, str | bytes | os.PathLike) and not inside(path):
                    if event == "os.mkdir" and os.path.isdir(path):
                        continue  # which only asks whether it is there
                    stop(f"{event} {path!r}")
        elif event == "import" and given[0].split(".")[0] == MARKER:
            stop(f"import {given[0]}")
        elif event in STARTS:
            words = given[1] if event == "subprocess.Popen" else None
            if not (words and list(words)[:3] in STARTED):
                stop(f"call {event} with {given[:2]!r:.200}")

    sys.addaudithook(hook)
    return seen


def _judged(case: Case, folder: Path) -> tuple[str, str]:
    """Runs a case and says how it ended."""
    try:
        case.run(folder)
    except Wrong as error:
        return FAILED, f"wrong: {error}"
    except MemoryError as error:
        traceback.print_exc()
        return FAILED, f"{WITHOUT_BOUND}: MemoryError {error}"
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            return FAILED, f"{WITHOUT_BOUND}: {str(error).splitlines()[0]}"
        reason = fault(error, case.names)
        said = f"{type(error).__name__}: {error}"
        if reason:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return FAILED, f"{reason}: {said.splitlines()[0]:.300} ({Path(place.filename).name}:{place.lineno})"
        early = type(error).__name__ in ("ConfigError", "ValueError") or "is not trusted" in said
        return (REFUSED if early else NAMED), said
    return RIGHT, ""


def fault(error: BaseException, names: tuple[str, ...]) -> str:
    """Why an exception is not a sentence for the one who can put things right; empty if it is one."""
    said = str(error)
    if isinstance(error, SystemExit):
        if not (isinstance(error.code, str) and error.code.startswith("error: ")):
            return "it left without a sentence"
        said = error.code
    elif isinstance(error, OSError) and error.errno is not None:
        said = f"{error.filename} {error.strerror}"
    elif type(error) in (ValueError, FloatingPointError, FileNotFoundError, OSError):
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        if not any(last.is_relative_to(folder) for folder in OURS):
            return "a raw error of a library"
    elif not (isinstance(error, ValueError | FloatingPointError) and type(error).__module__.startswith("gsm")):
        return "a raw traceback"
    if len(said.strip().splitlines()) != 1 or " " not in said:
        return "no sentence"
    plain = said.lower().replace("_", " ")
    if names and not any(name.lower().replace("_", " ") in plain for name in names):
        return "a sentence that names neither field nor file"
    return ""
