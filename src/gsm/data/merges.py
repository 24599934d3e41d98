"""Learn the merges of a byte-level BPE from text.

The library learns in one call that hears no Ctrl-C. It runs in a thread of its own, so that Ctrl-C ends the wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from threading import Thread

LONGEST = 1024  # bytes of a piece that merges may not cross: the library takes the square of its length


def learned(texts: Iterable[str], vocabulary: int, end: str) -> str:
    """Return the description (tokenizer.json) of a byte-level BPE of at most ``vocabulary`` ids. Id 0 is ``end``."""
    texts, description = list(texts), Future[str]()

    def learn() -> None:
        try:
            description.set_result(_learn(texts, vocabulary, end))
        except BaseException as error:  # a panic of the library is no Exception
            description.set_exception(error)

    Thread(target=learn, daemon=True).start()
    return description.result()


def _learn(texts: Iterable[str], vocabulary: int, end: str) -> str:
    """Learn with the pieces of GPT-2, the longest of them cut. No ordinary text has a piece of that length."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.FixedLength(length=LONGEST)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[end], initial_alphabet=pieces.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.pre_tokenizer = pieces
    return bpe.to_str()
