"""Where the repository lies, and how to keep its root off the import path.

`python train.py` puts the repository root on `sys.path`. The root holds a folder `kernels/`, and the import system
takes any folder for a (namespace) package: `import kernels` would answer with ours where the optional package of that
name by Hugging Face is meant, which transformers looks for when it is imported. Nothing is ever imported from the root,
so scripts, notebooks and tests drop it first of all:

    from gsm.paths import hide_root

    hide_root()

This is also why `kernels/` must never get an `__init__.py`: a regular package would hide the real one everywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]
"""The repository, seen from an editable install; see `configs` for what happens without one."""
TRAINED = PACKAGE / "trained"
"""Checkpoints that come with the package, and what some of their runs have written."""


def hide_root() -> None:
    """Drop the repository root from `sys.path`, however it is spelt, so that no folder in it is taken for a package."""
    sys.path[:] = [entry for entry in sys.path if not _is_root(entry)]


def in_clone() -> bool:
    """Whether this is a clone of the repository, with its scripts, and not a package that was installed."""
    return (ROOT / "pyproject.toml").is_file() and (ROOT / "train.py").is_file()


def called(script: str) -> str:
    """How a script is called: ``python generate.py`` in a clone, ``gsm-generate`` where the package is installed."""
    name, _, words = script.partition(".py")
    return f"python {script}" if in_clone() else f"gsm-{name}{words}"


def install(extra: str) -> str:
    """What installs an extra, here."""
    return f"pip install -c constraints.txt -e '.[{extra}]'" if in_clone() else f"pip install 'gsm-playground[{extra}]'"


def runs_home() -> Path:
    """Where runs leave what they make, in ``logs``: the clone, or where there is none, the current folder."""
    return ROOT if in_clone() else Path.cwd()


def script(name: str) -> list[str]:
    """The words, after Python's, that start a command of the project in a process of its own: of ``train``, ..."""
    return (
        [str(ROOT / f"{name}.py")] if in_clone() else ["-P", "-m", "gsm.scripts", name]
    )  # not from the current folder


def configs() -> Path:
    """The folder of the yaml files: the repository's, or where there is none, the copy that a wheel brings along.

    Raises FileNotFoundError where there is neither.
    """
    for folder in (ROOT / "configs", PACKAGE / "configs"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"no folder {ROOT / 'configs'}: gsm was installed without its configs; "
        "clone the repository and run `pip install -e .` in it"
    )


def config_folders(more: Sequence[Path] = ()) -> list[Path]:
    """The project's folder of yamls, those that GSM_CONFIGS names (``--config-dir`` sets it, for the processes that a
    command starts as well), and more. Raises FileNotFoundError as `configs` does, or where one of those is gone."""
    own = [Path(name).resolve() for name in os.environ.get("GSM_CONFIGS", "").split(os.pathsep) if name]
    for folder in own:
        if not folder.is_dir():
            raise FileNotFoundError(f"GSM_CONFIGS names {folder}, but there is no such folder")
    return list(dict.fromkeys([configs(), *own, *map(Path, more)]))


def stamp(folders: Iterable[Path]) -> float:
    """When a yaml or a folder in these changed last."""
    return max(path.stat().st_mtime for folder in folders for path in [folder, *folder.rglob("*")])


def trained() -> dict[str, Path]:
    """The checkpoints that come with the package, by the name that stands for them wherever a checkpoint is asked for:
    ``nano`` has read text, the others have learned to find needles. ``gsm/trained/README.md`` says how they were made.
    """
    return {file.stem: file for file in sorted(TRAINED.glob("*.ckpt"))}


def variants(group: str) -> list[str]:
    """Return the names of the yaml files of one group, sorted: `variants("model/writer")` gives `["additive", ...]`.

    Raises ValueError for a group that does not exist.
    """
    folder = configs() / group
    if not folder.is_dir():
        raise ValueError(f"config group {group!r} not found: {folder} is not a folder")
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _is_root(entry: str) -> bool:
    """An empty entry stands for the current folder, as in `python -c` and in notebooks."""
    return os.path.realpath(entry or os.curdir) == str(ROOT)
