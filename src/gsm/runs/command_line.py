"""What the scripts at the root share: arguments checked before Hydra sees them, and errors as sentences, not as tracebacks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from gsm.runs.check import ConfigError
from gsm.runs.compose import check_overrides, from_job, register_resolvers


def prepare(arguments: Sequence[str] | None = None) -> None:
    """Before ``hydra.main``: makes the configs' resolvers known, and leaves with one sentence where a name is misspelt."""
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


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Leaves the process with the message alone where the user can put right what went wrong."""
    try:
        yield
    except (ConfigError, FloatingPointError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
