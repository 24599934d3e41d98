"""attend_range as compiled loops, which decoding uses: against the reference in float64."""

import pytest
import torch
from calls import cast, ranges
from closeness import assert_close
from oracles import normal
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gsm_kernels import attend_range, listening, using
from gsm_kernels.attend_range.reference import Inputs
from gsm_kernels.cpu import attend_range as numba
from gsm_kernels.cpu import native

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

SIZES = {
    "several rows": {},
    "one row": {"rows": 1},
    "one row and one slot": {"rows": 1, "slots": 1},
    "one key head": {"heads": 8, "groups": 1, "channels": 48},
    "a key head for every query head": {"heads": 8, "groups": 8},
    "four query heads for a key head": {"heads": 16, "groups": 4, "channels": 64},
    "three and seven query heads for a key head": {"heads": 21, "groups": 3},
    "one head": {"heads": 1, "groups": 1},
    "a batch of five": {"batch": 5, "rows": 2, "slots": 130},
    "as many slots as are taken at a time": {"slots": 64},
    "one slot more": {"slots": 65},
    "many slots": {"slots": 3000, "batch": 1, "rows": 2},
    "no slots": {"slots": 0},
    "no rows": {"rows": 0},
    "no sequences": {"batch": 0},
}


def call(batch=2, rows=5, slots=203, heads=4, groups=2, channels=16, dtype=torch.float32, seed=0) -> dict:
    """Return rows that see ranges of a memory with more room than slots, keys and values side by side.

    Places that no row may read are NaN. The first row sees all slots, the last row sees none.
    """
    drawn = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, slots + 1, (2, batch, rows), generator=drawn).sort(0).values
    if rows and batch:
        ends[0, 0, 0], ends[1, 0, 0] = 0, slots
        if batch * rows > 1:
            ends[:, -1, -1] = slots // 2
    store = torch.full((batch, slots + 9, 2 * groups * channels), torch.nan).to(dtype)
    store[:, :slots] = normal(batch, slots, 2 * groups * channels, seed=seed).to(dtype)
    key, value = store[:, :slots].unflatten(-1, (2, groups, channels)).unbind(2)
    query = 2 * normal(batch, rows, heads, channels, seed=seed + 1).to(dtype)
    return {"query_BRHC": query, "key_BFGC": key, "value_BFGC": value, "first_BR": ends[0], "last_BR": ends[1]}


def by_loops(inputs: dict, op=attend_range) -> Tensor:
    with listening() as heard, torch.no_grad():
        out = op(**inputs)
    assert heard == [("attend_range", "numba")]
    return out


def by_reference(inputs: dict) -> Tensor:
    """Return the reference's output for the same numbers in float64."""
    with using("reference"):
        return attend_range(**cast(inputs, torch.float64))


@pytest.fixture
def threads(monkeypatch):
    """Set the number of threads and restore it; a small threshold gives each thread work."""
    monkeypatch.setattr(numba, "THREAD", 1)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_the_loops_are_the_reference(sizes, dtype):
    inputs = call(**sizes, dtype=dtype)
    assert_close(by_loops(inputs), by_reference(inputs))


def test_every_range_is_read_from_its_first_slot_to_its_last():
    """All beginnings and lengths of a few slots, and those around the numbers that are taken at a time."""
    pairs = [(first, last) for first in range(20) for last in range(first, 36)]
    pairs += [(first, first + length) for first in (0, 7) for length in (63, 64, 65, 1023, 1024, 1025, 1040, 1041)]
    ends = torch.tensor(pairs).T[:, :, None]
    inputs = call(batch=len(pairs), rows=1, slots=1050, heads=2, groups=1)
    inputs |= {"first_BR": ends[0], "last_BR": ends[1]}
    assert_close(by_loops(inputs), by_reference(inputs))


def test_a_row_that_sees_nothing_returns_zero():
    inputs = call()
    inputs["first_BR"][1, 2], inputs["last_BR"][1, 2] = 9, 4
    out = by_loops(inputs)
    empty = inputs["first_BR"] >= inputs["last_BR"]
    assert empty.sum() > 1 and (out[empty] == 0).all() and (out[~empty] != 0).any(-1).all()
    inputs["last_BR"] = inputs["first_BR"]
    assert (by_loops(inputs) == 0).all()


@pytest.mark.parametrize("width", [None, 5])
@pytest.mark.parametrize("whole", [False, True])
def test_ranges_of_a_stream_are_those_that_the_caller_promises(width, whole):
    inputs = cast(ranges(rows=4, channels=16, width=width, one_document=whole), torch.float32)
    assert_close(by_loops(inputs), by_reference(inputs))


def test_what_nobody_sees_is_not_read():
    """A memory has room for more than is filled, and what a row does not see may be anything."""
    inputs = call(rows=1, slots=500)
    inputs |= {"first_BR": torch.tensor([[70], [3]]), "last_BR": torch.tensor([[81], [290]])}
    place = torch.arange(500)
    seen = (place >= inputs["first_BR"]) & (place < inputs["last_BR"])
    expected = by_loops(inputs)
    for name in ("key_BFGC", "value_BFGC"):
        inputs[name][~seen] = torch.nan
    assert torch.equal(by_loops(inputs), expected)


def test_a_range_beyond_the_slots_ends_with_them():
    """Reading on would read memory of others, which here is not a number."""
    inputs = call(rows=1)
    expected = by_loops({**inputs, "first_BR": torch.tensor([[0], [0]]), "last_BR": torch.tensor([[203], [203]])})
    beyond = {"first_BR": torch.tensor([[-5], [-1]]), "last_BR": torch.tensor([[204], [10**6]])}
    assert torch.equal(by_loops({**inputs, **beyond}), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoded_token_copies_no_memory(monkeypatch, dtype):
    inputs, touched = call(rows=1, dtype=dtype), []
    for name in ("contiguous", "to", "float", "clone"):
        inner = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda x, *rest, inner=inner: touched.append(x.shape) or inner(x, *rest))
    by_loops(inputs)
    assert inputs["query_BRHC"].shape in touched and inputs["key_BFGC"].shape not in touched


def test_strides_do_not_matter():
    inputs = call(batch=3, rows=1, heads=4, groups=4)
    expected = by_loops(inputs)
    contiguous = {name: inputs[name].contiguous() for name in ("key_BFGC", "value_BFGC")}
    heads_first = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in contiguous.items()}
    value_alone = {"value_BFGC": contiguous["value_BFGC"]}
    transposed = {"query_BRHC": inputs["query_BRHC"].mT.contiguous().mT}
    short = {name: inputs[name].to(torch.int32) for name in ("first_BR", "last_BR")}
    wide = {name: torch.stack([inputs[name], inputs[name] * 0], -1)[..., 0] for name in ("first_BR", "last_BR")}
    for changed in (contiguous, heads_first, value_alone, transposed, short, wide):
        assert torch.equal(by_loops({**inputs, **changed}), expected)
    shared = {name: inputs[name][:1].expand(3, -1, -1, -1) for name in ("key_BFGC", "value_BFGC")}
    assert_close(by_loops({**inputs, **shared}), by_reference({**inputs, **shared}))


def test_a_memory_may_have_another_dtype_than_the_rows_that_read_it():
    for query, memory in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16,) * 2):
        inputs = call(dtype=memory)
        inputs["query_BRHC"] = inputs["query_BRHC"].to(query)
        if memory is torch.float16:
            inputs |= {name: inputs[name].to(torch.bfloat16) for name in ("key_BFGC", "value_BFGC")}
        out = by_loops(inputs)
        assert out.dtype == query
        assert_close(out, by_reference(inputs))


def test_the_number_of_threads_changes_no_bit(threads):
    for batch, rows, slots in ((1, 1, 2500), (3, 5, 300), (2, 1, 40)):
        inputs, outputs = call(batch, rows, slots), []
        for count in (1, 2, 3, 7):
            threads(count)
            outputs.append(by_loops(inputs))
        assert all(torch.equal(output, outputs[0]) for output in outputs[1:])


def test_one_row_of_one_sequence_is_shared_among_threads(threads, monkeypatch):
    from gsm_kernels.cpu.loops import attend_range as loops

    monkeypatch.setattr("gsm_kernels.cpu.threads.SLOWER", 1)  # Python's threads, as what counts here is not compiled
    pieces, inner = [], loops.forward
    monkeypatch.setattr(loops, "forward", lambda first, last, *rest: pieces.append(first) or inner(first, last, *rest))
    threads(2)
    by_loops(call(batch=1, rows=1, slots=200))
    assert len(pieces) == 2
    monkeypatch.setattr(numba, "THREAD", 1 << 18)
    by_loops(call(batch=1, rows=1, slots=200))
    assert len(pieces) == 3, "too little to share"


def test_the_rest_of_a_call_does_not_change_a_row():
    """Neither the room of the memory nor other rows and sequences change how its slots are summed."""
    inputs = call(batch=3, rows=4, slots=1500)
    together = by_loops(inputs)
    for b in range(3):
        sequence = {name: x[b : b + 1] for name, x in inputs.items()}
        filled = int(sequence["last_BR"].max())
        sequence |= {name: sequence[name][:, :filled] for name in ("key_BFGC", "value_BFGC")}
        for r in range(4):
            row = {name: sequence[name][:, r : r + 1] for name in ("query_BRHC", "first_BR", "last_BR")}
            assert torch.equal(by_loops({**sequence, **row}), together[b : b + 1, r : r + 1])


def test_huge_logits_stay_finite():
    inputs = call()
    for factor in (1e4, -1e4, 1e30):
        assert by_loops({**inputs, "query_BRHC": inputs["query_BRHC"] * factor}).isfinite().all()


@pytest.mark.parametrize("name", ["query_BRHC", "key_BFGC", "value_BFGC"])
@pytest.mark.parametrize("slot", [0, 100, 202])
def test_what_is_not_a_number_is_not_hidden(name, slot):
    inputs = call(rows=1, batch=1)
    inputs[name] = inputs[name].clone()
    inputs[name][:, min(slot, inputs[name].shape[1] - 1)] = torch.nan
    assert by_loops(inputs).isnan().all()


@pytest.mark.parametrize(
    ("sizes", "change", "why"),
    [
        ({"rows": 9}, {}, "is for at most 8 rows, got 9"),
        ({"channels": 24}, {}, "needs a multiple of 16 channels, got 24"),
        ({"dtype": torch.float64}, {}, "too coarse for float64"),
        ({"dtype": torch.float16}, {}, "reads keys and values in float32 or bfloat16, got torch.float16"),
        ({}, {"value_BFGC": torch.zeros(2, 203, 2, 16, dtype=torch.bfloat16)}, "got torch.float32 and torch.bfloat16"),
        ({}, {"query_BRHC": torch.zeros(2, 5, 4, 16, requires_grad=True)}, "has no gradient"),
        ({}, {"value_BFGC": torch.zeros(2, 203, 2, 16, requires_grad=True)}, "has no gradient"),
    ],
)
def test_other_calls_are_refused_with_a_reason_and_run_as_before(sizes, change, why):
    inputs = {**call(**sizes), **change}
    assert why in str(numba.refuses(Inputs(**inputs)))
    for choice in ("auto", "numba"):  # which is for all operations that have loops for all calls
        with using(choice), listening() as heard:
            assert_close(attend_range(**inputs), by_reference(inputs))
        assert heard[0] == ("attend_range", "sdpa")


def test_what_could_learn_but_is_not_asked_to_is_read_by_the_loops():
    inputs = call()
    inputs["query_BRHC"].requires_grad_()
    assert not by_loops(inputs).requires_grad
    with listening() as heard:
        attend_range(**{**inputs, "query_BRHC": inputs["query_BRHC"].detach()})
    assert heard == [("attend_range", "numba")]


def test_it_is_told_for_which_calls_it_is():
    name, why = attend_range.explain()
    assert name != "numba" and (torch.cuda.is_available() or f"numba: {numba.NARROW}" in why)


def test_it_is_one_node_of_a_compiled_graph():
    inputs = call()
    torch.compiler.reset()
    compiled = torch.compile(lambda **inputs: attend_range(**inputs), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(**inputs), by_loops(inputs))


def test_tensors_without_numbers_pass_through():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake = {name: mode.from_tensor(x) for name, x in call(dtype=torch.bfloat16).items()}
        out = attend_range(**fake)
    assert out.shape == (2, 5, 4, 16) and out.dtype == torch.bfloat16
