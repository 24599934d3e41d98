"""Tokenizers from a tokenizer.json, also of those that change the text."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_text
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from gsm.data.corpus import Corpus
from gsm.data.module import TextData
from gsm.data.tokenizer import Tokenizer
from gsm.errors import ConfigError
from gsm.models.checks import IGNORED

AWKWARD = ["", "plain", "naïve — 東京 🐍\r\n\t x", "a</s>b<|endoftext|>", "\x00\x7f", "    if a:\n        return  b"]
TEXTS = ["The quick brown fox jumps over the lazy dog. " * 9, "Zwölf größere Boxkämpfer jagen Viktor. " * 9]


def byte_level(end: str = "<|endoftext|>", prefix: bool = False) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.add_tokens(["<think>", end])  # the end is not special in the file
    return bpe


def lower_case() -> tokenizers.Tokenizer:
    bpe = byte_level()
    bpe.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("x", "")])
    return bpe


def llama_3() -> tokenizers.Tokenizer:
    """Pieces as those of Llama 3, which join a sign with the lines behind it; and Qwen's normalizer."""
    bpe = byte_level()
    words = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    bpe.normalizer = normalizers.NFC()
    return bpe


def saved(bpe: tokenizers.Tokenizer, folder: Path) -> str:
    bpe.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_any_text_survives_and_never_ends_itself(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(saved(byte_level(), tmp_path))
    for text in AWKWARD:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text not in ids
        stream = tokenizer.stream()
        assert "".join([*(stream.push(token) for token in ids), stream.finish()]) == text
    assert tokenizer.decode([tokenizer.end_of_text]) == "" and tokenizer.token_lengths_V[tokenizer.end_of_text] == 0
    assert tokenizer.decode([tokenizer.vocabulary]) == "\N{REPLACEMENT CHARACTER}"


def test_what_byte_level_ids_stand_for_adds_up_to_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(saved(byte_level(), tmp_path))
    for text in [*AWKWARD, "a <think> b"]:
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert tokenizer.token_lengths_V[ids].sum() == len(text.encode())


def test_a_tokenizer_of_a_file_travels_as_plain_strings(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(saved(byte_level(), tmp_path))
    again = Tokenizer.from_state(json.loads(json.dumps(tokenizer.to_state())))
    assert again.digest == tokenizer.digest
    assert (again.kind, again.vocabulary, again.end_of_text) == ("file", tokenizer.vocabulary, tokenizer.end_of_text)
    assert again.encode_batch(AWKWARD) == tokenizer.encode_batch(AWKWARD)


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"])
def test_the_usual_ends_of_text_are_known(end: str, tmp_path: Path) -> None:
    bpe = byte_level(end)
    assert Tokenizer.from_file(saved(bpe, tmp_path)).end_of_text == bpe.token_to_id(end)


def test_an_unusual_end_of_text_is_named(tmp_path: Path) -> None:
    bpe = byte_level("[STOP]")
    path = saved(bpe, tmp_path)
    assert Tokenizer.from_file(path, "[STOP]").end_of_text == bpe.token_to_id("[STOP]")
    for unknown in (None, "[END]"):
        with pytest.raises(ConfigError, match="end_of_text"):
            Tokenizer.from_file(path, unknown)


def test_a_folder_and_a_packed_file_are_found(tmp_path: Path) -> None:
    expected = Tokenizer.from_file(saved(byte_level(), tmp_path)).digest
    assert Tokenizer.from_file(str(tmp_path)).digest == expected
    packed = tmp_path / "tokenizer.json.xz"
    packed.write_bytes(lzma.compress((tmp_path / "tokenizer.json").read_bytes()))
    assert Tokenizer.from_file(str(packed)).digest == expected


OF_A_CALL = {
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        **{"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
    },
    "post_processor": {
        **{"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2},
        **{"pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"], "special_tokens": {}},
    },
}


@pytest.mark.parametrize("way", ["file", "state of a file", "state of a bpe"])
@pytest.mark.parametrize("setting", [*OF_A_CALL, "dropout"])
def test_the_ids_of_a_text_are_those_of_the_text_alone(way: str, setting: str, tmp_path: Path) -> None:
    """What transformers stored in the last call cut every text that a folder's tokenizer read, and filled others up."""
    plain = json.loads(byte_level().to_str())
    changed = {**plain, setting: OF_A_CALL.get(setting)}
    if setting == "dropout":
        changed = {**plain, "model": {**plain["model"], "dropout": 0.5}}
    kind = {"state of a file": "file", "state of a bpe": "bpe"}.get(way)
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    state = {"kind": kind, "json": json.dumps(changed), "end_of_text": None}
    read = Tokenizer.from_state(state) if kind else Tokenizer.from_file(str(tmp_path))
    expected = Tokenizer.from_file(saved(byte_level(), tmp_path)).encode_batch([*TEXTS, "x"])
    assert read.encode_batch([*TEXTS, "x"]) == expected


MAKERS: list[Callable[[], Any]] = [byte_level, partial(byte_level, prefix=True), llama_3, lower_case]


@pytest.mark.parametrize("make", [*MAKERS, Tokenizer.plain_bytes, lambda: Tokenizer.train(TEXTS, 400)])
def test_the_ids_of_a_long_text_are_those_of_its_parts(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A plain text of 19 MB took 4.3 GB: the library got 16 million characters at once."""
    odd = [" ", "  ", "\n", "\n\n ", "\t", ".\n", "e\u0301", " \u0301", "\u3000", "\x1c", "'s"]
    pieces, random = [*AWKWARD, *TEXTS[0].split(), *odd], np.random.default_rng(0)
    text = "".join(pieces[number] for number in random.integers(len(pieces), size=3000))
    learnt = Tokenizer.train([text, *TEXTS], 400)
    monkeypatch.setattr("gsm.data.tokenizer.PART", 8)
    assert Tokenizer.train([text, *TEXTS], 400).digest == learnt.digest
    made = make()
    tokenizer = made if isinstance(made, Tokenizer) else Tokenizer.from_file(saved(made, tmp_path))
    parts = list(tokenizer.parts(text))
    assert "".join(parts) == text and (len(parts) > 100 or make is lower_case)
    assert [token for row in tokenizer.encode_batch(parts) for token in row] == tokenizer.encode(text)


def test_a_surrogate_without_a_partner_is_the_replacement_character(tmp_path: Path) -> None:
    for tokenizer in (Tokenizer.from_file(saved(byte_level(), tmp_path)), Tokenizer.plain_bytes()):
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\N{REPLACEMENT CHARACTER}b"


def data_with(tokenizer: str, folder: Path, **chosen: Any) -> TextData:
    (folder / "text").mkdir(exist_ok=True)
    path = str(tiny_text.write(folder / "text"))
    settings = {"vocabulary": 1000, "context": 32, "batch_size": 4, "cache_dir": str(folder / "cache"), **chosen}
    return TextData(path=path, tokenizer=tokenizer, **settings)


@pytest.mark.parametrize("make", [byte_level, lower_case, lambda: byte_level(prefix=True)])
def test_bits_per_byte_count_the_bytes_of_the_text(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tokenizer that makes letters small, or has none for a sign, got the bytes that it does not spell for free."""
    data = data_with(saved(make(), tmp_path), tmp_path)
    data.setup()
    size = lost = 0
    for text in data.corpus.documents("validation"):
        there, here = (
            Counter(raw) for raw in (text.encode(), data.tokenizer.decode(data.tokenizer.encode(text)).encode())
        )
        size, lost = size + there.total(), lost + (there - here).total()
    assert (lost > 0) is (make is lower_case) is (f"{lost} of the {size} bytes of the validation" in caplog.text)
    ids = data.validation_set.ids[:]
    assert data.token_bytes_V[ids].sum(dtype=np.float64) == pytest.approx(size - lost, rel=1e-6)
    targets = np.concatenate([row["targets"].numpy() for row in data.validation()])
    assert data.bytes_per_token == pytest.approx(data.token_bytes_V[targets[targets != IGNORED]].mean(dtype=np.float64))
    if make is byte_level:
        assert data.token_bytes_V is data.tokenizer.token_lengths_V


def test_documents_end_where_the_files_do(tmp_path: Path) -> None:
    data = data_with(saved(byte_level(), tmp_path), tmp_path)
    texts = list(Corpus(tmp_path / "text").documents("train"))
    assert (data.train_set.ids[:] == data.tokenizer.end_of_text).sum() == len(texts)
