"""What the residual streams of the decoder start from: the slot ``model/decoder_start`` (paper, section 3.3).

The paper initialises the decoder's representation with z, and leaves open what becomes of the encoder's streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gsm.layers.residual import Streams


class DecoderStart(ABC):
    """Base of all variants."""

    @abstractmethod
    def __call__(self, encoded: Streams, z_BRD: Tensor) -> Streams:
        """The streams that enter the decoder's first layer.

        Args:
            encoded: the streams that leave the encoder's last layer, and e, which is read of them; of the R positions
                that enter the decoder.
            z_BRD: what the state's entries of these positions are made of.
        """


class State(DecoderStart):
    """z, copied to all streams; the decoder inherits nothing else."""

    def __call__(self, encoded: Streams, z_BRD: Tensor) -> Streams:
        """Equal copies, of which the first site reads the first."""
        return Streams.copies(z_BRD, encoded.value_BTXD.shape[2])


class EncoderStreams(DecoderStart):
    """The encoder's streams go on; what the stages retrieve reaches the decoder through the state alone."""

    def __call__(self, encoded: Streams, z_BRD: Tensor) -> Streams:
        """The streams as they are, of which the first site reads what it would read in one stack."""
        return encoded
