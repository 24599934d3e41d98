"""The benchmark of the operations, with a picture of its results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gsm.benchmarks import roofline
from gsm_kernels.benchmark import kernels, report


def run(
    device: str = "auto",
    output: str = "",
    results: str = "",
    force: bool = False,
    minutes: float = 7.5,
    only: str = "",
    peers: bool = True,
    without: Sequence[str] = (),
    seconds: float = 10.0,
    rounds: int = 30,
) -> Path:
    """Measures, then prints the table and draws the picture beside the JSON file; returns that file.

    Args:
        results: a file of results; nothing is measured, and its table and picture are made again.
        device, output, force, minutes, only, peers, without, seconds, rounds: as in
            ``gsm_kernels.benchmark.kernels.run``.

    Raises:
        ValueError: a value out of range, or a file that is none of results.
    """
    what = {"device": device, "output": output, "force": force, "minutes": minutes, "only": only}
    how = {"peers": peers, "without": without, "seconds": seconds, "rounds": rounds}
    path = Path(results) if results else kernels.run(**what, **how)
    text = report.markdown(path)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    try:
        path.with_suffix(".png").write_bytes(roofline.picture(path))
    except ImportError as error:
        print(error)
    return path
