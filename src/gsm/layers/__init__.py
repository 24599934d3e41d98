"""The parts of all models: attention, recurrences, norms, rotary positions, feed-forward, residual streams."""
