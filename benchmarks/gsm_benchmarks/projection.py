"""What models would cost at any length, from the cost model alone, and how measured times stand to it (``against``)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gsm.costs.model import Cost, paper_cache, paper_decode
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM

from . import entries, machine, results
from .entries import Entry, known_cost
from .pictures import panels
from .results import FOLDER, Row, rate, read, table, write
from .timing import Ceilings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gsm.evaluation.plots import Style

HEAD = ("model", "tokens", "prefill, GFLOP a token", "decode, GFLOP", "decode, GB moved", "cache, MiB")
PAPER = ("model", "tokens", "multiply-adds, M", "the paper's terms, M", "entries kept, M numbers", "the paper's, M")
# What is computed of a model, given the tokens that a prefill reads at a time, the dtype, and the tokens there are.
NUMBERS: dict[str, Callable[[Cost, int, torch.dtype, int], int]] = {
    "prefill_flops": lambda model, chunk, dtype, tokens: model.prefill_flops(tokens, chunk).total(),
    "prefill_bytes": lambda model, chunk, dtype, tokens: model.prefill_bytes(tokens, chunk, dtype).total(),
    "decode_flops": lambda model, chunk, dtype, tokens: model.decode_flops(tokens).total(),
    "decode_bytes": lambda model, chunk, dtype, tokens: model.decode_bytes(tokens, dtype).total(),
    "cache_bytes": lambda model, chunk, dtype, tokens: model.cache_bytes(tokens, dtype).total(),
}
# What is compared over lengths, and the FLOPs and bytes of what is timed.
COMPARED = {
    "prefill FLOPs": "prefill_flops", "decode FLOPs": "decode_flops", "decode bytes": "decode_bytes",
    "cache": "cache_bytes",
}  # fmt: skip
NEEDS = {
    "prefill_seconds": ("prefill_flops", "prefill_bytes"),
    "decode_seconds": ("decode_flops", "decode_bytes"),
}
SCALES = {"prefill_seconds": 1.0, "decode_seconds": 1e3, "cache_bytes": 2.0**-20}
SIZE = "1p5b"  # where neither the command nor a checkpoint names one
PAPER_SAYS = (
    "Attention and search in the decoder, and what it keeps, beside the terms of the paper's section 2.1. These count "
    "d for an entry that is attended to, which takes two products (logit and mixture), and let Reindex layers search a "
    "pool, which this baseline has unless `model.candidate_pool=false`."
)


def run(
    output: str = "",
    results: str = "",
    models: Sequence[Entry] = entries.ALL,
    size: str | None = None,
    overrides: Sequence[str] = (),
    lengths: Sequence[int] = (256, 1024, 4096, 16384, 65536, 262144, 1048576),
    chunk: int = 4096,
) -> Path:
    """Compute, print the tables and write them and the picture beside the JSON file; return that file.

    Args: as in configs/benchmark/projection.yaml and configs/benchmark.yaml, which say what they mean.

    Raises:
        ValueError: no model, a length or a chunk below 1, or a model whose cost is not known.
    """
    if results:
        return _show(Path(results))
    if not models or not lengths or min(*lengths, chunk) < 1:
        raise ValueError(
            f"models {list(models)}, lengths {list(lengths)}, chunk {chunk}: give one or more, of 1 or more"
        )
    known = {model.name: model for model in entries.read(models)}
    size = entries.one_size([*known.values()], size, SIZE)
    costs = {name: known_cost(model, size, tuple(overrides)) for name, model in known.items()}
    given = {name: {"given": model.given} if model.given else {} for name, model in known.items()}
    rows = {
        f"{name} {size}, {tokens}": {"model": name, "size": size, **given[name], **projected(model, tokens, chunk)}
        for name, model in costs.items()
        for tokens in lengths
    }
    leader, *others = known
    curves = {
        name: {what: cache(partial(NUMBERS[key], model, chunk, torch.bfloat16)) for what, key in COMPARED.items()}
        for name, model in costs.items()
    }
    crossings = {
        other: {what: below(curves[leader][what], curves[other][what], max(lengths)) for what in COMPARED}
        for other in others
    }
    facts = {**machine.facts(torch.device("cpu")), "device": "computed, nothing measured"}
    content = {**facts, "size": size, "chunk": chunk, "leader": leader, "crossings": crossings, "rows": rows}
    path = Path(output) if output else FOLDER / f"projection-{machine.in_file_names(size)}.json"
    write(path, content)
    return _show(path)


def projected(model: Cost, tokens: int, chunk: int) -> dict[str, Any]:
    """One row: a prefill of so many tokens, the token after them, and what is then kept, in bfloat16."""
    row = {"tokens": tokens} | {name: of(model, chunk, torch.bfloat16, tokens) for name, of in NUMBERS.items()}
    if not isinstance(model.model, GSM | Baseline):
        return row
    parts, kept = model.decode_flops(tokens), model.cache_bytes(tokens)
    return {
        **row,
        "decoder_multiply_adds": (parts["decoder/attention"] + parts["decoder/index scores"]) // 2,
        "decoder_numbers": (kept["shared_state"] + kept["decoder_window"] + kept["decoder_bank"]) // 2,
        "paper_decode": paper_decode(model.model, tokens),
        "paper_cache": paper_cache(model.model, tokens),
    }


def below(mine: Callable[[int], int], other: Callable[[int], int], longest: int) -> list[tuple[int, int]]:
    """Where mine is below the other: ranges of lengths from 1 to the longest, first and last of each.

    Found by doubling and bisection: between two lengths that it tries, it takes it that there is one crossing at most.
    """
    ranges, start = [], 1 if mine(1) < other(1) else None
    tried = [*itertools.takewhile(lambda n: n < longest, (1 << k for k in itertools.count())), longest]
    for low, high in itertools.pairwise(tried):
        inside = start is not None
        if (mine(high) < other(high)) == inside:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if (mine(middle) < other(middle)) == inside else (low, middle)
        if inside:
            ranges.append((start, low))
        start = None if inside else high
    return ranges if start is None else [*ranges, (start, longest)]


def against(rows: Sequence[Row], *, dtype: torch.dtype = torch.bfloat16, chunk: int = 4096, steps: int = 0) -> bytes:
    """A PNG of three panels, prefill, decode and cache: measured points over what the cost model says.

    The curves of time are max(FLOPs / rate, bytes / bandwidth), with those rates, the same for all models, but for
    prefill and for decoding each by itself, that fit the points best (``fitted``): they show the shape alone.

    Args:
        rows: with ``model``, what it was ``given``, ``size``, ``tokens``, and of ``prefill_seconds``,
            ``decode_seconds`` (of one token) and ``cache_bytes`` those that were measured. Those of models that are
            more than a name are left out (``entries.of_row``).
        dtype: of the models and their memories.
        chunk: tokens that a prefill read at a time.
        steps: tokens that were decoded before the cache was weighed.

    Raises:
        ValueError: there is no time in any row, or the cost of a model is not known. ImportError: matplotlib is
            missing.
    """
    told = [(row, model) for row in rows if (model := entries.of_row(row))]
    rows, models = [row for row, _ in told], {name_of(row): known_cost(model, row["size"]) for row, model in told}
    rates: dict[str, Ceilings] = {}

    def work(what: str, model: Cost, tokens: int) -> tuple[int, int]:
        flops, moved = (NUMBERS[name](model, chunk, dtype, tokens) for name in NEEDS[what])
        return flops, moved

    for what in NEEDS:
        timed = [row for row in rows if row.get(what)]
        points = [(*work(what, models[name_of(row)], row["tokens"]), row[what]) for row in timed]
        rates |= {what: fitted(points)} if points else {}
    if not rates:
        raise ValueError("no row holds prefill_seconds or decode_seconds: there is nothing to draw")

    def draw(axes: Axes, what: str, name: str, style: Style) -> None:
        here, model, scale = [row for row in rows if name_of(row) == name], models[name], SCALES[what]
        measured = [(row["tokens"], scale * row[what]) for row in here if row.get(what)]
        lengths = [row["tokens"] for row in here]
        curve: dict[int, float] = {}
        for n in _grid(min(lengths), max(lengths)):
            if what == "cache_bytes":
                curve[n] = scale * model.cache_bytes(n + steps, dtype).total()
            elif what in rates:
                curve[n] = scale * rates[what].floor(*work(what, model, n)) / 1e3
        for line, how in ((curve.items(), style.line), (measured, style.marker)):
            if line:
                axes.plot(*zip(*line, strict=True), how, color=style.colour, markersize=4.5, linewidth=1.2)
        if what in rates:
            words = rate(rates[what].flops, "FLOP/s"), rate(rates[what].bytes, "B/s")
            axes.set_title(f"{', '.join(words)} (fitted)", fontsize=8)

    title = "points: measured; curves: computed, max(FLOPs / rate, bytes / bandwidth)"
    labels = {"prefill_seconds": "prefill (s)", "decode_seconds": "decode (ms a token)", "cache_bytes": "cache (MiB)"}
    return panels(title, labels, models, [row["tokens"] for row in rows], draw)


def name_of(row: Row) -> str:
    """Model and size of a row."""
    return f"{row['model']} {row['size']}"


def fitted(timed: Sequence[tuple[int, int, float]]) -> Ceilings:
    """The rate and the bandwidth with which max(FLOPs / rate, bytes / bandwidth) is nearest to what was measured.

    Of all pairs of what single points show, that with the least sum of |log(computed / measured)|: the median's way,
    which a few slow points do not move.

    Args:
        timed: FLOPs, bytes and seconds of each point.
    """

    def distance(pair: tuple[float, float]) -> float:
        return sum(abs(math.log(max(flops / pair[0], moved / pair[1]) / seconds)) for flops, moved, seconds in timed)

    rates = sorted({flops / seconds for flops, _, seconds in timed})
    bandwidths = sorted({moved / seconds for _, moved, seconds in timed})
    found = min(((flops, moved) for flops in rates for moved in bandwidths), key=distance)
    return Ceilings(*found, "fitted")


def _grid(first: int, last: int, points: int = 25) -> list[int]:
    """Whole numbers from the first to the last, evenly spaced in the logarithm."""
    return sorted({round(first * (last / first) ** (k / points)) for k in range(points + 1)})


def _picture(rows: Sequence[Row]) -> bytes:
    """A PNG of computed rows: FLOPs of prefill and bytes of decoding for a token, and the cache, over the length."""
    values: dict[str, Callable[[Row], float]] = {
        "prefill (GFLOP a token)": lambda row: row["prefill_flops"] / row["tokens"] / 1e9,
        "decode (GB moved for a token)": lambda row: row["decode_bytes"] / 1e9,
        "cache (MiB)": lambda row: row["cache_bytes"] / 2**20,
    }

    def draw(axes: Axes, what: str, model: str, style: Style) -> None:
        points = [(row["tokens"], values[what](row)) for row in rows if row["model"] == model]
        axes.plot(*zip(*points, strict=True), color=style.colour, linestyle=style.line, linewidth=1.6)

    models, lengths = dict.fromkeys(row["model"] for row in rows), [row["tokens"] for row in rows]
    title = "computed from the cost model"
    return panels(title, {label: label for label in values}, models, lengths, draw, points=False)


def _show(path: Path) -> Path:
    """Publish the tables of a file of results, and the picture."""
    content = read(path, "prefill_flops")
    rows, size = list(content["rows"].values()), content["size"]
    opening = (
        f"Computed from the cost model (`gsm.costs.model`), nothing measured: size {size}, bfloat16, batch 1, prefill "
        f"in chunks of {content['chunk']} tokens, asking for the last row. Commit {content['commit']}, "
        f"`{content['command']}`."
    )
    longest = max(row["tokens"] for row in rows)
    found = [
        (other, *(_ranges(ranges, longest) for ranges in lengths.values()))
        for other, lengths in content["crossings"].items()
    ]
    decoders = [_paper_cells(row) for row in rows if "paper_decode" in row]
    return results.publish(
        path,
        opening,
        table(HEAD, map(_cells, rows)),
        entries.described(rows),
        f"At which lengths, in tokens, up to {longest:,} (computed):",
        table((f"{content['leader']} needs less than", *COMPARED), found),
        *([PAPER_SAYS, table(PAPER, decoders)] if decoders else []),
        picture=lambda: _picture(rows),
    )


def _cells(row: Row) -> tuple[str, ...]:
    tokens = row["tokens"]
    numbers = row["prefill_flops"] / tokens / 1e9, row["decode_flops"] / 1e9, row["decode_bytes"] / 1e9
    return row["model"], f"{tokens:,}", *(f"{n:.4g}" for n in numbers), f"{row['cache_bytes'] / 2**20:,.4g}"


def _paper_cells(row: Row) -> tuple[str, ...]:
    keys = ("decoder_multiply_adds", "paper_decode", "decoder_numbers", "paper_cache")
    return row["model"], f"{row['tokens']:,}", *(f"{row[key] / 1e6:.4g}" for key in keys)


def _ranges(ranges: Sequence[Sequence[int]], longest: int) -> str:
    words = [f"from {first:,}" if last == longest else f"{first:,} to {last:,}" for first, last in ranges]
    return "everywhere" if list(map(list, ranges)) == [[1, longest]] else ", ".join(words) or "nowhere"
