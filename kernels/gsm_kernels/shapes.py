"""Check shapes by name: `query_BRHC` must have four dimensions, and B must be the same in all arguments."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor


def agree(op: str, inputs: Any = None, **named: object) -> dict[str, int]:
    """Match every tensor's shape with the letters at the end of its name; return the size of each letter.

    Args:
        op: the operation's name, for the message.
        inputs: a NamedTuple of all arguments.
        named: the arguments, without such a tuple. Values that are not tensors (None, numbers) and names without
            letters are skipped.

    Raises:
        ValueError: if a tensor has the wrong number of dimensions, or a letter has two sizes.
    """
    sizes: dict[str, int] = {}
    names, values = (tuple(named), tuple(named.values())) if inputs is None else (inputs._fields, inputs)
    for place, letters in _lettered(names):
        tensor = values[place]
        if not isinstance(tensor, Tensor):
            continue
        shape = tensor.shape
        if len(shape) != len(letters):
            dimensions = f"{len(letters)} dimensions {tuple(letters)}"
            raise ValueError(f"{op}: {names[place]} must have {dimensions}, got shape {tuple(shape)}")
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                other = f"{letter} = {sizes[letter]} as in {_owner(letter, dict(zip(names, values, strict=True)))}"
                raise ValueError(f"{op}: {names[place]} must have {other}, got {letter} = {size}, shape {tuple(shape)}")
    return sizes


def _lettered(names: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """Return the place and the letters of each argument whose name has letters."""
    return _lettered_once(names)


# Like torch.compiler.assume_constant_result, whose import takes seconds: torch.compile cannot trace the cache.
_lettered._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _lettered_once(names: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    letters = [name.rpartition("_")[2] for name in names]
    return tuple((place, suffix) for place, suffix in enumerate(letters) if suffix.isupper())


def _owner(letter: str, named: dict[str, object]) -> str:
    """Return the name of the first tensor that has this letter."""
    return next(name for name, x in named.items() if isinstance(x, Tensor) and letter in name.rpartition("_")[2])


def require_divided_heads(op: str, sizes: dict[str, int]) -> None:
    """Raise ValueError unless the query heads (H) are a multiple of the key and value heads (G)."""
    heads, groups = sizes["H"], sizes["G"]
    require(op, heads % groups == 0, f"G, key and value heads, must divide H, query heads, got {groups} and {heads}")


def require(op: str, holds: bool, message: str) -> None:
    """Raise ValueError with the operation and the message, unless `holds`."""
    if not holds:
        raise ValueError(f"{op}: {message}")
