"""What autograd keeps, counted: by hand, linear in the tokens, and with layers that are recomputed."""

from __future__ import annotations

import pytest
from activations import kept, meta_model, saved_bytes

from gsm_kernels.device import triton_version

counted = pytest.mark.skipif(triton_version() is None, reason="what is kept is counted on Triton's operations")


@counted
def test_what_is_kept_is_what_the_kernels_say_by_hand():
    """Size pico: 4 streams of D = 64, F = 176, 4 heads of C = 32, query rank 32, 2 x 32 outputs, 4 + 4 layers."""
    streams, dim, hidden, heads, query, rank, output, entry = 4, 64, 176, 4, 128, 32, 64, 32
    sites = 2 * streams * dim + 2 * (dim + dim + dim)  # streams; what is read, normed, and the update
    layer = sites + 3 * hidden + 2 * rank + 2 * query + output  # gate, up, product; latent, normed; query, mixture
    stages = (dim + dim + 2 * rank + 2 * query + output) + (2 * dim + 2 * dim + 2 * rank + 2 * query + output)
    half = 8 * layer + stages + 4 * 2 * entry + 2 * 2 * entry - 2 * (streams - 1) * dim  # entries, banks; first copies
    full = 16 * (2 * (2 * streams + streams**2) + 1) + 10 * heads  # coefficients and norms of sites; softmaxes
    small = saved_bytes(meta_model("gsm", "pico", False), 64) - 4 * 512 * dim
    assert small / 64 == pytest.approx(2 * half + 4 * full, rel=0.05)


@counted
def test_what_is_kept_is_a_fixed_part_and_one_for_each_token():
    model = meta_model("gsm", "pico", False)
    few, some, many = (saved_bytes(model, tokens) for tokens in (32, 64, 96))
    assert many - some == pytest.approx(some - few, rel=1e-3)
    found = kept("gsm", "pico", False, 64)
    assert found.fixed == 4 * 512 * 64 and found.total(64) == pytest.approx(some, rel=1e-9)


@counted
def test_recomputed_layers_keep_what_enters_them():
    whole, bare = kept("gsm", "pico", False, 64), kept("gsm", "pico", True, 64)
    entering = 2 * 64 * (2 * (5 * 4 - 4))
    assert entering < bare.each < whole.each - 8 * bare.block + entering + 1
    assert whole.block == bare.block
