"""The input h of a stage: the slot ``model/stage_input`` (paper, section 3.1, before equation 7).

In the paper, h is a mixture of the residual streams of the stage's layer. It does not specify whether these are the
streams before or after the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gsm.layers.block import LayerOutput


class StageInput(ABC):
    """Base of all variants: h is an input or output of the stage's encoder layer."""

    @abstractmethod
    def __call__(self, layer: LayerOutput) -> Tensor:
        """Return h_s, [B, T or R, D], for at least the rows of the layer's output.

        Args:
            layer: output of the stage's encoder layer, without its streams.
        """


class BeforeLayer(StageInput):
    """The input of the layer's attention, before its norm. The layer's own query is computed from the same input."""

    def __call__(self, layer: LayerOutput) -> Tensor:
        """Return the layer's input."""
        assert layer.layer_input_BTD is not None  # set by Block
        return layer.layer_input_BTD


class AfterLayer(StageInput):
    """The read-out of the streams after attention and feed-forward of the layer; after the last layer, the encoder's
    output e."""

    def __call__(self, layer: LayerOutput) -> Tensor:
        """Return the layer's output."""
        assert layer.layer_output_BRD is not None  # set by Block
        return layer.layer_output_BRD
