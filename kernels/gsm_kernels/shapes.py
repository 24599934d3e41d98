"""Checking shapes by name: an argument called `query_BRHC` must have four dimensions, and its B is everybody's B."""

from __future__ import annotations

from torch import Tensor


def agree(op: str, **given: object) -> dict[str, int]:
    """Match every tensor's shape with the letters that end its name; return the size of each letter.

    Arguments that are no tensors (None, numbers), and names that end in no letters, are passed over.

    Raises:
        ValueError: if a tensor has the wrong number of dimensions, or a letter two sizes.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, tensor in given.items():
        letters = name.rpartition("_")[2]
        if not isinstance(tensor, Tensor) or not letters.isupper():
            continue
        shape = tensor.shape
        if len(shape) != len(letters):
            raise ValueError(f"{op}: {name} needs {len(letters)} dimensions {tuple(letters)}, got shape {tuple(shape)}")
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                known = f"{letter} = {sizes[letter]} by {owner[letter]}"
                raise ValueError(f"{op}: {name} has shape {tuple(shape)}, so {letter} = {size}, but {known}")
            owner.setdefault(letter, name)
    return sizes


def require(op: str, holds: bool, message: str) -> None:
    """Raise ValueError naming the operation unless `holds`."""
    if not holds:
        raise ValueError(f"{op}: {message}")
