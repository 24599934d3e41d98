"""What all models are built from: attention, recurrences, norms, rotary positions, feed-forward, residual streams."""
