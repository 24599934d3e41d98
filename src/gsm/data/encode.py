"""Encode pieces of text to ids, in several threads, always in the same order.

This thread reads the text and hands it out in parcels of pieces. Each piece is encoded by itself, and parcels come back
in the order in which they went out. So neither the number of threads nor the size of parcels shows in the result. The
tokenizer's library computes without Python's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from gsm.data.ids import Encoded
from gsm.data.reading import Piece
from gsm.data.tokenizer import Tokenizer

PARCEL = 1 << 19  # characters of a parcel, at least, but for the last
MOST_PIECES = 1024


def encode_pieces(pieces: Iterator[Piece], tokenizer: Tokenizer, workers: int = 1) -> Generator[Encoded, None, None]:
    """Yield the ids of all pieces, a parcel at a time. One end of text follows the last piece of a document.

    Args:
        pieces: read a few parcels ahead.
        tokenizer: encodes them.
        workers: number of threads.
    """
    pool, waiting = ThreadPoolExecutor(workers), deque[Future[Encoded]]()
    try:
        for parcel in _parcels(pieces):
            waiting.append(pool.submit(encode_parcel, parcel, tokenizer))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def encode_parcel(parcel: list[Piece], tokenizer: Tokenizer) -> Encoded:
    """Return the ids of some pieces."""
    dtype = id_type(tokenizer)
    rows = tokenizer.encode_batch([piece.text for piece in parcel])
    ended = [ids + [tokenizer.end_of_text] if piece.last else ids for ids, piece in zip(rows, parcel, strict=True)]
    ids = np.concatenate([np.array(row, dtype=dtype) for row in ended])
    lengths = [len(piece.text.encode("utf-8", errors="replace")) for piece in parcel]
    return Encoded(ids, np.cumsum([len(row) for row in ended], dtype=np.int64), np.array(lengths, dtype=np.int64))


def id_type(tokenizer: Tokenizer) -> str:
    """Return the numpy type of the ids: two bytes while they fit."""
    return "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32"


def _parcels(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    parcel: list[Piece] = []
    size = 0
    for piece in pieces:
        parcel.append(piece)
        size += len(piece.text)
        if size >= PARCEL or len(parcel) == MOST_PIECES:
            yield parcel
            parcel, size = [], 0
    if parcel:
        yield parcel
