"""Prompts of any length: token ids of a corpus, gone through again and again where it is too short."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gsm.data.module import TextData

STDLIB, RANDOM = "stdlib", "random"


class Text(NamedTuple):
    """Token ids, int64 [N], and what they are."""

    ids_N: Tensor
    name: str

    def cut(self, batch: int, length: int) -> Tensor:
        """int64 [batch, length]: one stretch of the text behind the other, from the beginning again where it ends."""
        count = batch * length
        return self.ids_N.repeat(-(-count // len(self.ids_N)))[:count].view(batch, length)


def text(source: str, vocabulary: int) -> Text:
    """The text that a size reads.

    Args:
        source: ``stdlib``, Python's standard library; ``random``, ids drawn uniformly; else a folder or a file of
            texts. A BPE of the model's vocabulary is trained on it, once, and kept.
        vocabulary: of the size.

    Raises:
        FileNotFoundError: there is nothing at that path.
    """
    if source == RANDOM:
        generator = torch.Generator().manual_seed(0)
        return Text(torch.randint(vocabulary, (1 << 18,), generator=generator), "ids drawn at random")
    path = None if source == STDLIB else source
    data = TextData(vocabulary=vocabulary, context=2, batch_size=1, path=path)
    ids = data.split("train").open()
    return Text(torch.from_numpy(ids[: len(ids)].astype("int64")), f"{data.corpus.name}, {len(ids):,} tokens")
