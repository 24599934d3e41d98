"""How many tokens a second one process makes into batches, beside the number that a GPU trains on.

text      files of the standard library, read, tokenised and written to the cache
parquet   the same text as a parquet file
cached    batches cut out of the cache: training waits for these alone
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gsm.config.compose import compose
from gsm.data.corpus import Corpus, standard_library
from gsm.data.module import TextData
from gsm.data.reading import needed
from gsm.data.tokenizer import Tokenizer
from gsm.data.tokens import find_or_encode

from . import paper, results
from .results import Asked, read, table

NEED = paper.TRAINING["gsm"]["tokens_per_second"] / 8  # tokens per second for one GPU
HEAD = ("source", "tokens/s", "slowest, fastest round", "tokens/s of processor time", "x the need of a GPU", "tokens")


def run(
    sources: Sequence[str] = ("text", "parquet", "cached"),
    size: str = "nano",
    tokens: int = 1_000_000,
    batch_size: int = 4,
    rounds: int = 3,
    **asked: Any,
) -> Path:
    """Measure each source, print the table and write it beside the JSON file; return that file.

    Args: as in configs/benchmark/data.yaml and configs/benchmark.yaml.

    Raises:
        ValueError: an unknown source, or a number below 1. ModuleNotFoundError: pyarrow is missing, for ``parquet``.
    """
    how = Asked(**asked)
    if how.results:
        return show(Path(how.results))
    unknown = [source for source in sources if source not in MEASURES]
    if unknown or min(tokens, batch_size, rounds) < 1:
        raise ValueError(
            f"sources {list(sources)}, tokens {tokens}, batch_size {batch_size}, rounds {rounds}: give some of "
            f"{', '.join(MEASURES)}, and 1 or more"
        )
    shape = compose([f"size={size}"])["size"]
    file = how.open("data", torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), shape["vocabulary"], shape["context"], tokens, batch_size)
        rows = {name: ({"source": name}, partial(measure, bench, name, rounds)) for name in sources}
        protocol = {"size": size, "tokens": tokens, "batch_size": batch_size, "rounds": rounds}
        return file.fill(rows, protocol, force=how.force, show=show)


class Bench:
    """The text, and the tokenizer that was trained on it, which is not timed."""

    def __init__(self, folder: Path, vocabulary: int, context: int, tokens: int, batch_size: int) -> None:
        self.folder, self.tokens, self.corpus = folder, tokens, standard_library()
        self.tokenizer = Tokenizer.train(self.corpus.documents("train"), vocabulary)
        self.numbers: dict[str, Any] = {"vocabulary": vocabulary, "context": context, "batch_size": batch_size}
        self.caches = 0

    def encode(self, corpus: Corpus) -> int:
        """Fills a new cache in this process; how many tokens that were."""
        self.caches += 1
        cache = self.folder / str(self.caches)
        return find_or_encode(corpus, "train", self.tokenizer, cache, limit=self.tokens, workers=1).tokens

    def text(self) -> Callable[[], int]:
        """Files of text."""
        return lambda: self.encode(self.corpus)

    def parquet(self) -> Callable[[], int]:
        """The same in a parquet file."""
        arrow = needed("pyarrow", "pyarrow", "parquet files")
        writer = needed("pyarrow.parquet", "pyarrow", "parquet files")
        for split in ("train", "validation"):
            rows = arrow.table({"text": list(self.corpus.documents(split))})
            writer.write_table(rows, self.folder / f"{split}.parquet", row_group_size=100)
        corpus = Corpus(self.folder, files=["train.parquet", "validation.parquet"], validation="validation.parquet")
        return lambda: self.encode(corpus)

    def cached(self) -> Callable[[], int]:
        """A pass over encoded text."""
        folder = str(self.folder / "kept")
        data = TextData(
            **self.numbers, tokenizer=self.tokenizer, corpus=self.corpus, max_tokens=self.tokens, cache_dir=folder
        )
        data.prepare_data()
        return lambda: sum(batch["tokens"].numel() for batch in data.train_dataloader())


MEASURES: dict[str, Callable[[Bench], Callable[[], int]]] = {
    "text": Bench.text,
    "parquet": Bench.parquet,
    "cached": Bench.cached,
}


def measure(bench: Bench, source: str, rounds: int) -> dict[str, Any]:
    """The row of one source, as plain containers."""
    make, rates, processor, tokens = MEASURES[source](bench), [], [], 0
    for _ in range(rounds):
        start, worked = time.perf_counter(), time.process_time()
        tokens = make()
        rates.append(tokens / (time.perf_counter() - start))
        processor.append(tokens / max(time.process_time() - worked, 1e-9))
    medians = {"tokens_per_second": statistics.median(rates), "by_processor_time": statistics.median(processor)}
    return {"tokens": tokens, "rates": rates, **medians}


def show(path: Path) -> Path:
    """Publish the table of a file of results."""
    content = read(path, "source")
    opening = (
        f"{results.measured_on(content)} One process (a tokenizer's threads too, unless "
        f"`TOKENIZERS_PARALLELISM=false`). Need: {NEED:,.0f} tokens/s, of one of the paper's GPUs."
    )
    return results.publish(path, opening, table(HEAD, map(_cells, content["rows"].values())))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row.get("failed"):
        return row["source"], f"failed: {row['failed']}"
    rates, speed = row["rates"], row["tokens_per_second"]
    spread = f"{min(rates):,.0f}, {max(rates):,.0f}"
    processor = f"{row['by_processor_time']:,.0f}"
    return row["source"], f"{speed:,.0f}", spread, processor, f"{speed / NEED:,.1f}", f"{row['tokens']:,}"
