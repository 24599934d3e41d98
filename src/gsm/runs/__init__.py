"""Runs: a configuration composed and checked, a model built or loaded, a training from its header to its summary."""
