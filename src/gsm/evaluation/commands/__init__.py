"""What `evaluate.py` and `generate.py` do."""
