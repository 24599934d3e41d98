"""GSM, the baseline and the comparators."""
