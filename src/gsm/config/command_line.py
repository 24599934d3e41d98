"""Shared code of the scripts at the root: errors, commands to print, and ``name=value`` arguments without Hydra."""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from gsm import paths
from gsm.config.check import ConfigError, unknown
from gsm.config.compose import folders_of, from_job, register_resolvers
from gsm.training.distributed.ranks import rank

TRUTH = {"true": True, "false": False}
NAMED = re.compile(r"[A-Za-z_]\w*=")
prepared = False  # True in a command of the project, False in an application that imports the package


def prepare() -> None:
    """Prepare a command for ``hydra.main``: register the resolvers, and check that the folders in GSM_CONFIGS exist."""
    global prepared
    prepared = True
    register_resolvers()
    threading.excepthook = _say_in_thread
    with errors_as_sentences():
        paths.config_folders()


def run(function: Callable[[dict[str, Any]], object], config: DictConfig) -> None:
    """Call ``function`` inside ``hydra.main`` with the configuration, resolved and checked, as plain containers.

    Raises JobFailed in a job of a sweep, so that Hydra goes on with the next one; else SystemExit.
    """
    global prepared
    prepared = True  # also in a process of a launcher, which begins here
    try:
        with errors_as_sentences():
            if own := folders_of(HydraConfig.get())[1:]:  # of --config-dir, too, for all that composes from here on
                os.environ["GSM_CONFIGS"] = os.pathsep.join(map(str, own))
            function(from_job(config))
    except SystemExit as stop:
        by_signal = isinstance(stop.code, int) and stop.code > 128
        if not sweeping() or by_signal or not stop.code:
            raise
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr, flush=True)
        raise JobFailed("a job of the sweep has failed") from stop
    except Exception as error:
        if not sweeping():
            raise
        traceback.print_exc()
        raise JobFailed("a job of the sweep has failed") from error


class JobFailed(CompactHydraException):
    """A job of a sweep has failed, and has printed why. Hydra goes on with the next one, and prints this at the end."""


def sweeping() -> bool:
    """Return whether this is a job of a sweep (``-m``), which other jobs follow."""
    return prepared and HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def call(function: Callable[..., object], script: str, arguments: Sequence[str] | None = None) -> None:
    """Call ``function`` with ``name=value`` arguments, in a script without a configuration.

    Values are taken literally, so that a prompt may hold any character. If the function takes any number of words
    (``*folders``), every word without ``name=`` is one of them.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config-dir")
    parsed, words = parser.parse_known_args(arguments)
    if parsed.config_dir:
        earlier = os.environ.get("GSM_CONFIGS", "").split(os.pathsep)
        os.environ["GSM_CONFIGS"] = os.pathsep.join(filter(None, [os.path.abspath(parsed.config_dir), *earlier]))
    taken = inspect.signature(function, eval_str=True).parameters
    several = [name for name, parameter in taken.items() if parameter.kind is inspect.Parameter.VAR_POSITIONAL]
    if not words or parsed.help:
        usage = " ".join([paths.called(script), *(f"{name} ..." for name in several), "name=value ..."])
        print(f"{usage}\n\n{_described(function.__doc__ or '', taken)}")
        return
    unnamed = [word for word in words if several and not NAMED.match(word)]
    with errors_as_sentences():
        paths.config_folders()
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
            raise ConfigError(f"arguments must be name=value, such as seed=1, got '{argument}'")
        if name not in taken:
            raise unknown("argument", name, taken, paths.called(script).removeprefix("python "))
        read, takes = KINDS.get(taken[name].annotation, (str, "str"))
        try:
            values[name] = read(text)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{name} must be {takes}, got '{text}'") from error
    missing = [n for n, p in taken.items() if p.default is inspect.Parameter.empty and n not in values]
    if missing:
        raise lacks(script, missing[0])
    return values


def lacks(script: str, argument: str) -> ConfigError:
    """Return the error for a missing argument of a script."""
    return ConfigError(f"{argument}= must be given; {paths.called(script)} --help explains it")


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


def assigned(text: str) -> dict[str, int]:
    """`pairs=1,asked=1` as a mapping. Raises ValueError for anything else."""
    return {name.strip(): int(value) for name, _, value in (word.partition("=") for word in listed(text))}


KINDS: dict[Any, tuple[Callable[[str], Any], str]] = {  # by annotation: the function that reads a word, and its type
    int: (int, "int"),
    float: (float, "float"),
    bool: (lambda text: TRUTH[text.lower()], "true or false"),
    Sequence[str]: (listed, "names separated by commas"),
    Sequence[int]: (whole_numbers, "whole numbers from 1 on, as 256,512, or a range first:last:step, as 256:4096:256"),
    Mapping[str, int]: (assigned, "names with whole numbers, as pairs=1,asked=1"),
}


def again() -> str:
    """Return the command that resumes this run; outside of a command, the call to repeat."""
    if not prepared:
        return "the same call of train"
    words = sys.argv[1:]
    program = [_program("python"), path_text(sys.argv[0])] if paths.in_clone() else [_program("gsm-train")]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        program = ["torchrun", "...", path_text(sys.argv[0])]
    return shlex.join([*program, *words])


def typed(program: str, *words: str) -> str:
    """Return a command to paste here: the program by its name where the shell would find this environment's.

    Args:
        program: one of the environment's, ``python`` or ``tensorboard``.
        words: its arguments, which are quoted for a shell.
    """
    return shlex.join([_program(program), *words])


def command(name: str, *words: str) -> str:
    """Return a command of the project to paste here: ``python train.py ...`` in a clone, else ``gsm-train ...``; with
    the folders of the user's own yamls."""
    before, flag = own_configs()
    program = ["python", path_text(paths.ROOT / f"{name}.py")] if paths.in_clone() else [f"gsm-{name}"]
    return before + typed(*program, *flag, *words)


def own_configs() -> tuple[str, list[str]]:
    """Return how a command names the folders of the user's own yamls: the assignment of GSM_CONFIGS before it, or, for
    one folder, the flag ``--config-dir`` and its value."""
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
        if error.errno is None:
            raise
        unnamed = "the reader of a pipe has ended" if isinstance(error, BrokenPipeError) else "a file of the run"
        raise SystemExit(f"error: {error.filename or unnamed}: {error.strerror}") from error
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


def _say_in_thread(args: threading.ExceptHookArgs) -> None:
    """Print the exception of a thread, except for OSError: TensorBoard's thread hands that to the main thread."""
    if not isinstance(args.exc_value, OSError):
        threading.__excepthook__(args)
