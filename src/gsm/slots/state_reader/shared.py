"""The paper's reader: every decoder layer reads the same M entries with a new query (section 3.3)."""

from __future__ import annotations

from gsm.slots.state_reader.base import StateReader


class Shared(StateReader):
    """One state for all layers, whose entries are keys and values at once."""
