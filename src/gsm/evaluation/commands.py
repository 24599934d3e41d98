"""What `evaluate.py` can do, chosen by what is given: held-out loss, downstream tasks, RULER, perplexity by length."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Command:
    """A measure of checkpoints. Its module, imported when it is wanted, has `evaluate`, and `metrics` of what that has
    written.

    Attributes:
        name: as its help says it.
        module: where it is.
        output: what it writes into a folder that it is given to itself.
        takes_folder: whether its `output=` is that folder, rather than the file.
    """

    name: str
    module: str
    output: str
    takes_folder: bool = False

    @property
    def evaluate(self) -> Callable[..., Any]:
        """The function that the arguments go to."""
        return import_module(self.module).evaluate

    def place(self, folder: Path) -> Path:
        """What to say for `output=` so that everything lies in this folder."""
        return folder if self.takes_folder else folder / self.output

    def metrics(self, folder: Path) -> dict[str, float]:
        """The numbers that it has left in this folder, by name. Raises OSError."""
        return import_module(self.module).metrics(json.loads((folder / self.output).read_text(encoding="utf-8")))


TEXT = Command("evaluate.py", "gsm.evaluation.held_out", "evaluation.json")
TASKS = Command("evaluate.py", "gsm.evaluation.downstream", "tasks.json", takes_folder=True)
RULER = Command("evaluate.py ruler=true", "gsm.evaluation.ruler", "ruler.json")
LENGTHS = Command("evaluate.py", "gsm.evaluation.lengths", "lengths.json")


def choose(words: Sequence[str]) -> tuple[Command, list[str]]:
    """The command that `name=value` words ask for, and its own arguments."""
    of_ruler = [word.removeprefix("ruler.") for word in words if word.startswith("ruler.")]
    rest = [word for word in words if not word.startswith("ruler.")]
    if any(word.startswith("tasks=") for word in words):  # which has a table with RULER in it
        alone = [word for word in rest if not (of_ruler and word == "ruler=true")]
        return TASKS, [*alone, *([f"ruler={' '.join(of_ruler)}"] if of_ruler else [])]
    if of_ruler or "ruler=true" in words:
        return RULER, [*(word for word in rest if word != "ruler=true"), *of_ruler]
    return LENGTHS if any(word.startswith("lengths=") for word in words) else TEXT, list(words)


def words(asked: Mapping[str, Any]) -> list[str]:
    """`name=value` for each entry; a list with commas between."""
    return [f"{name}={_text(value)}" for name, value in asked.items() if value is not None]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
