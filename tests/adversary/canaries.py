"""Whether the judge sees what it is there for: cases that have to fail, each in its way."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from adversary.outcome import Case, Wrong, attempt


def _raises(error: BaseException) -> object:
    raise error


def _swallowed(folder: Path) -> None:
    try:
        os.system("true")
    except BaseException:
        pass


def _imports(folder: Path) -> None:
    (folder / "strangers_module.py").touch()
    sys.path.insert(0, str(folder))
    __import__("strangers_module")


CANARIES = {
    "a raw traceback": lambda folder: {}["x"],
    "a raw error of a library": lambda folder: int("x"),
    "no sentence": lambda folder: _raises(SystemExit("error: two\nlines")),
    "it left without a sentence": lambda folder: _raises(SystemExit(1)),
    "wrong": lambda folder: _raises(Wrong("another result")),
    "it was about to call os.system": _swallowed,
    "it was about to call subprocess.Popen": lambda folder: subprocess.run(["true"], check=False),
    "it was about to open": lambda folder: (folder.parent / "beside").write_text("x"),
    "it was about to os.mkdir": lambda folder: (folder.parent / "beside").mkdir(),
    "it was about to import": _imports,
    "code of a stranger's choosing ran": lambda folder: (folder / "mark").touch(),
    "the process was ended by SIGSEGV": lambda folder: ctypes.string_at(0),
    "without bound: it had not ended": lambda folder: time.sleep(60),
    "without bound: MemoryError": lambda folder: bytearray(1 << 40),
    "without bound: [enforce fail": lambda folder: torch.empty(1 << 40),
}

if __name__ == "__main__":
    ends = {}
    for name, run in CANARIES.items():
        result = attempt(Case(run, name, seconds=2), "0", 0)
        ends[name] = [result.end, result.said]
    print(json.dumps(ends))
