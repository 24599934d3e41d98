"""Measuring the operations: against what the device can do at most, and against what a user would take instead.

    python -m gsm_kernels.benchmark smoke         what answers first on a GPU: is each kernel right, and how fast
    python -m gsm_kernels.benchmark kernels       every operation; on a CPU, the attention at small sizes
    python -m gsm_kernels.benchmark compiled      registers, spills and instructions of every kernel, without a GPU
    python -m gsm_kernels.benchmark table FILE    the Markdown table of a file of results

Results are JSON files in `benchmarks/results`, one row per operation and direction, written as they come: the same
command goes on where an interrupted one stopped.
"""
