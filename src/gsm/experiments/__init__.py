"""Runs: one training from its header to its summary, arms and seeds of an experiment, tables of what came out."""
