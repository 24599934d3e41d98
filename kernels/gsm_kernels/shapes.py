"""Checking shapes by name: an argument called `query_BRHC` must have four dimensions, and its B is everybody's B."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor


def agree(op: str, inputs: Any = None, **named: object) -> dict[str, int]:
    """Match every tensor's shape with the letters that end its name; return the size of each letter.

    Args:
        op: the operation's name, for the message.
        inputs: a NamedTuple of all arguments.
        named: the arguments, where there is no such tuple. Either way, what is no tensor (None, numbers) and names that
            end in no letters are passed over.

    Raises:
        ValueError: if a tensor has the wrong number of dimensions, or a letter two sizes.
    """
    sizes: dict[str, int] = {}
    names, tensors = (tuple(named), named.values()) if inputs is None else (inputs._fields, inputs)
    for name, letters, tensor in zip(names, _letters(names), tensors, strict=True):
        if not letters or not isinstance(tensor, Tensor):
            continue
        shape = tensor.shape
        if len(shape) != len(letters):
            raise ValueError(f"{op}: {name} needs {len(letters)} dimensions {tuple(letters)}, got shape {tuple(shape)}")
        for letter, size in zip(letters, shape):  # noqa: B905, of equal lengths, and `strict` takes time in decoding
            if sizes.setdefault(letter, size) != size:
                known = f"{letter} = {sizes[letter]} by {_owner(letter, named if inputs is None else inputs._asdict())}"
                raise ValueError(f"{op}: {name} has shape {tuple(shape)}, so {letter} = {size}, but {known}")
    return sizes


def _letters(names: tuple[str, ...]) -> tuple[str, ...]:
    """The letters that names end in; empty for a name without."""
    return _ends(names)


@functools.cache
def _ends(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([end if (end := name.rpartition("_")[2]).isupper() else "" for name in names])


_letters._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _owner(letter: str, given: dict[str, object]) -> str:
    """The first tensor with this letter."""
    return next(name for name, x in given.items() if isinstance(x, Tensor) and letter in name.rpartition("_")[2])


def require(op: str, holds: bool, message: str) -> None:
    """Raise ValueError naming the operation unless `holds`."""
    if not holds:
        raise ValueError(f"{op}: {message}")
