"""What the encoder's own attention reads besides its window: the slot ``model/encoder_reading``.

Whatever is chosen, the banks are built, because the aggregation stages read them.
"""

from __future__ import annotations


class EncoderReading:
    """Base of all variants."""

    # Whether a layer attends to bank entries that its indexer selects. If not, it reads its window alone and no
    # indexer is built.
    reads_bank: bool


class TopK(EncoderReading):
    """The paper: window and the Top-K of the bank (section 3.1)."""

    reads_bank = True


class WindowOnly(EncoderReading):
    """A control: only the stages bring history from beyond the windows. Needs a retriever that selects by itself."""

    reads_bank = False
