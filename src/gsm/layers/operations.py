"""All operations with several implementations: those of `gsm_kernels`, and those that a single layer defines and
uses."""

import gsm_kernels
from gsm.layers.attend_blocks import attend_blocks
from gsm.layers.delta_rule import delta_rule
from gsm.layers.grouped_linear import grouped_linear
from gsm.layers.slot_attention import slot_attention
from gsm_kernels import Op

OPS: tuple[Op, ...] = (*gsm_kernels.OPS, attend_blocks, delta_rule, slot_attention, grouped_linear)
