"""What is remembered between calls: windows, banks, index keys, states."""
