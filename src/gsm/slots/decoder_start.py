"""The initial residual streams of the decoder: the config group ``model/decoder_start`` (paper, section 3.3).

The paper initialises the decoder with z, the sum of the encoder's output and the retrieved history. It does not specify
whether the decoder also gets the encoder's residual streams.
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
            encoded: the streams after the last encoder layer and their read-out e, for the R positions that enter the
                decoder.
            z_BRD: the state writer's z for these positions.
        """


class State(DecoderStart):
    """The paper: every stream starts as a copy of z."""

    def __call__(self, encoded: Streams, z_BRD: Tensor) -> Streams:
        """Return equal copies of z. The first decoder layer reads the first copy."""
        return Streams.copies(z_BRD, encoded.value_BTXD.shape[2])


class EncoderStreams(DecoderStart):
    """The encoder's streams go on in the decoder, which then gets the retrieved history only from the state."""

    def __call__(self, encoded: Streams, z_BRD: Tensor) -> Streams:
        """Return the encoder's streams unchanged."""
        return encoded
