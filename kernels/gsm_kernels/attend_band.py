"""Sliding-window attention with a sink; one latent entry is both key and value of all heads.

This is `gsm_kernels.attend` without a bank. With q = RoPE_t(query), and z = q . entry / sqrt(C) over the last `width`
entries up to row t,

    out_h = RoPE_-t( sum_i exp(z_hi) entry_i / ( sum_i exp(z_hi) + exp(sink_h) ) )

Arguments, result and errors are those of `gsm_kernels.attend`, without bank_BFC, index_BRK and bias_BRK.

Source: the decoder's attention to the shared state in the global state model; sliding-window attention with one
shared key and value head (Shazeer 2019).
"""

from functools import partial

from . import launch
from .attend import reference, triton
from .attend.inputs import band, check_window
from .dispatch import Impl, Op

attend_band = Op(
    "attend_band",
    reference.attend,
    (Impl("triton", triton.attend, triton.refuses, launch.missing),),
    inputs=band,
    check=partial(check_window, "attend_band"),
    doc=__doc__,
)
