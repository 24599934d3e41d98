"""The merges of a BPE, learned from text; much text in a process of its own.

The library learns in one call that hears no Ctrl-C. A process can be ended. It is this module as a program: texts come
in on stdin, a JSON string a line, and the description of a tokenizer goes out on stdout, as another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain

LONGEST = 1024  # bytes: what merges may not cross is cut there, since the library takes the square of its length
FEW = 1 << 18  # characters: as much is learned here, in less time than another process needs to start


def learned(texts: Iterable[str], vocabulary: int, end: str) -> str:
    """The description (tokenizer.json) of a byte-level BPE of at most ``vocabulary`` ids, ``end`` being the first.

    Ctrl-C ends it at once.

    Raises:
        ChildProcessError: the process that learns ended before its time.
    """
    texts, first, size = iter(texts), [], 0
    for text in texts:
        first.append(text)
        size += len(text)
        if size > FEW:
            return _apart(chain(first, texts), vocabulary, end)
    return _learn(first, vocabulary, end)


def _learn(texts: Iterable[str], vocabulary: int, end: str) -> str:
    """The pieces that merges may not cross are GPT-2's, the longest of them cut. No ordinary text has such a piece."""
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


def _apart(texts: Iterable[str], vocabulary: int, end: str) -> str:
    """The same in a process of its own, which ends with this one, or when this one does not wait any more."""
    command = [sys.executable, "-m", "gsm.data.merges", str(vocabulary), end]
    there = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "ascii", "env": there}
    description = ""
    # In a group of its own: Ctrl-C reaches it through this process alone.
    child = subprocess.Popen(command, process_group=0, **options)
    with suppress(BrokenPipeError), child:  # which says so by its exit code
        assert child.stdin and child.stdout
        try:
            for text in texts:
                child.stdin.write(json.dumps(text) + "\n")
            child.stdin.close()
            description = child.stdout.read()
        except BaseException:
            child.kill()
            raise
    if child.returncode or not description:
        raise ChildProcessError(
            f"the process that learns a tokenizer ended before its time, with exit code {child.returncode} (out of "
            "memory?); data.tokenizer=bytes learns nothing, and less text takes less memory"
        )
    return json.loads(description)


def _texts() -> Iterator[str]:
    """What the parent writes."""
    yield from map(json.loads, sys.stdin)


def _end_with(parent: int) -> None:
    """A parent that was killed could not end this process."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    print(json.dumps(_learn(_texts(), int(sys.argv[1]), sys.argv[2])))
