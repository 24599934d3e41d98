"""A part can be added as a page shows it: its class, its yaml, and the command that trains it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gsm.paths import ROOT

COPIED = ("src", "configs", "pyproject.toml", "train.py")
FILE = re.compile(r"^`([\w/]+\.(?:py|yaml))`[^\n]*:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# The page, the heading of the example, and the folder of its class.
SHOWN = [
    ("tutorial_writer", "2. The class and its yaml", "src/gsm/slots/writer"),
    ("data", "Adding a task", "src/gsm/data"),
    ("decoder", "Adding a reader", "src/gsm/slots/state_reader"),
]
SMALLER = "size=pico trainer=cpu trainer.max_steps=2 ++data.validation_sequences=2 ngrams=false sample=false"
SMALLER += " callbacks.pictures=null"


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("page", "heading", "home"), SHOWN, ids=[page for page, _, _ in SHOWN])
def test_a_part_that_a_page_shows_trains(page: str, heading: str, home: str, tmp_path: Path):
    text = (ROOT / f"docs/{page}.md").read_text()
    section = re.split(r"^##+ ", text.partition(f" {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    files = dict(FILE.findall(section))
    assert len(files) == 2 and any(Path(name).parent == Path(home) for name in files)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for name, content in files.items():
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(content)
    (command,) = re.findall(r"```bash\npython (train\.py [^#\n]*)", section)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{ROOT / 'kernels'}"}
    words = [sys.executable, *shlex.split(command), *SMALLER.split()]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (summary,) = tmp_path.glob("logs/**/summary.json")
    assert '"status": "finished"' in summary.read_text()
