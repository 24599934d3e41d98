"""Text files that are not of the kind that their names claim, or far longer."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from adversary import inside
from adversary.outcome import Case
from adversary.world import World

BOMB = 32 << 20  # bytes that a small file becomes


def case(draw: random.Random, world: World) -> Case:
    """A folder with sound files and one that is not."""
    kind = draw.choice(list(KINDS))
    state = draw.getstate()

    def run(folder: Path) -> None:
        draw.setstate(state)
        (folder / "text").mkdir()
        for path in sorted((world.home / "text").iterdir()):
            (folder / "text" / path.name).write_bytes(path.read_bytes())
        name, content = KINDS[kind](draw)
        (folder / "text" / name).write_bytes(content)
        places = [f"data.path={folder / 'text'}", f"data.cache_dir={folder / 'cache'}", "data.files=['*']"]
        learns = draw.choice([[], [], ["data.tokenizer=bpe", "size.vocabulary=300"]])
        found = inside.ids(world.config("text", *places, *learns))
        assert found

    return Case(run, kind, ("text", "file", "line", "data"), 40)


KINDS = {
    "not UTF-8": lambda draw: ("a.txt", draw.randbytes(3000)),
    "NULs": lambda draw: ("a.txt", bytes(draw.choice([1, 1000, 200_000]))),
    "one character over and over": lambda draw: ("a.txt", draw.choice([b"\0", b" ", b"a", b"\xff"]) * 2_000_000),
    "nothing": lambda draw: ("a.txt", b""),
    "no gzip": lambda draw: ("a.jsonl.gz", draw.randbytes(500)),
    "half a gzip": lambda draw: ("a.jsonl.gz", gzip.compress(b'{"text": "a b c"}\n' * 500)[: draw.randrange(40, 60)]),
    "a line that is a bomb": lambda draw: ("a.jsonl.gz", gzip.compress(b'{"text": "' + b"a" * BOMB + b'"}\n')),
    "deep JSON": lambda draw: ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
    "JSON of another kind": lambda draw: (
        "a.jsonl",
        "\n".join(
            draw.choice(["[1]", "3", "null", '{"text": 3}', '{"text": null}', "{}", '"x"', "nan"]) for _ in range(9)
        ).encode(),
    ),
    "a number of many digits": lambda draw: ("a.jsonl", b'{"text": "a", "n": ' + b"9" * 10_000 + b"}\n"),
    "lone surrogates": lambda draw: ("a.jsonl", json.dumps({"text": "\ud800 a \udfff"}).encode() + b"\n"),
    "no parquet": lambda draw: ("a.parquet", b"PAR1" + draw.randbytes(300) + b"PAR1"),
    "no zstandard": lambda draw: ("a.jsonl.zst", draw.randbytes(300)),
}
