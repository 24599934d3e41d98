"""The loops that Numba compiles, one module per operation, imported when they first run."""
