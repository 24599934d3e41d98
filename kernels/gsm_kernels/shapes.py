"""Checking shapes by name: an argument called `query_BRHC` must have four dimensions, and its B is everybody's B."""

from __future__ import annotations

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
    for name, tensor in named.items() if inputs is None else zip(inputs._fields, inputs, strict=True):
        if not isinstance(tensor, Tensor) or not (letters := name.rpartition("_")[2]).isupper():
            continue
        shape = tensor.shape
        if len(shape) != len(letters):
            raise ValueError(f"{op}: {name} needs {len(letters)} dimensions {tuple(letters)}, got shape {tuple(shape)}")
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                known = f"{letter} = {sizes[letter]} by {_owner(letter, named if inputs is None else inputs._asdict())}"
                raise ValueError(f"{op}: {name} has shape {tuple(shape)}, so {letter} = {size}, but {known}")
    return sizes


def _owner(letter: str, given: dict[str, object]) -> str:
    """The first tensor with this letter."""
    return next(name for name, x in given.items() if isinstance(x, Tensor) and letter in name.rpartition("_")[2])


def require(op: str, holds: bool, message: str) -> None:
    """Raise ValueError naming the operation unless `holds`."""
    if not holds:
        raise ValueError(f"{op}: {message}")
