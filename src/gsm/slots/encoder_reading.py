"""Whether the encoder's attention reads its banks besides its window: the config group ``model/encoder_reading``.

The banks are built in any case, because the aggregation stages read them.
"""

from __future__ import annotations


class EncoderReading:
    """Base of all variants."""

    # Whether encoder layers attend to the bank entries that an indexer selects. If false, they read only their window,
    # and have no indexer.
    reads_bank: bool


class TopK(EncoderReading):
    """The paper: the window, and the Top-K entries of the bank (section 3.1)."""

    reads_bank = True


class WindowOnly(EncoderReading):
    """A control: only the stages read history beyond the windows. It needs a retriever that makes its own selection."""

    reads_bank = False
