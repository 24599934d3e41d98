"""The banks that the encoder's own attention reads in addition to its window: the slot ``model/encoder_reading``.

Every variant builds the banks, because the aggregation stages read them.
"""

from __future__ import annotations


class EncoderReading:
    """Base of all variants."""

    # Whether a layer attends to the bank entries that its indexer selects. If false, it reads its window only, and has
    # no indexer.
    reads_bank: bool


class TopK(EncoderReading):
    """The paper: window and the Top-K of the bank (section 3.1)."""

    reads_bank = True


class WindowOnly(EncoderReading):
    """A control: only the stages read history beyond the windows. It needs a retriever with its own selection."""

    reads_bank = False
