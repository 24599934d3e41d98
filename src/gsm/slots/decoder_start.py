"""The initial residual streams of the decoder: the slot ``model/decoder_start`` (paper, section 3.3).

The paper initialises the decoder's representation with z, and does not specify the use of the encoder's streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gsm.layers.residual import Streams


class DecoderStart(ABC):
    """Base of all variants."""

    @abstractmethod
    def __call__(self, encoded: Streams, z_BRD: Tensor) -> Streams:
        """Return the streams that enter the decoder's first layer.

        Args:
            encoded: the streams after the encoder's last layer, and their read-out e, for the R positions that enter
                the decoder.
            z_BRD: output of the writer's ``fuse`` for these positions.
        """


class State(DecoderStart):
    """z, copied to all streams; the decoder gets nothing else."""

    def __call__(self, encoded: Streams, z_BRD: Tensor) -> Streams:
        """Return equal copies of z; the decoder's first site reads the first copy."""
        return Streams.copies(z_BRD, encoded.value_BTXD.shape[2])


class EncoderStreams(DecoderStart):
    """The encoder's streams; retrieved history reaches the decoder only through the state."""

    def __call__(self, encoded: Streams, z_BRD: Tensor) -> Streams:
        """Return the streams unchanged; the decoder's first site reads them as in one stack."""
        return encoded
