"""Benchmarks: `python benchmark.py benchmark=NAME`, and on a machine with a GPU `python benchmarks/gpu.py STAGE`.

The harness is three files: `machine` (what is measured on), `timing` (runs in alternating rounds), `results` (files
that grow row by row, and their tables). Each benchmark is a file that has `run`. `kernels`, `smoke` and `compiled` need
PyTorch and `gsm_kernels` alone; the others measure models of `gsm`.

This package is beside the library and not installed with it. `benchmarks/`, the folder that it lies in, is put on the
import path by whoever needs it: `benchmark.py`, `benchmarks/gpu.py`, and in `pyproject.toml` pytest and pyright. The
repository's root must not be on it (`gsm/paths.py` says why).
"""
