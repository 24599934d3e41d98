"""Text from a trained model, written as it comes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gsm.config.check import ConfigError
from gsm.config.load import load_model, refusals, tokenizer_of, usable
from gsm.config.stored import read_checkpoint
from gsm.costs import room
from gsm.data.reading import utf8
from gsm.data.tokenizer import Tokenizer
from gsm.engine import CHUNK, Engine
from gsm.errors import within
from gsm.files import read_text
from gsm.models.base import LanguageModel
from gsm.models.sampling import check_sampling


def generate(
    checkpoint: str,
    prompt: str = "",
    prompt_file: str | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Print a prompt and its continuation by a trained model, up to the model's end of text, or to Ctrl-C.

    Args:
        checkpoint: the folder of a run, or of one of its steps; or nano, a trained model in the package
        prompt: the beginning of the text; empty: the beginning of a document, if the model has learned how they begin
        prompt_file: a text file to begin with, instead of prompt
        max_new_tokens: largest number of tokens
        temperature: 0: always the likeliest token; 1: by the model's own probabilities
        top_p: draw from the likeliest tokens that together have this probability
        seed: of the draws
        device: cpu, cuda, ...; auto: a GPU if there is one

    Raises:
        ConfigError, FileNotFoundError: a value out of range, or a file that cannot be used; the message names it.
            Also where memory runs out: the message has the number of tokens that fit.
    """
    within(1, max_new_tokens=max_new_tokens)
    check_sampling(temperature, top_p)
    device = usable(device)
    start = utf8(_read(prompt_file) if prompt_file else prompt)
    saved = read_checkpoint(checkpoint, weights=False)
    tokenizer, model = tokenizer_of(saved, checkpoint), load_model(checkpoint, device)
    if not start and (saved["hyper_parameters"]["config"].get("data") or {}).get("documents") == "isolated":
        note = "note: trained with data.documents=isolated, the model has not learned how documents begin; use prompt="
        print(note, file=sys.stderr, flush=True)
    generator = torch.Generator(device).manual_seed(seed)
    sys.stdout.write(start)
    try:
        for piece in pieces(model, tokenizer, start, max_new_tokens, temperature, top_p, generator):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:  # the written text stays
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def pieces(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
) -> Iterator[str]:
    """Yield the new text in whole characters; ends with the model's end of text. Raises ConfigError."""
    decoder = tokenizer.stream()
    ids = model.encode(prompt)
    capacity = len(ids) + max_new_tokens - 1
    with _room(model, capacity), refusals("generate.py"):
        engine = Engine(model, capacity=capacity)
        for token_B in engine.stream(ids, max_new_tokens, temperature, top_p, generator):
            token = int(token_B)
            if token == tokenizer.end_of_text:
                break
            yield decoder.push(token)
    yield decoder.finish()


@contextmanager
def _room(model: LanguageModel, tokens: int) -> Iterator[None]:
    """Turn an exhausted memory inside the block into an error with the number of tokens that fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not room.out_of_memory(error):
            raise
        refusal = room.refusal(room.needs(model, CHUNK), tokens, room.available_bytes(model.embedding.weight.device))
        raise ConfigError(f"{refusal}, prompt and new tokens are {tokens:,}. Use fewer of both.") from error


def _read(path: str) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompt_file must be a file of text in UTF-8, got {path}: {error}") from error
