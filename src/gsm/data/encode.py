"""Pieces of text to ids, in this process or in several, always in the same order.

The text is read here and handed out in parcels of pieces; each piece is encoded for itself, and what comes back is put
together in the order in which it went out, so that neither the number of processes nor the parcels show in the result.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread

import numpy as np
from tqdm import tqdm

from gsm.data.reading import Piece
from gsm.data.shards import Encoded
from gsm.data.tokenizer import Tokenizer

PARCEL = 1 << 19  # characters, at least, but for the last
MOST_PIECES = 1024
_worker: list[Tokenizer] = []  # the tokenizer of a process that only encodes


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_pieces(pieces: Iterator[Piece], tokenizer: Tokenizer, workers: int = 1) -> Generator[Encoded, None, None]:
    """The ids of all pieces, a parcel at a time; a document's last piece is followed by one end of text.

    Args:
        pieces: read as they are wanted, and with several workers a few parcels ahead.
        tokenizer: what encodes them.
        workers: processes; 1 encodes here.

    Raises:
        ChildProcessError: a process ended before its time.
    """
    if workers == 1:
        yield from (encode_parcel(parcel, tokenizer) for parcel in _parcels(pieces))
        return
    with _processes(tokenizer, workers) as pool:
        waiting: deque[Future[Encoded]] = deque()
        for parcel in _parcels(pieces):
            waiting.append(pool.submit(_encode_there, parcel))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def encode_parcel(parcel: list[Piece], tokenizer: Tokenizer) -> Encoded:
    """Some pieces as ids, in this process."""
    kind = id_type(tokenizer)
    rows = tokenizer.encode_batch([piece.text for piece in parcel])
    ended = [ids + [tokenizer.end_of_text] if piece.last else ids for ids, piece in zip(rows, parcel, strict=True)]
    ids = np.concatenate([np.array(row, dtype=kind) for row in ended])
    lengths = [len(piece.text.encode("utf-8", errors="replace")) for piece in parcel]
    return Encoded(ids, np.cumsum([len(row) for row in ended], dtype=np.int64), np.array(lengths, dtype=np.int64))


def id_type(tokenizer: Tokenizer) -> str:
    """The numpy type that the ids are kept in: two bytes while they fit."""
    return "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32"


class Bar:
    """How far reading is, and how many tokens a second come of it, on stderr where that is a terminal.

    Args:
        name: of the split.
        size: bytes of input in all; None: nobody knows.
        limit: tokens wanted; where given, they are what is counted.
        done: tokens that were there before.
    """

    def __init__(self, name: str, size: int | None, limit: int | None = None, done: int = 0) -> None:
        self._by_tokens, self._first, self._tokens = limit is not None, done, done
        total, unit = (limit, "tok") if limit is not None else (size, "B")
        self._bar = tqdm(
            total=total,
            initial=done if self._by_tokens else 0,
            desc=f"encoding {name}",
            unit=unit,
            unit_scale=True,
            disable=None,
            mininterval=1,
            leave=False,
        )

    def moved(self, count: int) -> None:
        """Some bytes of input were taken in."""
        if not self._by_tokens:
            self._bar.update(count)

    def wrote(self, tokens: int) -> None:
        """There are `tokens` in all by now."""
        if self._by_tokens:
            self._bar.update(tokens - self._tokens)
        self._tokens = tokens
        elapsed = self._bar.format_dict["elapsed"] if not self._bar.disable else 0
        if elapsed:
            self._bar.set_postfix_str(f"{(tokens - self._first) / elapsed:,.0f} tokens/s", refresh=False)

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.close()


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


@contextmanager
def _processes(tokenizer: Tokenizer, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that were started afresh: a copy of this one would inherit its threads' locks, and a GPU's context."""
    with ExitStack() as stack:
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _become_worker, (tokenizer.to_state(),))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        try:
            yield pool
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a process that encodes text ended before its time (out of memory, or a script without "
                'if __name__ == "__main__"); set data.prepare_workers=1 to encode in the main process'
            ) from error


def _become_worker(state: dict[str, str | None]) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
    _worker[:] = [Tokenizer.from_state(state)]


def _end_with_parent() -> None:
    """A worker waits for its next parcel; one whose parent was killed would do so for ever, with all its memory."""
    parent = parent_process()
    assert parent is not None  # only workers call this
    parent.join()
    os._exit(1)


def _encode_there(parcel: list[Piece]) -> Encoded:
    return encode_parcel(parcel, _worker[0])
