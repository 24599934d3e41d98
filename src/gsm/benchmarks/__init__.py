"""What `benchmark.py` runs; the benchmarks of single operations are `gsm_kernels.benchmark`, which needs no models."""
