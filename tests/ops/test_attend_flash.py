"""attend_band by FlashAttention 4: a loop stands in for its function here, and a GPU that has it runs it."""

import inspect
import itertools

import pytest
import torch
from calls import band, cast, gradients
from check import assert_agrees, assert_near

from gsm_kernels import attend_band
from gsm_kernels.attend import flash
from gsm_kernels.attend import inputs as attend_inputs
from gsm_kernels.attend.reference import attend

SIZES = [
    {"rows": 17, "entries": 17, "padding": padding, "width": width, "seed": seed}
    for padding, width, seed in itertools.product((0, 3, 17), (1, 5, 40), range(2))
]


def stand_in():
    """A kernel of the library's signature: concatenated sequences, a causal window, a sink in the denominator."""

    def run(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
            learnable_sink, deterministic):  # fmt: skip
        assert k is v and k.shape == (q.shape[0], 1, q.shape[2])
        assert cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32 and max_seqlen_q == max_seqlen_k
        assert causal and window_size[1] == 0 and deterministic and learnable_sink.shape == q.shape[1:2]
        parts = []
        for first, end in itertools.pairwise(cu_seqlens_q.tolist()):
            place = torch.arange(end - first)
            distance = place[:, None] - place
            assert len(place) <= max_seqlen_q
            logit = softmax_scale * torch.einsum("rhc,sc->hrs", q[first:end], k[first:end, 0])
            logit = logit.masked_fill((distance < 0) | (distance > window_size[0]), -torch.inf)
            sink = learnable_sink[:, None, None].expand(-1, len(place), 1)
            weight = torch.softmax(torch.cat((logit, sink), -1), -1)[..., :-1]
            parts.append(torch.einsum("hrs,sc->rhc", weight, v[first:end, 0]))
        return torch.cat(parts), None

    return run


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_documents_become_sequences_and_queries_are_rotated(sizes, monkeypatch):
    monkeypatch.setattr(flash, "_kernel", stand_in)
    call = band(**sizes)
    got = gradients(lambda **call: flash.attend_band(attend_inputs.band(**call)), call)
    assert_near(got, gradients(lambda **call: attend(attend_inputs.band(**call)), call))


def test_calls_that_it_cannot_express_are_refused(monkeypatch):
    def refusal(dtype=torch.bfloat16, **sizes):
        call = cast(band(**{"rows": 17, "entries": 17, "channels": 64, **sizes}), dtype)
        return str(flash.refuses(attend_inputs.band(**call)))

    assert "GPU" in refusal()
    monkeypatch.setattr(flash, "unfit_for_package", lambda *_, **options: None)
    assert refusal() == "None"
    assert "got 32" in refusal(channels=32)
    assert "entries" in refusal(rows=5)


@pytest.mark.parametrize(
    ("release", "capability", "reason"),
    [
        ("4.0.0b25", (9, 0), "4.0.0b25"),
        ("4.0.0b26", (9, 0), None),
        ("4.0.0", (10, 0), None),
        ("4.0.0.dev1", (9, 0), "4.0.0.dev1"),
        ("4.0.0", (12, 0), "Hopper"),
        (None, (9, 0), "not installed"),
    ],
)
def test_a_version_without_a_gradient_for_sinks_is_refused(release, capability, reason, monkeypatch):
    monkeypatch.setattr(flash, "version", lambda package: release)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    refusal = flash._too_old.__wrapped__()  # without its cache
    assert refusal is reason is None or reason in str(refusal)


@pytest.mark.gpu
@pytest.mark.skipif(flash.missing() is not None, reason=str(flash.missing()))
@pytest.mark.parametrize("channels", [64, 128])
def test_it_agrees_with_the_reference_on_a_gpu(channels):
    given = inspect.signature(stand_in()).parameters
    assert set(given) <= set(inspect.signature(flash._kernel()).parameters)
    for padding in (0, 20):
        sizes = {"rows": 500, "entries": 500, "width": 128, "heads": 32, "channels": channels, "padding": padding}
        assert_agrees(attend_band, band(**sizes), torch.bfloat16, "flash")
