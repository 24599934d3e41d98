"""Experiments: arms and seeds, their runs here or on a cluster, and tables of their numbers."""
