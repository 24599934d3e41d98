"""Files of results as text: a line as a row is measured, a table of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .goals import goals_of, verdict
from .results import read

HEAD = ("operation", "direction", "ran", "ms (quartiles)", "timed by", "of the floor", "rate", "faster than", "goals")


def line(row: Mapping[str, Any]) -> str:
    """One row in one line."""
    if row.get("failed"):
        return f"{row['case']}, {row['direction']}: failed: {row['failed']}"
    against = f"; {_ratios(row)}" if row["peers"] or row.get("unfinished") else ""
    return f"{row['case']}, {row['direction']} ({row['implementation']}): {_time(row['ms'])} ms, {_share(row)}{against}"


def markdown(path: Path) -> str:
    """The table of a file of results, with what it was measured on. Raises ValueError if it is no such file."""
    content = read(path)
    rows = [row for row in content["rows"].values() if "case" in row]
    if content["rows"] and not rows:
        raise ValueError(f"{path} is a file of another benchmark: no row of it has a case")
    absent = sorted(
        {f"* {name}: {peer['absent']}" for r in rows for name, peer in r["peers"].items() if "absent" in peer}
    )
    left_out = "\n\nTook no part somewhere:\n\n" + "\n".join(absent) if absent else ""
    return f"# {path.stem}\n\n{_measured_on(content, rows)}\n\n{table(HEAD, map(_cells, rows))}{left_out}\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _measured_on(content: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    sentences = [f"{content['device']}, {versions}, commit {content['commit']}, `{content['command']}`."]
    if content.get("driver"):
        sentences.append(f"Driver {content['driver']}, CUDA {content['cuda']}.")
    if rows:
        roof = rows[-1]["ceilings"]
        products, copies = rate(roof["flops"], "FLOP/s"), rate(roof["bytes"], "B/s")
        sentences.append(f"Ceilings: {products} in {roof['dtype']}, {copies} copied.")
    drawn = [row["clocks"] for row in rows if row.get("clocks")]
    if drawn:
        clocks, power = [d["sm_mhz"] for d in drawn], [d["power_w"] for d in drawn]
        sentences.append(f"SM clocks {min(clocks):g} to {max(clocks):g} MHz, {min(power):g} to {max(power):g} W.")
    return " ".join(sentences)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    ran, goals = (row["case"], row["direction"], row["implementation"]), map(partial(verdict, row=row), goals_of(row))
    if row.get("failed"):
        return *ran, f"failed: {row['failed']}", "", "", "", "", "; ".join(goals)
    seconds = row["ms"]["median"] / 1e3
    rates = f"{rate(row['flops'] / seconds, 'FLOP/s')}, {rate(row['bytes'] / seconds, 'B/s')}"
    return *ran, _time(row["ms"]), _how(row), _share(row), rates, _ratios(row), "; ".join(goals)


def rate(number: float, unit: str) -> str:
    """Three digits with T or G."""
    return f"{number / 1e12:.3g} T{unit}" if number >= 1e11 else f"{number / 1e9:.3g} G{unit}"


def _time(ms: Mapping[str, float]) -> str:
    return f"{ms['median']:.4g} ({ms['low']:.4g} to {ms['high']:.4g})"


def _how(row: Mapping[str, Any]) -> str:
    """How a row or a peer was timed, and how long the host takes to launch it."""
    host = row.get("host_ms")
    return row.get("timed", "") + (f", launched in {host:.2g} ms" if host is not None else "")


def _share(row: Mapping[str, Any]) -> str:
    return f"{row['share_of_floor']:.0%} of {row['floor_ms']:.3g} ms"


def _ratios(row: Mapping[str, Any]) -> str:
    """How many times as long the peers take; of those that are not timed as most are, how they were."""
    if row.get("unfinished"):
        return f"measured alone, since with its peers: {row['unfinished']}"
    if row.get("alone"):
        return "measured alone so far"
    ratios = [(f"{name} {peer['ratio']:.2f} x", peer) for name, peer in row["peers"].items() if "ratio" in peer]
    return ", ".join(
        f"{words} ({_how(peer)})" if peer.get("timed") in ("replay", "long pause") else words for words, peer in ratios
    )
