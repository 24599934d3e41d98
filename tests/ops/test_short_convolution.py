"""short_convolution: the reference against the sum written out token by token, and the loops against the reference."""

from importlib import import_module

import pytest
import torch
from calls import cast, convolved, gradients
from oracles import normal
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from gsm_kernels import listening, native, short_convolution, using
from gsm_kernels.testing import assert_close

SIZES = {
    "documents and padding": {"stored": 0, "tokens": 29},
    "documents that began before": {"stored": 3, "tokens": 29},
    "fewer stored than it sees": {"stored": 1, "tokens": 7, "width": 5, "before": 4},
    "none stored of what came before": {"stored": 0, "tokens": 17, "before": 9},
    "more stored than it sees": {"stored": 9, "tokens": 6, "width": 3},
    "wider than all there is": {"stored": 1, "tokens": 3, "width": 9, "padding": 1, "before": 5},
    "width 1": {"stored": 2, "tokens": 11, "width": 1},
    "width 2": {"stored": 1, "tokens": 11, "width": 2},
    "width 6, in several blocks": {"tokens": 61, "width": 6},
    "one token": {"stored": 3, "tokens": 1, "batch": 1, "padding": 0},
    "one channel": {"channels": 1},
    "odd channels": {"channels": 131, "tokens": 41, "batch": 3},
    "no token": {"stored": 3, "tokens": 0, "padding": 0},
    "nothing": {"stored": 0, "tokens": 0, "padding": 0},
    "no sequence": {"batch": 0},
    "no channel": {"channels": 0},
}


def call(case: str) -> dict:
    sizes = SIZES[case]
    if sizes.get("batch") == 0 or case == "nothing":
        empty = convolved(**{**sizes, "batch": 1, "tokens": 5, "stored": 2, "padding": 0})
        kept = slice(0, 0) if case == "no sequence" else slice(None)
        tokens = slice(0, 0) if case == "nothing" else slice(None)
        return {k: x if k == "weight" else x[kept, tokens] for k, x in empty.items()}
    return convolved(**sizes)


def written_out(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Tensor:
    stored = seen_BEC.shape[1] - position_BT.shape[1]
    total_BTC = seen_BEC.new_zeros(*position_BT.shape, len(weight))
    for b, position_T in enumerate(position_BT.tolist()):
        for t, position in enumerate(position_T):
            for back in range(min(position, weight.shape[1] - 1, stored + t) + 1):
                total_BTC[b, t] += weight[:, back] * seen_BEC[b, stored + t - back]
    return total_BTC


def strided(x):
    return x.mT.contiguous().mT if x.ndim > 1 else x


@pytest.fixture
def threads():
    """Sets the number of threads, and sets it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["reference", "numba"])
def form(request):
    """Every implementation in turn, forced."""
    if request.param == "numba" and native.missing():
        pytest.skip(native.missing())
    with using(request.param):
        yield request.param


@pytest.mark.parametrize("case", SIZES)
def test_the_reference_equals_the_sum_token_by_token(case):
    given = call(case)
    with listening() as heard:
        (out,), grads = gradients(short_convolution, given)
    (expected,), expected_grads = gradients(written_out, given)
    assert heard == [("short_convolution", "reference")], "float64 is for the reference"
    assert_close(out, expected)
    for name in ("seen_BEC", "weight"):
        wanted = torch.zeros_like(given[name]) if expected_grads[name] is None else expected_grads[name]
        assert_close(grads[name], wanted, name=f"gradient of {name}", gradient=True)


@pytest.mark.parametrize("case", ["documents that began before", "wider than all there is", "width 1"])
def test_its_gradients_equal_differences(case):
    seen, weight, position = call(case).values()
    assert torch.autograd.gradcheck(
        short_convolution, (seen[:, :, :3].requires_grad_(), weight[:3].requires_grad_(), position)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", SIZES)
def test_the_loops_equal_the_reference_in_float64_whatever_the_strides(case, dtype):
    pytest.importorskip("numba")
    given = cast(call(case), dtype)
    with listening() as heard:
        (out,), grads = gradients(lambda **one: short_convolution(**{k: strided(x) for k, x in one.items()}), given)
    (expected,), expected_grads = gradients(short_convolution, cast(given, torch.float64))
    assert heard == [("short_convolution", "numba")] and out.dtype == dtype
    assert_close(out, expected)
    for name, wanted in expected_grads.items():
        assert grads[name].dtype == dtype
        assert_close(grads[name], wanted, name=f"gradient of {name}", gradient=True)


def test_the_number_of_threads_changes_no_bit(threads, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(import_module("gsm_kernels.short_convolution.numba"), "LEAST", 1 << 12)
    given, found = cast(convolved(batch=3, tokens=501, channels=131), torch.float32), []
    for count in (1, 2, 3):
        threads(count)
        found.append(gradients(short_convolution, given))
    (out, grads), *others = found
    for other_out, other_grads in others:
        assert torch.equal(other_out[0], out[0])
        assert all(torch.equal(other_grads[name], grad) for name, grad in grads.items())


def test_chunk_by_chunk_it_gives_what_it_gives_at_once_bit_for_bit(form):
    seen, weight, position = cast(convolved(tokens=23, stored=0, channels=33), torch.float32).values()
    whole = short_convolution(seen, weight, position)
    kept = weight.shape[1] - 1
    for step in (1, 2, 5):
        chunks = [
            short_convolution(seen[:, max(at - kept, 0) : at + step], weight, position[:, at : at + step])
            for at in range(0, 23, step)
        ]
        assert torch.equal(torch.cat(chunks, dim=1), whole)


def test_neither_other_documents_nor_later_tokens_nor_padding_are_seen(form):
    position = torch.tensor([[5, 6, 0, 1, 2, -1, -1, 0, 1]])
    document = torch.tensor([0, 0, 0, 1, 1, 1, 2, 3, 4, 4])  # of the entries, of which one was stored
    seen, weight = normal(1, 10, 6, dtype=torch.float32), normal(6, 4, seed=1, dtype=torch.float32)
    out = short_convolution(seen, weight, position)
    for at in range(10):
        other = seen.index_fill(1, torch.tensor([at]), 7.0)
        changed = (short_convolution(other, weight, position) != out).any(-1)[0].nonzero().flatten().tolist()
        reached = [t for t in range(9) if 0 <= t + 1 - at < 4 and document[t + 1] == document[at]]
        assert changed == [t for t in reached if position[0, t] >= 0]
    assert (out[0, 5:7] == 0).all()


def test_it_keeps_its_inputs_and_nothing_else_for_backward(form):
    seen, weight, position = cast(convolved(), torch.bfloat16).values()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        short_convolution(seen.requires_grad_(), weight.requires_grad_(), position)
    assert kept == [x.data_ptr() for x in (seen, weight, position)]


def test_the_loops_are_called_directly_where_nothing_learns():
    pytest.importorskip("numba")
    seen, weight, position = cast(convolved(), torch.float32).values()
    for learns in (False, True):
        with profile(activities=[ProfilerActivity.CPU]) as ran:
            out = short_convolution(seen, weight.requires_grad_(learns), position)
        assert out.requires_grad == learns
        assert any(event.name == "gsm_kernels::short_convolution_cpu" for event in ran.events()) == learns


def test_the_loops_pass_a_compiler_and_tensors_without_memory():
    pytest.importorskip("numba")
    given = cast(convolved(), torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(lambda **one: short_convolution(**one), fullgraph=True, backend="aot_eager")
    (out,), grads = gradients(compiled, given)
    (expected,), expected_grads = gradients(short_convolution, given)
    assert torch.equal(out, expected) and all(torch.equal(grads[name], x) for name, x in expected_grads.items())
    with FakeTensorMode() as mode:
        fake = short_convolution(**{name: mode.from_tensor(x) for name, x in given.items()})
    assert fake.shape == out.shape and fake.dtype == out.dtype


@pytest.mark.parametrize(
    "change",
    [
        {"weight": normal(6, 4)},
        {"weight": normal(5, 0)},
        {"weight": normal(5)},
        {"position_BT": torch.zeros(3, 13, dtype=torch.int64)},
        {"position_BT": torch.zeros(2, 16, dtype=torch.int64)},
    ],
)
def test_shapes_that_do_not_fit_are_named(change):
    with pytest.raises(ValueError, match=r"short_convolution: seen \(2, 15, 5\), .* must be \[B, E, C\]"):
        short_convolution(**{**convolved(), **change})
