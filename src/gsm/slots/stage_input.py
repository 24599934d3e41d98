"""What the paper's h of a stage is: the slot ``model/stage_input`` (paper, section 3.1, before equation 7).

In the paper h is a mixture of the residual streams of the stage's layer; whether of those that enter the layer or of
those that leave it, is open.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gsm.layers.block import LayerOutput


class StageInput(ABC):
    """Base of all variants: a stage reads something that its encoder layer has read or made."""

    @abstractmethod
    def __call__(self, layer: LayerOutput) -> Tensor:
        """h_s, [B, T or R, D], of at least the rows that the layer gives back.

        Args:
            layer: what the stage's encoder layer gives back besides its output.
        """


class BeforeLayer(StageInput):
    """What the layer's attention reads of the streams, before its norm: the layer's own query is made of the same."""

    def __call__(self, layer: LayerOutput) -> Tensor:
        """The layer's input."""
        assert layer.layer_input_BTD is not None  # a block says it
        return layer.layer_input_BTD


class AfterLayer(StageInput):
    """What the streams are read as once attention and feed-forward of the layer have written to them; after the last
    layer, the encoder's output e."""

    def __call__(self, layer: LayerOutput) -> Tensor:
        """The layer's output."""
        assert layer.layer_output_BRD is not None  # a block says it
        return layer.layer_output_BRD
