"""Rows of results: `results/<name>.csv` has one line for each run, and published tables are made from them.

    python compare.py logs/residual publish=results        # append the runs of an experiment
    python -m gsm.experiments.rows                         # rewrite the tables between the markers of all pages
    python -m gsm.experiments.rows logs/paper.md logs=logs # of one page, with your own runs in logs/: make paper

A marker names a file of rows and its columns. The first arm, or `against=`, is subtracted from the others. With
`against=a,b` the first column has a difference from each of these arms; a difference over fewer seeds than the arm has
names their number. `arms=a,b` shows these arms. A column `ln(a:b)` is the logarithm of the ratio of two columns.
`without=0,1` leaves out seeds, such as the seed that chose an arm. `split=tuning` shows the attempts of tuning, by
rate. `picture=` draws every seed of the first column; with `x=<column>` the means against another column, with
`draw=differences` each arm minus the first, with its interval. Of a column by length it draws every quantity of the
evaluation over the length, in panels; with `draw=together` those of one arm in a single panel:

    <!-- rows: residual bits_per_byte learning_rate against=mhc picture=residual.png -->
    <!-- end -->

The same words after `picture:` are the picture without the table. Arms and columns have the names that `labels` of
their experiment gives them; a marker has those of the commands.

`margin=` adds a test of equivalence of the column `<run>/bits_per_byte`, which `evaluate:` of an experiment measures:
the arms' differences with an interval over seeds and an interval over books.

The cost model's bytes and operations, in bfloat16; a model's own overrides stand behind it, and may have its size:

    <!-- costs: size=nano gsm gsm_recurrent,size=nano_deep gated_delta_net -->
    <!-- end -->

The yamls of a config group, each with its opening comment:

    <!-- yamls: model/mixer -->
    <!-- end -->

Lines of a table in `benchmarks/results/`, which is found by its first heading; columns without a value are left out:

    <!-- measured: cpu-paper.md lines=256,4K,64K the decoder's entries -->
    <!-- end -->

What can be recorded in a model (`gsm.taps`):

    <!-- taps: size=pico gsm -->
    <!-- end -->
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gsm import paths, plots
from gsm.config.address import TUNING, noted
from gsm.config.check import ConfigError, flat, unknown
from gsm.config.options import HIDDEN, opening
from gsm.experiments import SEVERAL
from gsm.experiments.table import BETTER, RunSummary, Table, names_of, read_otherwise, read_runs, summarise
from gsm.files import damage, write_whole
from gsm.intervals import Cell, over_windows
from gsm.tables import Grid, grid_markdown, length_text

RESULTS = paths.ROOT / "results"
BENCHMARKS = paths.ROOT / "benchmarks/results"
FACTS = (
    *("experiment", "arm", "seed", "settings", "split", "status", "reason", "commit", "clean", "sources", "command"),
    *("corpus", "corpus_sha256", "optimizer", "learning_rate", "steps", "tokens", "parameters", "seconds"),
    *("device", "versions", "fingerprint.documents", "fingerprint.tokenizer"),
)
LENGTH = ("steps", "tokens")  # of training
SETTINGS = ("corpus_sha256", "learning_rate", "optimizer", *LENGTH)  # facts in which the seeds of an arm are alike
LOCAL = ("logs=", "jobs=", *(f"{key}=null" for key in SEVERAL))  # where a run lies, and who started it
ABOVE = re.compile(r"^start_from=/.*/(?=logs/)")  # the machine's part of the path of a checkpoint
BITS, SUMS = "/bits_per_byte", "/by_document"  # of an evaluation: its number, and nats and bytes of every document
MARKED = re.compile(
    r"(<!-- (?P<kind>rows|picture|costs|measured|yamls|taps): (?P<words>[^\n]+?) -->)\n(?P<body>.*?)(<!-- end -->)",
    re.DOTALL,
)
EXPERIMENT = re.compile(r"\bexperiment=(\w+)")  # in the command of a row
CHANGE = re.compile(r"ln\((?P<after>[^\s:]+):(?P<before>[^\s:]+)\)")
LENGTHS = (256, 4096, 65536)  # tokens before the one that is decoded


def publish(folder: Path, into: Path, metrics: Sequence[str]) -> str:
    """Append a row for each run in `logs/<name>`, and each attempt of tuning, to `<into>/<name>.csv`.

    A run that has not ended gets no row yet. All runs of an arm must have the same settings, as a table has their mean.

    Args:
        folder: of an experiment.
        into: the folder of the rows.
        metrics: keys of `summary.json` that get a column each; the file that exists decides.

    Returns a sentence with the number of rows that were added, and the file.

    Raises:
        ConfigError: the file has other columns, or is damaged; or a run has other settings than its arm.
        OSError: the file cannot be written.
    """
    path = into / f"{folder.name}.csv"
    sums = [name.removesuffix(BITS) + SUMS for name in metrics if name.endswith(BITS)]
    columns = list(dict.fromkeys([*FACTS, *metrics, *sums]))
    written: list[dict[str, str]] = []
    if path.is_file():
        header, written = read(path)
        if missing := [name for name in columns if name not in (*header, *FACTS)]:  # an older file has fewer facts
            known = ",".join(name for name in header if name not in FACTS)
            raise ConfigError(f"columns must be those of {path.name}, {known}, got {missing[0]}")
        columns = header
    found = _with_tuning(folder)
    for run in found:
        if sentence := damage(run.folder / "summary.json"):
            raise ConfigError(sentence)
    ended = [run for run in found if run.summary.get("status") not in (None, "running")]
    rows = [row(run, folder.name, columns) for run in ended]
    new = [line for line in rows if line not in written]
    # A table has the mean of an arm: its seeds, and those of a tuned value, need the same settings.
    of_arm = {_arm(line): line for line in written if line.get("settings")}
    for run, line in zip(ended, rows, strict=True):
        own = {**line, "settings": str(run.summary.get("settings"))}
        first = of_arm.setdefault(_arm(line), own) if line in new else own
        if first["settings"] != own["settings"]:
            names = [name for name in SETTINGS if first.get(name) != own.get(name)] or ["settings"]
            changes = ", ".join(f"{name} {own.get(name)} ({first.get(name)} there)" for name in names)
            raise ConfigError(f"seed {run.seed} of {run.arm} must be trained as its arm in {path.name}, got {changes}")
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if not (before := path.read_bytes() if path.is_file() else b""):
        writer.writeheader()
    writer.writerows(new)
    write_whole(path, before + b"\n" * (before[-1:] not in b"\n") + text.getvalue().encode())
    return f"{len(new)} rows added to {path}, {len(rows) - len(new)} were there"


def _with_tuning(folder: Path) -> list[RunSummary]:
    """The runs of an experiment, and those of its tuning."""
    return [run for place in (folder, folder / TUNING) for run in read_runs(place)]


def _arm(line: Mapping[str, str]) -> tuple[str, str]:
    """Return the arm of a row, and the value that it tries where it is an attempt of tuning."""
    return line["arm"], line["learning_rate"] if line["split"] == "tuning" else ""


def row(run: RunSummary, experiment: str, columns: Sequence[str]) -> dict[str, str]:
    """Return the row of one run, as texts by column. Raises ConfigError for a damaged configuration."""
    summary, config = run.summary, noted(run.folder)
    words = list(map(str, config.get("overrides") or []))
    data, optimizer = summary.get("data") or {}, config.get("optimizer") or {}
    corpus = data.get("corpus") or (summary.get("choices") or {}).get("data")
    commit = str(summary.get("commit") or "")
    path = str((config.get("data") or {}).get("path") or "")
    words = [ABOVE.sub("start_from=", word) for word in words if not word.startswith(LOCAL)]
    facts = {
        **{name: summary.get(name) for name in ("arm", "seed", "settings", "status", "reason", "device")},
        "experiment": experiment,
        "split": (config.get("data") or {}).get("held_out", "validation"),
        "commit": commit.removesuffix("+"),
        "clean": ("no" if commit.endswith("+") else "yes") if commit else "",
        "sources": summary.get("sources"),
        "command": shlex.join(["python", "train.py", *words]),
        "corpus": Path(path).name if corpus == "folder" and path else corpus,
        "corpus_sha256": data.get("digest"),
        "optimizer": str(optimizer.get("_target_", "")).rpartition(".")[2],
        "learning_rate": OmegaConf.select(OmegaConf.create(dict(config)), "optimizer.learning_rate"),  # of the recipe
        "seconds": summary.get("train_seconds"),
        "versions": " ".join(f"{name} {number}" for name, number in (summary.get("versions") or {}).items()),
        **{name: (summary.get("fingerprint") or {}).get(name.partition(".")[2]) for name in FACTS[-2:]},
    }
    measured = {name: summary.get(name) if name.endswith(SUMS) else run.number(name) for name in columns}
    return {name: _text(value) for name, value in {**measured, **facts}.items() if name in columns}


def read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and the rows of a file, as texts. Raises ConfigError for a line that is no row, OSError."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file, strict=True)
        header, rows = next(lines, []), []
        try:
            for cells in filter(None, lines):
                if len(cells) != len(header):
                    raise ValueError(f"it has {len(cells)}")
                rows.append(dict(zip(header, cells, strict=True)))
                int(rows[-1].get("seed", "0"))
                for name, cell in rows[-1].items():
                    float(0 if name in FACTS or name.endswith(SUMS) else cell or 0)
        except (ValueError, csv.Error) as error:
            raise ConfigError(
                f"{path.name}, line {lines.line_num} must be a row of {len(header)} columns: {error}"
            ) from error
        return header, rows


def trained(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the runs in `logs/<name>`, with every number that they have. Empty without the folder."""
    found = _with_tuning(folder)
    numbers = [[name for name in flat(run.summary) if run.number(name) is not None] for run in found]
    return [
        row(run, folder.name, list(dict.fromkeys([*FACTS, *names]))) for run, names in zip(found, numbers, strict=True)
    ]


def runs(path: Path, split: str = "validation", logs: Path | None = None) -> list[RunSummary]:
    """Return the finished runs of a file that were measured on a split, the newest row of each seed.

    Args:
        path: of the file; without it there are no rows.
        split: ``validation``, or ``tuning``: the attempts, as arms ``<arm> <rate>``.
        logs: the runs in its folder of the file's name stand in place of rows of the same arm and seed.
    """
    lines = [(path, line) for line in (read(path)[1] if path.is_file() else [])]
    lines += [(logs / path.stem, line) for line in trained(logs / path.stem)] if logs else []
    newest: dict[tuple[str, str], tuple[Path, dict[str, str]]] = {}
    for place, line in lines:
        tuning = line["split"] == "tuning"
        key = f"{line['arm']} {line['learning_rate']}" if tuning else line["arm"], line["seed"]
        if tuning == (split == "tuning") and (line["status"] == "finished" or key not in newest):
            newest[key] = place, line
    known = []
    for (arm, seed), (place, line) in newest.items():
        result = LENGTH if line.get("reason") else ()  # a callback has ended it: its length is a result
        settings = {name: line[name] for name in SETTINGS if name in line and name not in result}
        known.append(RunSummary(arm, int(seed), place, _nested(line), settings=settings))
    return [run for run in known if run.finished]


def all_pages() -> list[Path]:
    """Return README.md and every page in docs/."""
    return [paths.ROOT / "README.md", *sorted((paths.ROOT / "docs").rglob("*.md"))]


def tables(page: str, folder: Path = RESULTS, logs: Path | None = None) -> str:
    """Return a page with the table of every marker made from its source. Raises ConfigError, OSError, and ValueError
    for a config group that does not exist.

    Args:
        page: its text.
        folder: of the rows.
        logs: your own runs stand in place of rows of the same arm and seed, as in `runs`.
    """

    def replaced(match: re.Match[str]) -> str:
        kind, words = match["kind"], match["words"]
        others = {"costs": costs, "measured": partial(measured, logs=logs), "yamls": yamls, "taps": names}
        made = others[kind](words) if kind in others else table(words, folder, logs, alone=kind == "picture")
        return f"{match[1]}\n{made}\n\n<!-- end -->"

    return MARKED.sub(replaced, page)


def table(words: str, folder: Path = RESULTS, logs: Path | None = None, alone: bool = False) -> str:
    """Return the Markdown of one marker: arms with mean and standard deviation, paired differences with intervals.

    Without a row it is a sentence without a number. A picture stands below the tables, or `alone`.
    """
    name, made, bases, options = _parsed(words, folder, logs)
    if not made.runs:
        return f"`results/{name}.csv` has no rows yet."
    if alone:
        return _image(made, options)
    grids = made.grids()
    known = bases[0] == made.rows[0].arm and "split" not in options  # or there is nothing to subtract
    joint = known and (len(bases) > 1 or len(made.measured) == 1)
    shown = [beside(made, bases)] if joint else [grids[0], *(grids[2:] if known else [])]
    parts = [*map(grid_markdown, shown)]
    if known and "margin" in options:
        parts.append(grid_markdown(equivalence(made, float(options["margin"]))))
    if "picture" in options:
        parts.append(_image(made, options))
    parts += [f"{sentence}." for sentence in read_otherwise(made.runs)]
    commits = sorted({str(run.summary["commit"])[:9] for run in made.runs})
    seeds = ", ".join(map(str, sorted({run.seed for run in made.runs})))
    places = {run.folder for run in made.runs}
    sources = [f"`results/{name}.csv`"] if folder / f"{name}.csv" in places else []
    sources += [f"`logs/{name}`"] if logs and logs / name in places else []
    return "\n\n".join([*parts, f"Rows: {' and '.join(sources)}, commit {', '.join(commits)}; seeds {seeds}."])


def _image(made: Table, options: Mapping[str, str]) -> str:
    column, first = made.heads[made.columns[0]], made.rows[0].arm
    if plots.BY_LENGTH.fullmatch(made.columns[0]):
        shown = "mean and spread by length"
    elif "x" in options:
        shown = f"mean {column} against {plots.label(options['x'])}"
    elif options.get("draw") == "differences":
        shown = f"{column} minus {first}, mean and 95 % interval"
    else:
        shown = f"{column} of every seed"
    apart = "quantity" if options.get("draw") == "together" else "arm"
    return f"![{shown}, by {apart}]({options['picture']})"


def beside(made: Table, bases: Sequence[str]) -> Grid:
    """Return the table of means with the first column's difference from each of `bases` behind this column.

    The difference from an arm without runs is `-`; one over fewer seeds than the arm has runs names their number.
    """
    column, each = made.columns[0], [made.differences(base) for base in bases]
    (arm, runs, first, *others), *lines = made.grids()[0]
    grid = [[arm, runs, first, *(f"minus {base}" for base in bases), *others]]
    for line in lines:
        cells = [differences.get(line[0], {}).get(column, Cell()) for differences in each]
        fewer = [f", {cell.count} seeds" if 0 < cell.count < int(line[1]) else "" for cell in cells]
        apart = [f"{cell}{seeds}" for cell, seeds in zip(cells, fewer, strict=True)]
        grid.append([*line[:3], *apart, *line[3:]])
    return grid


def equivalence(made: Table, margin: float) -> Grid:
    """Return each arm minus the first: its 95 % interval over seeds, its interval over books, and a verdict.

    The verdict is `yes` if the interval over seeds lies inside the margin, `no` if it lies outside, and `open` if it
    crosses an end of the margin.
    """
    column, first = next(name for name in made.columns if name.endswith(BITS)), made.rows[0].arm
    grid = [[f"{made.heads[column]} minus {first}", "over seeds", "over books", f"within {margin:g}"]]
    for arm, cells in made.differences().items():
        cell = cells[column]
        if cell.mean is not None and cell.spread is not None:
            near, far = abs(cell.mean) - cell.spread, abs(cell.mean) + cell.spread
            verdict = "yes" if far < margin else "no" if near > margin else "open"
            grid.append([arm, str(cell), _over_books(made, arm, column), verdict])
    return grid


def _over_books(made: Table, arm: str, column: str) -> str:
    """Return an arm's difference from the first with the 95 % interval of books that are drawn again; seeds stay."""
    key, first = column.removesuffix(BITS) + SUMS, made.rows[0].arm
    sums = {(run.arm, run.seed): run.summary.get(key) or [] for run in made.runs}
    seeds = [seed for name, seed in sums if name == arm and sums[arm, seed] and sums.get((first, seed))]
    if not seeds:
        return "-"
    lengths = [length for _, length in sums[arm, seeds[0]]]
    nats = [
        [own - base for (own, _), (base, _) in zip(sums[arm, seed], sums[first, seed], strict=True)] for seed in seeds
    ]
    bits = [statistics.fmean(book) / math.log(2) for book in zip(*nats, strict=True)]
    low, high = over_windows(bits, lengths)
    return f"{sum(bits) / sum(lengths):+.4f} [{low:+.4f}, {high:+.4f}]"


def costs(words: str) -> str:
    """Return the Markdown of a marker of costs: cache bytes and operations of a decoded token, by tokens before it."""
    import torch

    from gsm.config.load import build_model
    from gsm.costs.model import cost

    size, *models = words.split()
    heads = [f"{name}, {length_text(length)}" for name in ("cache, bytes", "decoding, MFLOP") for length in LENGTHS]
    grid = [[f"model ({size.removeprefix('size=')})", *heads]]
    for name in models:
        model_name, *overrides = name.split(",")
        if not any(word.startswith("size=") for word in overrides):
            overrides.insert(0, size)
        with torch.device("meta"):
            model = cost(build_model(model_name, overrides=overrides))
        held = [f"{sum(model.cache_bytes(tokens).values()):,}" for tokens in LENGTHS]
        grid.append(
            [
                name.replace(",", " "),
                *held,
                *(f"{sum(model.decode_flops(tokens).values()) / 1e6:,.1f}" for tokens in LENGTHS),
            ]
        )
    return grid_markdown(grid)


def measured(words: str, logs: Path | None = None) -> str:
    """Return the Markdown of a marker of measurements: lines of one table of a benchmark's page, of your own in `logs`
    where you have measured it.

    Raises ConfigError for an absent table or line, OSError for an absent page.
    """
    name, *rest = words.split()
    wanted = rest.pop(0).removeprefix("lines=").split(",") if rest and rest[0].startswith("lines=") else []
    first = " ".join(rest)
    place = logs / name if logs and (logs / name).is_file() else BENCHMARKS / name
    page = place.read_text(encoding="utf-8")
    parts = [part.splitlines() for part in page.split("\n\n") if part.startswith(f"| {first} |")]
    if not parts:
        raise ConfigError(f"measured must name the first heading of a table of {name}, got {first}")
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in parts[0])
    lines = [line for line in lines if any(line[1:])]
    known = {line[0].split()[0]: line for line in lines}
    if absent := [word for word in wanted if word not in known]:
        raise unknown("line", absent[0], known, name)
    shown = [known[word] for word in wanted] or lines
    filled = [i for i in range(len(head)) if any(line[i] for line in shown)]
    return grid_markdown([[line[i] for i in filled] for line in (head, *shown)])


def yamls(group: str) -> str:
    """Return the Markdown of a marker of yamls: the opening comments, and a column of times if any has a time."""
    grid = [[f"`{group}=`", "description", "time on one or two CPU cores"], ["---"] * 3]
    for name in paths.variants(group):
        if not name.startswith(HIDDEN):
            texts = opening((paths.configs() / group / f"{name}.yaml").read_text(encoding="utf-8"))
            grid.append([f"`{name}`", *(text.replace("|", "\\|") for text in texts)])
    columns = 3 if any(time for _, _, time in grid[2:]) else 2
    return "\n".join(f"| {' | '.join(cells[:columns])} |" for cells in grid)


def names(words: str) -> str:
    """Return the Markdown of a marker of taps: name, numbers of the layers or stages that have it, and of the last its
    shape, in a call of 16 tokens, and dtype."""
    from gsm.config.load import build_model
    from gsm.observe import taps

    size, name = words.split()
    numbers: dict[str, list[str]] = {}
    ends: dict[str, list[str]] = {}
    for tap, (shape, dtype) in taps(build_model(name, overrides=[size])).items():
        numbered = re.fullmatch(r"(?P<place>encoder|decoder|stage)/(?P<number>\d+)/(?P<rest>.+)", tap)
        place = f"{numbered['place']}/<n>/{numbered['rest']}" if numbered else tap
        numbers.setdefault(place, []).extend([numbered["number"]] if numbered else [])
        ends[place] = [str(list(shape)), str(dtype).removeprefix("torch.")]
    grid = [[f"`{place}`", ", ".join(numbers[place]), *ends[place]] for place in numbers]
    return grid_markdown([["tap", "n", "shape", "dtype"], *grid])


def picture(words: str, page: Path, folder: Path = RESULTS, logs: Path | None = None) -> None:
    """Draw the picture of a marker, where it has one and there are rows, beside its page."""
    _, made, _, options = _parsed(words, folder, logs)
    if not made.runs or "picture" not in options:
        return
    column, place = made.columns[0], page.parent / options["picture"]
    label, draw = made.heads[column], options.get("draw")
    if by_length := plots.BY_LENGTH.fullmatch(column):
        points = _by_length(made, by_length["run"])
        if draw != "together":
            drawn = plots.quantities(points)
        elif len(made.rows) == 1:
            lines = {quantity.replace("_", " "): seeds for quantity, arms in points.items() for seeds in arms.values()}
            drawn = plots.over_length(lines, plots.label(by_length["quantity"]))
        else:
            raise ConfigError(f"arms must be one arm for draw=together, got {', '.join(row.arm for row in made.rows)}")
        write_whole(place, plots.png(drawn))
        return

    def values(column: str) -> dict[str, list[float]]:
        """The values of all seeds, by arm."""
        each = {row.arm: [run.value(column) for run in made.runs if run.arm == row.arm] for row in made.rows}
        return {arm: [x for x in some if x is not None] for arm, some in each.items()}

    lines = max(len(name.splitlines()) for name in plots.named(row.arm for row in made.rows).values())
    height = 3.2 if "x" in options else 1.0 + (0.12 + 0.13 * lines) * len(made.rows)
    figure, (axes,) = plots.figure(width=5.2, height=height)
    if "x" in options:
        across, up = values(options["x"]), values(column)
        pairs = {arm: (across[arm], up[arm]) for arm in up}
        plots.against(axes, pairs, plots.label(options["x"]), label)
    elif draw == "differences":
        better = BETTER.get(column.rpartition("/")[2])
        label += f"\nminus {made.rows[0].arm}" + (f"; {better} is better" if better else "")
        apart = {arm: cells[column] for arm, cells in made.differences().items()}
        plots.differences(axes, apart, label, float(options.get("margin", 0)))
    else:
        plots.seeds(axes, values(column), label)
    write_whole(place, plots.png(figure))


def _by_length(made: Table, run: str) -> dict[str, dict[str, list[dict[int, float]]]]:
    """Return all quantities of an evaluation by length: by quantity, by arm, for each seed its values by length."""
    points: dict[str, dict[str, list[dict[int, float]]]] = {}
    for each in made.runs:
        known = [(match, each.value(name)) for name in each.summary if (match := plots.BY_LENGTH.fullmatch(name))]
        values: dict[str, dict[int, float]] = {}
        for match, value in known:
            if match["run"] == run and value is not None:
                stage = f", stage {match['stage']}" if match["stage"] else ""
                values.setdefault(f"{match['quantity']}{stage}", {})[int(match["length"])] = value
        for quantity, by_length in values.items():
            points.setdefault(quantity, {}).setdefault(each.arm, []).append(by_length)
    return points


def _parsed(words: str, folder: Path, logs: Path | None = None) -> tuple[str, Table, list[str], dict[str, str]]:
    """Return the file's name, the table, the arms that are subtracted, and the options of a marker of rows.

    Raises ConfigError for an absent seed or arm, and for a label that two arms have.
    """
    name, *rest = words.split()
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    columns, path = [word for word in rest if "=" not in word], folder / f"{name}.csv"
    known = runs(path, options.get("split", "validation"), logs)
    without, seeds = options.get("without", "").split(","), {str(run.seed) for run in known}
    if known and "without" in options and not seeds.issuperset(without):
        known_seeds = ", ".join(sorted(seeds, key=int))
        raise ConfigError(f"without must be seeds of {path.name}, {known_seeds}, got {options['without']}")
    trained = [run for run in known if str(run.seed) not in without]
    changes = [*filter(None, map(CHANGE.fullmatch, columns))]
    for run in trained:
        for change in changes:
            ends = run.value(change["after"]), run.value(change["before"])
            run.summary[change[0]] = math.log(ends[0] / ends[1]) if ends[0] and ends[1] else None
    bases = options["against"].split(",") if "against" in options else []
    with_runs = dict.fromkeys(run.arm for run in trained)
    arms = options["arms"].split(",") if "arms" in options else with_runs
    for arm in arms:
        if with_runs and arm not in with_runs:
            raise unknown("arm", arm, with_runs, path.name)
    made = summarise(trained, columns, sorted(arms, key=lambda arm: arm not in bases[:1]))
    ratios = {change[0]: f"ln({plots.label(change['after'])} / {plots.label(change['before'])})" for change in changes}
    labels = ratios | _labels(trained)
    shown = names_of([*(row.arm for row in made.rows), *bases], labels)
    made = made.labelled(shown, labels)
    return name, made, [shown[base] for base in bases] or [row.arm for row in made.rows[:1]], options


def _labels(runs: Iterable[RunSummary]) -> dict[str, str]:
    """Return the labels in the yamls of the experiments of runs, without those of a yaml that they build on."""
    commands = (EXPERIMENT.search(str(run.summary.get("command"))) for run in runs)
    labels: dict[str, str] = {}
    for experiment in sorted({match[1] for match in commands if match}):
        path = paths.configs() / f"experiment/{experiment}.yaml"  # not composed: that takes seconds
        labels |= (OmegaConf.select(OmegaConf.load(path), "labels") if path.is_file() else None) or {}
    return labels


def _nested(line: Mapping[str, str]) -> dict[str, Any]:
    """Return a row as a summary again: dots in names go down."""
    summary: dict[str, Any] = {}
    for name, text in line.items():
        *above, last = name.split(".")
        place = summary
        for part in above:
            place = place.setdefault(part, {})
        try:
            place[last] = json.loads(text)
        except ValueError:
            place[last] = text
    return summary


def _text(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return "" if value is None else value if isinstance(value, str) else json.dumps(int(value) if whole else value)


def main(pages: Sequence[str], folder: Path = RESULTS, logs: Path | None = None) -> None:
    """Rewrite the tables of pages, by default of all, and draw the pictures of those that have changed."""
    for page in map(Path, pages or all_pages()):
        before = page.read_text(encoding="utf-8")
        after = tables(before, folder, logs)
        if after != before:
            write_whole(page, after.encode())
        if after != before or logs:  # a page of one's own has no pictures yet
            for match in MARKED.finditer(after):
                if match["kind"] in ("rows", "picture"):
                    picture(match["words"], page, folder, logs)
        if count := len(MARKED.findall(before)):
            print(f"{os.path.relpath(page)}: {count} tables")


if __name__ == "__main__":
    words = sys.argv[1:]
    of_logs = [Path(word.removeprefix("logs=")) for word in words if word.startswith("logs=")]
    main([word for word in words if not word.startswith("logs=")], logs=of_logs[-1] if of_logs else None)
