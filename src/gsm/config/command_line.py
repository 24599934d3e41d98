"""The common part of the scripts at the root: a check of the arguments before Hydra, and errors as sentences."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gsm import paths
from gsm.config.check import ConfigError, unknown
from gsm.config.compose import SEARCH, explain, from_job, register_resolvers, searchpath_word
from gsm.config.handed import COMPOSED
from gsm.config.options import mapping
from gsm.training.distributed.ranks import rank

ROOM = "free some space there, and the same command goes on from the last checkpoint; or choose another disk with logs="
ACCESS = "choose a folder that you may write to with logs="
PLACE = "move it away, or choose another folder with logs= or name="
REMEDIES = {
    **dict.fromkeys([errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ROOM),
    **dict.fromkeys([errno.EROFS, errno.EACCES, errno.EPERM], ACCESS),
    **dict.fromkeys([errno.ENOTDIR, errno.EEXIST, errno.EISDIR], PLACE),
    errno.EIO: "the disk seems to be broken; choose another one with logs=",
}
OURS = "GSM_SENTENCES"  # tells the runs of an experiment that HYDRA_FULL_ERROR is not the user's wish for tracebacks
TRUTH = {"true": True, "false": False}
NAMED = re.compile(r"[A-Za-z_]\w*=")
TILDE = re.compile(r"=(~[^'\",\[\]{}]*)$")  # a path in the home, which Hydra reads only in quotes
TEXTS = ("prompt", "text")  # arguments that may begin with any character
prepared = False  # whether this process is a command of the project, and no application that calls it


def prepare(script: str = "train", part: str | None = None) -> None:
    """Before ``hydra.main``: register the resolvers of the yamls, and translate Hydra's errors.

    An error of Hydra's composition, or of the disk, then ends the process with one sentence instead of a traceback.

    Args:
        script: whose yaml is composed.
        part: a key of that yaml whose values may be given without its name.
    """
    global prepared
    prepared = True
    register_resolvers()
    if os.environ.get("HYDRA_FULL_ERROR") != "1" or OURS in os.environ:
        os.environ |= {"HYDRA_FULL_ERROR": "1", OURS: "1"}  # Hydra then raises, instead of printing a traceback itself
        sys.excepthook = functools.partial(_say, script)
        threading.excepthook = _say_in_thread
    sys.argv[1:] = [
        _at_home(word) if word.startswith("--config-dir=") else TILDE.sub(r"='\1'", word) for word in sys.argv[1:]
    ]
    parsed, strange = get_args_parser().parse_known_args(sys.argv[1:])
    _own_configs(parsed.config_dir)
    if parsed.help or parsed.hydra_help or parsed.shell_completion or COMPOSED in os.environ:
        return
    with errors_as_sentences():
        if strange:
            raise ConfigError(
                f"{strange[0]} is not allowed because it is no flag, or stands behind one. Use values without dashes, "
                "such as seed=1, and put flags, such as -m, last; see --help."
            )
        directories = paths.config_folders()[1:]
    words: list[str] = parsed.overrides
    if part:
        keys = _keys_of_part(words, script, part)
        changed = {word: f"{part}.{word}" for word in words if word.partition("=")[0] in keys}
        sys.argv[1:] = [changed.get(word, word) for word in sys.argv[1:]]
        words = [changed.get(word, word) for word in words]
    if directories and not any(word.startswith(SEARCH) for word in sys.argv):
        place = sys.argv.index(words[0]) if words else len(sys.argv)  # they stand together
        sys.argv.insert(place, searchpath_word(directories))


def _at_home(word: str) -> str:
    """Return a word ``name=value`` with the home in the place of a ``~`` of its value."""
    name, equals, value = word.partition("=")
    if not equals:
        return paths.at_home(word)
    return word if name in TEXTS else f"{name}={paths.at_home(value)}"


def _keys_of_part(words: Sequence[str], script: str, part: str) -> set[str]:
    """Return the keys of the chosen variant's yaml that the script's own yaml does not have."""
    config = mapping(paths.configs() / f"{script}.yaml")
    default = next(group[part] for group in config["defaults"] if part in group)
    name = next((word.partition("=")[2] for word in reversed(words) if word.startswith(f"{part}=")), default)
    files = [folder / part / f"{name}.yaml" for folder in paths.config_folders()]
    keys = {str(key) for file in files for key in mapping(file)}
    return {key for key in keys - {part, *map(str, config)} if key.isidentifier()}


def run(function: Callable[[dict[str, Any]], object], config: DictConfig) -> None:
    """Inside ``hydra.main``: calls ``function`` with the configuration, resolved, checked, and as plain containers.

    Raises JobFailed in a job of a sweep, so that Hydra goes on with the next one; else SystemExit.
    """
    global prepared
    prepared = True  # also in a process of a launcher, which begins here
    try:
        with errors_as_sentences():
            function(from_job(config))
    except SystemExit as stop:
        by_signal = isinstance(stop.code, int) and stop.code > 128
        if not sweeping() or by_signal or not stop.code:
            raise
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr, flush=True)
        raise JobFailed from stop
    except Exception as error:
        if not sweeping():
            raise
        traceback.print_exc()
        raise JobFailed from error


class JobFailed(Exception):
    """A job of a sweep has failed, and has printed why."""


def sweeping() -> bool:
    """Return whether this is a job of a sweep (``-m``), which other jobs follow."""
    return prepared and HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def call(function: Callable[..., object], script: str, arguments: Sequence[str] | None = None) -> None:
    """For scripts without a configuration: calls ``function`` with the ``name=value`` arguments it takes.

    Values are taken literally, so that a prompt may hold any character. If the function takes any number of words
    (``*folders``), every word without ``name=`` is one of them.
    """
    parsed, unparsed = get_args_parser().parse_known_args(sys.argv[1:] if arguments is None else arguments)
    words = [_at_home(word) for word in (*parsed.overrides, *unparsed)]
    _own_configs(parsed.config_dir)
    taken = inspect.signature(function, eval_str=True).parameters
    several = [name for name, parameter in taken.items() if parameter.kind is inspect.Parameter.VAR_POSITIONAL]
    if not words or parsed.help:
        usage = " ".join([paths.called(script), *(f"{name} ..." for name in several), "name=value ..."])
        print(f"{usage}\n\n{_described(function.__doc__ or '', taken)}")
        return
    unnamed = [word for word in words if several and not NAMED.match(word)]
    with errors_as_sentences():
        named = [word for word in words if word not in unnamed]
        function(*unnamed, **read_arguments(named, function, script, several))


def _described(text: str, taken: Mapping[str, inspect.Parameter]) -> str:
    """Return a docstring for ``--help``: the argument checkpoint first, and each with its default value."""
    before, heading, after = inspect.cleandoc(text).partition("Raises:")[0].partition("Args:\n")
    entries = re.split(r"\n+(?=    \w)", after.rstrip()) if after else []
    listed = []
    for entry in sorted(entries, key=lambda entry: not entry.startswith("    checkpoint:")):
        parameter = taken.get(entry.strip().partition(":")[0])
        default = parameter.default if parameter else None
        plain = default not in (None, "", inspect.Parameter.empty) and isinstance(default, str | int | float)
        word = str(default).lower() if isinstance(default, bool) else default
        listed.append(f"{entry} (default: {word})" if plain else entry)
    return before + heading + "\n".join(listed)


def _own_configs(folder: str | None) -> None:
    """Note the folder of the user's own yamls, before others, for this process and for those that it starts."""
    if not folder:
        return
    path = Path(paths.at_home(folder)).resolve()
    if not path.is_dir():
        raise SystemExit(f"error: --config-dir is '{folder}', but there is no such folder")
    earlier = [name for name in os.environ.get("GSM_CONFIGS", "").split(os.pathsep) if name]
    os.environ["GSM_CONFIGS"] = os.pathsep.join(dict.fromkeys([str(path), *earlier]))


def read_arguments(
    words: Sequence[str], function: Callable[..., object], script: str, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return ``name=value`` words as arguments of a function, each with the type of its parameter.

    Args:
        words: the words.
        function: the function that takes them.
        script: its name in errors.
        without: parameters that no word sets.

    Raises ConfigError for an argument that the function does not take, and for a missing one.
    """
    taken = inspect.signature(function, eval_str=True).parameters
    taken = {name: parameter for name, parameter in taken.items() if name not in without}
    values: dict[str, Any] = {}
    for argument in words:
        name, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"cannot read '{argument}': arguments look like name=value, for example seed=1")
        if name not in taken:
            raise unknown("argument", name, taken, paths.called(script).removeprefix("python "))
        read, takes = KINDS.get(taken[name].annotation, (str, "str"))
        try:
            values[name] = read(text)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{name} is '{text}', but takes {takes}") from error
    missing = [n for n, p in taken.items() if p.default is inspect.Parameter.empty and n not in values]
    if missing:
        raise lacks(script, missing[0])
    return values


def lacks(script: str, argument: str) -> ConfigError:
    """Return the error of a call without an argument that the script needs."""
    program = paths.called(script)
    return ConfigError(f"{program.removeprefix('python ')} needs {argument}=...; {program} --help says what it is")


def listed(text: str) -> list[str]:
    """`a,b` or `[a, b]` as a list."""
    return [word.strip() for word in text.strip("[]").split(",") if word.strip()]


def whole_numbers(text: str) -> list[int]:
    """`256,512`, or a range `first:last` or `first:last:step`, ascending. Raises ValueError for anything else."""
    if ":" in text:
        first, last, *steps = [int(word) for word in text.strip("[]").split(":")]
        numbers = list(range(first, last + 1, (steps or [first])[0]))
        if len(steps) > 1 or numbers[-1:] != [last]:
            raise ValueError(text)
    else:
        numbers = sorted({int(word) for word in listed(text)})
    if min(numbers, default=1) < 1:
        raise ValueError(text)
    return numbers


KINDS: dict[Any, tuple[Callable[[str], Any], str]] = {  # by annotation: how a word is read, and what it has to be
    int: (int, "int"),
    float: (float, "float"),
    bool: (lambda text: TRUTH[text.lower()], "true or false"),
    Sequence[str]: (listed, "names with commas between them"),
    Sequence[int]: (whole_numbers, "whole numbers from 1 on: 256,512, or 256:4096:256, whose steps end there"),
}


def again() -> str:
    """Return the command that runs this process once more, so that it goes on; for Python, the call to repeat."""
    if not prepared:
        return "the same call of train"
    words = [word for word in sys.argv[1:] if word != searchpath_word(paths.config_folders()[1:])]
    program = [_program("python"), path_text(sys.argv[0])] if paths.in_clone() else [_program("gsm-train")]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        program = ["torchrun", "...", path_text(sys.argv[0])]
    return shlex.join([*program, *words])


def typed(program: str, *words: str) -> str:
    """Return a command to paste here: the program by its name where the shell would find this environment's.

    Args:
        program: one of the environment's, ``python`` or ``tensorboard``.
        words: what follows it; those that a shell would take apart get quotes.
    """
    return shlex.join([_program(program), *words])


def command(name: str, *words: str) -> str:
    """Return a command of the project to paste here: ``python train.py ...`` in a clone, else ``gsm-train ...``; with
    the folders of the user's own yamls."""
    before, flag = own_configs()
    program = ["python", path_text(paths.ROOT / f"{name}.py")] if paths.in_clone() else [f"gsm-{name}"]
    return before + typed(*program, *flag, *words)


def own_configs() -> tuple[str, list[str]]:
    """Return what names the folders of the user's own yamls: the beginning of a command, and its flag, which takes one
    folder."""
    folders = list(map(str, paths.config_folders()[1:]))
    if len(folders) > 1:
        return f"GSM_CONFIGS={shlex.quote(os.pathsep.join(folders))} ", []
    return "", ["--config-dir", *folders] if folders else []


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as it is typed here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _program(program: str) -> str:
    """Return a program's name if the shell finds this environment's, else its path."""
    path = Path(sys.executable).parent / program
    return program if shutil.which(program) == str(path) else path_text(path)


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Exit with only the message of an error that the user can correct.

    All ranks meet the error; the leading rank prints it.
    """
    try:
        yield
    except (ConfigError, FloatingPointError, FileNotFoundError) as error:
        raise SystemExit(1 if rank() else f"error: {error}") from error
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        raise SystemExit(f"error: {refusal(error)}") from error
    except (MemoryError, RuntimeError) as error:
        from gsm.costs.room import out_of_memory  # imports PyTorch, too slow for the error of a misspelt word

        if not out_of_memory(error):
            raise
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise SystemExit(
            f"error: out of memory ({reason}): take a smaller data.batch_size, context or size="
        ) from error
    except KeyboardInterrupt as error:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from error


def _say(script: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that ends the process: one sentence where the user can correct it, else the traceback.

    This is where all errors of Hydra's composition are translated. Only the leading rank prints them.
    """
    words = get_args_parser().parse_known_args(sys.argv[1:])[0].overrides
    if isinstance(error, OSError) and error.errno in REMEDIES:
        print(f"error: {refusal(error)}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
    elif sentence := explain(error, words, paths.config_folders(), script):
        print("" if rank() else f"error: {sentence}\n", end="", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _say_in_thread(args: threading.ExceptHookArgs) -> None:
    """Print no OSError of a thread: TensorBoard's thread passes it to the main thread, which prints it."""
    if not isinstance(args.exc_value, OSError):
        threading.__excepthook__(args)


def refusal(error: OSError) -> str:
    """Return the sentence of a disk that refuses a file."""
    path = f"{error.filename} cannot be written" if error.filename else "a file of the run cannot be written"
    return f"{path}: {error.strerror}; {REMEDIES[error.errno or 0]}"
