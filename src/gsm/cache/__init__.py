"""The memory between calls: windows, banks, index keys, states."""
