"""Paths of the repository, and removal of its root from the import path.

`python train.py` puts the repository root on `sys.path`. The root has a folder `kernels/`, and the import system treats
any folder as a (namespace) package. So `import kernels` would find this folder instead of Hugging Face's optional
package of that name, which transformers looks for at import. Nothing is ever imported from the root, so scripts,
notebooks and tests remove it first:

    from gsm.paths import hide_root

    hide_root()

This is also why `kernels/` must never get an `__init__.py`: a regular package would hide the real one everywhere.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]
"""The repository, in an editable install; see `configs` for other installs."""
HOME = re.compile(r"~[\w.-]*(/|$)")  # beginning of a path in the home of this or another user
TRAINED = PACKAGE / "trained"
"""Packaged checkpoints, and files of some of their runs."""


def hide_root() -> None:
    """Remove the repository root from `sys.path`, in any spelling, so that no folder in it is treated as a package."""
    # An empty entry is the current folder, as in `python -c` and in notebooks.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != str(ROOT)]


def in_clone() -> bool:
    """Return whether this is a clone of the repository, with its scripts, and not an installed package."""
    return (ROOT / "pyproject.toml").is_file() and (ROOT / "train.py").is_file()


def has(part: str) -> bool:
    """Return whether a folder of the package is there: a user may delete the optional ones (`CONTRIBUTING.md`)."""
    return (PACKAGE / part / "__init__.py").is_file()


def called(script: str) -> str:
    """Return the command of a script: ``python generate.py`` in a clone, ``gsm-generate`` in an installed package."""
    name, _, words = script.partition(".py")
    return f"python {script}" if in_clone() else f"gsm-{name}{words}"


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install -c constraints.txt -e '.[{extra}]'" if in_clone() else f"pip install 'gsm-playground[{extra}]'"


def runs_home() -> Path:
    """Return the folder that has ``logs``: the clone or, in an installed package, the current folder."""
    return ROOT if in_clone() else Path.cwd()


def script(name: str) -> list[str]:
    """Return the arguments of the Python interpreter that start a command, such as ``train``, in a new process."""
    return [str(ROOT / f"{name}.py")] if in_clone() else ["-P", "-m", "gsm.scripts", name]  # -P: not the current folder


def configs() -> Path:
    """Return the folder of the yaml files: the repository's, or the copy in a wheel.

    Raises FileNotFoundError if there is neither.
    """
    for folder in (ROOT / "configs", PACKAGE / "configs"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"no folder {ROOT / 'configs'}: gsm was installed without its configs. Clone the repository and run "
        "`pip install -e .` in it"
    )


def config_folders(more: Sequence[Path] = ()) -> list[Path]:
    """Return the project's folder of yamls, the folders in GSM_CONFIGS, and ``more``.

    ``--config-dir`` sets GSM_CONFIGS, also for the child processes of a command. Raises FileNotFoundError as `configs`
    does, or if a folder in GSM_CONFIGS does not exist.
    """
    extra = [Path(at_home(name)).resolve() for name in os.environ.get("GSM_CONFIGS", "").split(os.pathsep) if name]
    for folder in extra:
        if not folder.is_dir():
            raise FileNotFoundError(f"GSM_CONFIGS names {folder}, but there is no such folder")
    return list(dict.fromkeys([configs(), *extra, *map(Path, more)]))


def digest(folders: Iterable[Path]) -> str:
    """Return SHA-256 of the names and contents of all yamls in these folders, in hexadecimal."""
    total = hashlib.sha256()
    for file in (file for folder in folders for file in yamls(folder)):
        with suppress(OSError):  # removed meanwhile, or not to be read: Hydra says so where it is chosen
            content = file.read_bytes()
            total.update(b"%s\0%d\0%s" % (os.fsencode(file), len(content), content))
    return total.hexdigest()


def yamls(folder: Path) -> list[Path]:
    """Return the yaml files in a folder and below it, also behind links, sorted, without hidden files, which editors
    and macOS make."""
    files = (folder / name for name in glob.iglob("**/*.yaml", root_dir=folder, recursive=True))
    return sorted(file for file in files if file.is_file())


def at_home(value: Any) -> Any:
    """Expand ``~`` at the beginning of a path as a shell does, also in lists and mappings; return other values as
    is."""
    if isinstance(value, str):
        return os.path.expanduser(value) if HOME.match(value) else value
    if isinstance(value, Mapping):
        return {key: at_home(below) for key, below in value.items()}
    return [at_home(below) for below in value] if isinstance(value, list) else value


def trained() -> dict[str, Path]:
    """Return the packaged checkpoints by name; any command takes these names for ``checkpoint``.

    ``nano`` was trained on text, the others on needles. ``gsm/trained/README.md`` documents their training.
    """
    return {file.parent.name: file.parent for file in sorted(TRAINED.glob("*/config.json"))}


def variants(group: str) -> list[str]:
    """Return the names of the yaml files of a group, sorted: `variants("model/writer")` returns `["additive", ...]`.

    Raises ValueError for a group that does not exist.
    """
    folder = configs() / group
    if not folder.is_dir():
        raise ValueError(f"config group {group!r} not found: {folder} is not a folder")
    return [path.stem for path in yamls(folder) if path.parent == folder]
