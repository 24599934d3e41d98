"""Measures of trained models, and the numbers to compare them with."""
