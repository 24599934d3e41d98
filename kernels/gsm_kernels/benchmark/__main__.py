"""`python -m gsm_kernels.benchmark kernels only=attend`, `... compiled`, `... table FILE`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __doc__ as usage
from . import compiled, kernels, smoke
from .machine import Lost
from .report import markdown

LOST = 75  # the exit status where the GPU takes no more work from this process: another one goes on
READ: dict[str, Callable[[str], Any]] = {
    "str": str,
    "float": float,
    "int": int,
    "bool": {"true": True, "false": False}.__getitem__,
}


def main(words: Sequence[str]) -> None:
    """Calls what the first word names with the `name=value` words behind it; errors become one sentence."""
    commands = {"smoke": smoke.run, "kernels": kernels.run, "compiled": compiled.run}
    if words[:1] == ["table"] and len(words) == 2:
        command: Callable[[], object] = lambda: print(markdown(Path(words[1])))  # noqa: E731
    elif words and words[0] in commands:
        command = lambda: commands[words[0]](**_read(words[1:], commands[words[0]]))  # noqa: E731
    else:
        print(usage)
        return
    try:
        command()
    except Lost as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(LOST) from error
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt as error:
        raise SystemExit("interrupted: the same command goes on behind the last row") from error


def _read(words: Sequence[str], function: Callable[..., object]) -> dict[str, Any]:
    """Arguments by name, each of the type that the parameter has."""
    taken = {name: str(p.annotation) for name, p in inspect.signature(function).parameters.items()}
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
