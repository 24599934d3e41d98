"""What the scripts at the root share: arguments checked before Hydra sees them, errors as sentences, not tracebacks."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from gsm.runs.check import ConfigError, unknown
from gsm.runs.compose import check_overrides, from_job, register_resolvers


def prepare(arguments: Sequence[str] | None = None) -> None:
    """Before ``hydra.main``: makes the configs' resolvers known; leaves with one sentence where a name is misspelt."""
    register_resolvers()
    parsed, _ = get_args_parser().parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if parsed.help or parsed.hydra_help or parsed.shell_completion:
        return
    directories = [Path(parsed.config_dir).resolve()] if parsed.config_dir else []
    with errors_as_sentences():
        check_overrides(parsed.overrides, directories)


def run(function: Callable[[dict[str, Any]], object], config: DictConfig) -> None:
    """Inside ``hydra.main``: calls ``function`` with the configuration, resolved, checked, and as plain containers."""
    with errors_as_sentences():
        function(from_job(config))


def call(function: Callable[..., object], script: str, arguments: Sequence[str] | None = None) -> None:
    """For scripts without a configuration: calls ``function`` with the ``name=value`` arguments it takes.

    Values are taken literally, so that a prompt may hold any character.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if not given or "--help" in given or "-h" in given:
        print(f"python {script} name=value ...\n\n{inspect.cleandoc(function.__doc__ or '').partition('Raises:')[0]}")
        return
    with errors_as_sentences():
        function(**_read(given, inspect.signature(function, eval_str=True).parameters, script))


def _read(given: Sequence[str], taken: Mapping[str, inspect.Parameter], script: str) -> dict[str, Any]:
    """Arguments by name, each of the type that the parameter has."""
    values: dict[str, Any] = {}
    for argument in given:
        name, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"cannot read '{argument}': arguments look like name=value, for example seed=1")
        if name not in taken:
            raise unknown("argument", name, taken, script)
        kind = taken[name].annotation
        kind = kind if kind in (int, float) else str
        try:
            values[name] = kind(text)
        except ValueError as error:
            raise ConfigError(f"{name} is '{text}', but takes {kind.__name__}") from error
    missing = [n for n, p in taken.items() if p.default is inspect.Parameter.empty and n not in values]
    if missing:
        raise ConfigError(f"{script} needs {missing[0]}=...; python {script} --help says what it is")
    return values


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Leaves the process with the message alone where the user can put right what went wrong."""
    try:
        yield
    except (ConfigError, FloatingPointError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
