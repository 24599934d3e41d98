"""Both tokenizers: exact, closed against the end of text, streamable, portable as plain strings."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import tiny_text

from gsm.data.corpus import Corpus, standard_library
from gsm.data.tokenizer import SMALLEST, Tokenizer

AWKWARD = ["", "plain", "naïve — 東京 🐍\r\n\t x", "<|endoftext|>", "\x00\x7f", "    if a:\n        return  b"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.write(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module", params=["bpe", "bytes"])
def tokenizer(request: pytest.FixtureRequest, text: Path) -> Tokenizer:
    is_bpe = request.param == "bpe"
    return Tokenizer.train(Corpus(text).documents("train"), 320) if is_bpe else Tokenizer.plain_bytes()


def test_every_text_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    for text, ids in zip(AWKWARD, tokenizer.encode_batch(AWKWARD), strict=True):
        assert tokenizer.decode(ids) == text
        assert ids == tokenizer.encode(text)
        assert sum(tokenizer.token_lengths_V[ids]) == len(text.encode())


def test_text_never_makes_an_end_of_text(tokenizer: Tokenizer) -> None:
    again = Tokenizer.from_state(tokenizer.to_state())
    for one in (tokenizer, again):
        assert one.end_of_text not in one.encode("a<|endoftext|>b")
    assert tokenizer.decode([tokenizer.end_of_text]) == ""
    assert tokenizer.token_lengths_V[tokenizer.end_of_text] == 0


def test_streamed_text_is_whole_characters_and_adds_up(tokenizer: Tokenizer) -> None:
    text = "naïve 東京 🐍!"
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(text)] + [stream.finish()]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    unfinished = tokenizer.stream()
    assert [unfinished.push(tokenizer.encode("🐍")[0]), unfinished.finish()] == ["", "\N{REPLACEMENT CHARACTER}"]


def test_a_tokenizer_travels_as_plain_strings(tokenizer: Tokenizer) -> None:
    state = json.loads(json.dumps(tokenizer.to_state()))
    again = Tokenizer.from_state(state)
    assert (again.kind, again.vocabulary, again.end_of_text) == (
        tokenizer.kind,
        tokenizer.vocabulary,
        tokenizer.end_of_text,
    )
    assert again.encode_batch(AWKWARD) == tokenizer.encode_batch(AWKWARD)
    assert again.digest == tokenizer.digest


def test_ids_that_only_the_model_has_decode_to_a_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocabulary, 10**6]) == "\N{REPLACEMENT CHARACTER}" * 2
    with pytest.raises(ValueError, match="-1"):
        tokenizer.decode([-1])


def test_training_is_repeatable_and_stops_at_the_vocabulary(text: Path) -> None:
    texts = list(Corpus(text).documents("train"))
    first, second = (Tokenizer.train(texts, 300) for _ in range(2))
    assert first.vocabulary == 300
    assert first.digest == second.digest
    assert len(first.encode(texts[5])) < len(texts[5]) / 1.3, "the merges should shorten the text they were learned on"


def test_the_smallest_vocabulary_is_the_bytes_alone(text: Path) -> None:
    assert Tokenizer.train(Corpus(text).documents("train"), SMALLEST).encode("aä") == Tokenizer.train(
        [], SMALLEST
    ).encode("aä")


# What a hostile text makes of training.


def test_the_bound_of_a_piece_changes_nothing_for_ordinary_text(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text for text, _ in zip(standard_library().documents("train"), range(60), strict=False)]
    bounded = Tokenizer.train(texts, 1024).digest
    monkeypatch.setattr("gsm.data.tokenizer.LONGEST", 1 << 40)
    assert bounded == Tokenizer.train(texts, 1024).digest


@pytest.mark.parametrize(
    "text", ["\0" * 2_000_000, " " * 2_000_000, "ab" * 1_000_000], ids=["NULs", "blanks", "letters"]
)
def test_one_character_over_and_over_is_learned_in_seconds(text: str) -> None:
    """It took the square of its length: over a minute for two megabytes."""
    begun = time.monotonic()
    tokenizer = Tokenizer.train([text], 300)
    assert len(tokenizer.encode(text)) < len(text) / 100
    assert time.monotonic() - begun < 20
