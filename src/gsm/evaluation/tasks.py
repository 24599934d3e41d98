"""Downstream tasks: tasks of lm-evaluation-harness, and yaml files of your own in its format, which name no code.

``tasks.yaml`` has the titles of the tasks in our tables, and the local files of their documents. A yaml file of your
own takes its documents from local files too:

    dataset_path: json
    dataset_kwargs: {data_files: {test: rows.jsonl}}
    output_type: multiple_choice
    doc_to_text: "Question: {{question}}"
    doc_to_choice: "{{[right, wrong]}}"
    doc_to_target: 0

A yaml file may be a stranger's: tags, such as !function, and fields that name code are refused.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("tasks.yaml")
ENDINGS = (".jsonl", ".jsonl.xz")
METRICS = ("acc", "acc_norm", "perplexity")
KINDS = ("loglikelihood", "multiple_choice")  # `output_type` of tasks that log-likelihoods answer
# Fields of the harness that hold texts, numbers and names of splits: no code, and no path of a further file.
FIELDS = (
    "task task_alias tag dataset_path dataset_name dataset_kwargs output_type training_split validation_split "
    "test_split fewshot_split doc_to_text doc_to_choice doc_to_target description target_delimiter fewshot_delimiter "
    "num_fewshot metric_list metadata should_decontaminate doc_to_decontamination_query"
).split()


@dataclass(frozen=True)
class Task:
    """A downstream task.

    Attributes:
        name: as in ``tasks=``; for a yaml file its name without the ending.
        title: in tables.
        folder: the folder of this task among the harness's own; empty: anywhere.
        harness: the harness's name, where it is another one.
        files: names of the files of documents by split; ``test`` are the questions.
        subtask: field of a document that names its task in the harness's group of this name.
        shots: answered documents in front of each question.
        note: remark on the files, for tables.
        config: the fields of a yaml file.
        place: the yaml file.
    """

    name: str
    title: str
    folder: str = ""
    harness: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    subtask: str = ""
    shots: int | None = None
    note: str = ""
    config: Mapping[str, Any] | None = None
    place: Path = TABLE

    def paths(self, data: str) -> dict[str, Path] | None:
        """Return the local files by split; None: documents come from the hub.

        Args:
            data: the folder of the files; empty: the yaml file's folder, or the hub for a task of the harness.

        Raises:
            ValueError, FileNotFoundError: a name is not the name of a file, or the folder has no such file.
        """
        if not data and self.config is None:
            return None
        if not self.files:
            raise ValueError(
                f"data={data} is not allowed with task {self.name} because no local files are known for it. "
                f"{suggestion(self.name)}; or use a yaml file of your own, or leave data out"
            )
        folder = Path(data) if data else self.place.parent
        return {split: _find(folder, name, self.name) for split, name in self.files.items()}


def load(name: str) -> Task:
    """Return a task by its name, or from a yaml file. Raises ValueError, FileNotFoundError."""
    if name.endswith((".yaml", ".yml")):
        return read(Path(name))
    known = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return Task(name, **known.get(name, {"title": name}))


def require(chosen: Sequence[Task], data: str) -> None:
    """Raise FileNotFoundError that names all files that tasks lack."""
    missing = []
    for task in chosen:
        try:
            task.paths(data)
        except FileNotFoundError as error:
            missing.append(str(error))
    if missing:
        raise FileNotFoundError(f"{'; '.join(missing)}; each is a file with a JSON object a line")


def known() -> list[str]:
    """Return the names of the tasks in our tables."""
    return sorted(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


def suggestion(name: str) -> str:
    """Return a hint at the known name that is close to an unknown one."""
    near = difflib.get_close_matches(name, known(), n=1)
    return f"Did you mean {near[0]}" if near else f"Known are {', '.join(known())}"


def read(path: Path) -> Task:
    """Return the task of a yaml file. Raises FileNotFoundError; ValueError for a file that could run code."""
    text = path.read_text(encoding="utf-8")
    try:
        tokens = list(yaml.scan(text))
        config = yaml.safe_load(text) if not any(map(_refused, tokens)) else {}
    except Exception as error:  # yaml's own, and those of its constructors
        raise ValueError(f"{path} is no yaml: {' '.join(str(error).split())}") from error
    for token in filter(_refused, tokens):
        raise ValueError(
            f"{path}, line {token.start_mark.line + 1}: a {'tag' if _tag(token) else 'alias'} is not allowed because a "
            "task file is data, and no code in it is run. Use a Jinja template, or a task of the harness by its name"
        )
    _check(path, config)
    files, shots = config["dataset_kwargs"]["data_files"], config.get("num_fewshot", 0)
    return Task(path.stem, path.stem, files=files, shots=shots, config={**config, "task": path.stem}, place=path)


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a file, one a line. Raises ValueError that names file and line."""
    rows, number = [], 0
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, 1):  # noqa: B007
                rows.append(json.loads(line.decode("utf-8")))
        except (ValueError, RecursionError, lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{path}, line {max(number, len(rows) + 1)}: this is no JSON: {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: a document is an object of fields, as in {{'question': ...}}")
        if missing := rows[0].keys() - row.keys():  # a table would fill them with None, and a template would write None
            raise ValueError(f"{path}, line {number} lacks {', '.join(sorted(missing))}, which line 1 has")
    if not rows:
        raise ValueError(f"{path} holds no documents")
    return rows


def digest(task: Task, paths: Sequence[Path]) -> str:
    """Return the SHA-256 of a task's yaml file and of its documents, in hexadecimal."""
    total = hashlib.sha256()
    for path in (*([task.place] if task.config is not None else []), *paths):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _find(folder: Path, name: str, task: str) -> Path:
    if not (
        isinstance(name, str) and name.isprintable() and Path(name).name == name != ".." and len(name.encode()) < 200
    ):
        raise ValueError(f"documents of {task} are {name!a:.80}, but have to be the name of a file in {folder}")
    stem = name.removesuffix(".xz").removesuffix(".jsonl")
    for path in (folder / f"{stem}{ending}" for ending in ENDINGS):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder} lacks {stem}.jsonl (or .jsonl.xz) of {task}")


def _tag(token: Any) -> bool:
    return isinstance(token, yaml.TagToken)


def _refused(token: Any) -> bool:
    return _tag(token) or isinstance(token, yaml.AliasToken)  # a few aliases expand to any size


def _check(path: Path, config: Any) -> None:
    """Raise ValueError for a field that could name code, or that a table cannot use."""
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a task is a mapping of fields, such as doc_to_text: ...")
    for name in config:
        if name not in FIELDS:
            raise ValueError(
                f"{path}: {name!a:.80} is not allowed because it may name code or a file. Use {', '.join(FIELDS)}"
            )
    if config.get("output_type") not in KINDS:
        raise ValueError(
            f"{path}: output_type is {config.get('output_type')!r:.80}, but has to be {' or '.join(KINDS)}"
        )
    given = config.get("dataset_kwargs")
    files = given.get("data_files") if isinstance(given, dict) and set(given) == {"data_files"} else None
    if config.get("dataset_path") != "json" or not isinstance(files, dict) or "test" not in files:
        raise ValueError(
            f"{path}: documents have to be local files: dataset_path: json, dataset_kwargs: {{data_files: {{test: "
            "rows.jsonl}}}}, with names of files in data=, or beside the yaml"
        )
    shots = config.get("num_fewshot", 0)
    if type(shots) is not int or shots < 0 or shots and config.get("fewshot_split") not in {*files} - {"test"}:
        raise ValueError(f"{path}: num_fewshot is {shots!r:.80}, but needs a number, and a fewshot_split in data_files")
    metrics = config.get("metric_list", [{"metric": "acc"}])
    for entry in metrics if isinstance(metrics, list) else [metrics]:
        if not isinstance(entry, dict) or set(entry) - {"metric", "aggregation", "higher_is_better"}:
            raise ValueError(f"{path}: metric_list has {entry!r:.80}, but has to have entries such as {{metric: acc}}")
        if entry.get("metric") not in METRICS or entry.get("aggregation", "mean") not in ("mean", "perplexity"):
            raise ValueError(f"{path}: metric_list has {entry!r:.80}, but the metrics are {', '.join(METRICS)}")
