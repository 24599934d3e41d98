"""The input h_s of a stage: the config group ``model/stage_input`` (paper, section 3.1, before equation 7).

In the paper, h_s is a mixture of the residual streams of the stage's encoder layer. It does not specify whether these
are the streams before or after the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gsm.layers.block import LayerOutput


class StageInput(ABC):
    """Base of all variants."""

    @abstractmethod
    def __call__(self, layer: LayerOutput) -> Tensor:
        """Return h_s for all T positions or for the R rows of the layer's output, [B, T or R, D].

        Args:
            layer: output of the stage's encoder layer.
        """


class BeforeLayer(StageInput):
    """The input of the encoder layer's attention, before the norm. The layer's query is made from the same input."""

    def __call__(self, layer: LayerOutput) -> Tensor:
        """Return the layer's input."""
        assert layer.layer_input_BTD is not None  # set by Block
        return layer.layer_input_BTD


class AfterLayer(StageInput):
    """The read-out of the streams after the attention and the feed-forward of the encoder layer; for the last layer,
    this is the encoder's output e."""

    def __call__(self, layer: LayerOutput) -> Tensor:
        """Return the layer's output."""
        assert layer.layer_output_BRD is not None  # set by Block
        return layer.layer_output_BRD
