"""What happens beside training: checkpoints, throughput, progress, pictures, the run's summary."""
