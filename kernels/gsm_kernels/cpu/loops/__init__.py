"""The loops that Numba compiles, one module for each operation; imported when they first run."""
