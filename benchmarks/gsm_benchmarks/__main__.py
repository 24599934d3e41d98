"""`python -m gsm_benchmarks smoke`, `... kernels only=attend`, `... compiled`: what needs no Hydra, for `gpu.py`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import compiled, kernels, smoke
from .machine import Lost
from .results import Asked

T = TypeVar("T")
LOST = 75  # the exit status where the GPU takes no more work from this process: another one goes on
COMMANDS = {"smoke": smoke.run, "kernels": kernels.run, "compiled": compiled.run}
READ: dict[str, Callable[[str], Any]] = {
    "str": str,
    "float": float,
    "int": int,
    "bool": {"true": True, "false": False}.__getitem__,
}


def main(words: Sequence[str]) -> None:
    """Call what the first word names with the `name=value` words behind it."""
    if not words or words[0] not in COMMANDS:
        raise SystemExit(f"error: say {', '.join(COMMANDS)}, and name=value words behind it")
    call(COMMANDS[words[0]], words[1:])


def call(command: Callable[..., T], words: Sequence[str]) -> T:
    """What a command returns, given `name=value` words; errors become one sentence."""
    try:
        return command(**_read(words, command))
    except Lost as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(LOST) from error
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt as error:
        raise SystemExit("interrupted: the same command goes on behind what has ended") from error


def _read(words: Sequence[str], function: Callable[..., object]) -> dict[str, Any]:
    """Arguments by name, each of the type that the parameter has."""
    own = inspect.signature(function).parameters
    common = inspect.signature(Asked).parameters if "asked" in own else {}
    taken = {name: str(p.annotation) for name, p in {**common, **own}.items()}
    values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or taken.get(name) not in READ:
            known = ", ".join(f"{name}=" for name, kind in taken.items() if kind in READ)
            raise ValueError(f"cannot read '{word}'; there are {known}")
        try:
            values[name] = READ[taken[name]](text)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{name} is '{text}', but takes {taken[name]}") from error
    return values


if __name__ == "__main__":
    main(sys.argv[1:])
