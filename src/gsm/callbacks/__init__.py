"""What happens beside training: throughput, progress, the run's summary, and plain metric files."""
