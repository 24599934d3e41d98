"""Benchmarks: `python benchmark.py benchmark=NAME`.

The harness is three files: `machine` (the facts of the machine), `timing` (runs in alternating rounds), `results`
(files that grow row by row, and their tables). Each benchmark is a file with a function `run`. `plan` measures nothing.

This package is beside the library and not installed with it. `benchmark.py`, and in `pyproject.toml` pytest and
pyright, put its folder `benchmarks/` on the import path. The repository's root must not be on it (`gsm/paths.py`
explains it).
"""
