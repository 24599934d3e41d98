"""What is measured, and what to compare it with."""
