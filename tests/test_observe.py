"""Taps cost nothing without a recording, and a recording has exactly the tensors of the call."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small import SHALLOW, build, cases
from torch import Tensor, nn

import gsm
from gsm.layers.block import Block
from gsm.layers.nsa import BRANCHES
from gsm.models.gsm import GSM
from gsm.observe import observed, tap
from gsm.paths import variants
from gsm.slots.retriever.window_only import WindowOnly
from gsm.slots.state_reader.base import StateAttention


class Tapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        tap("layer/1/doubled", doubled)
        tap("layer/1/weights", lambda: doubled.softmax(-1))
        return doubled + 1


def test_a_recording_holds_the_tensors_of_its_taps() -> None:
    x = torch.randn(2, 3)
    with gsm.record() as seen:
        Tapped()(x)
    assert set(seen) == {"layer/1/doubled", "layer/1/weights"}
    assert torch.equal(seen["layer/1/doubled"], x * 2)


def test_unused_taps_compute_and_store_nothing() -> None:
    with gsm.record() as seen:
        pass
    Tapped()(torch.ones(1))
    tap("after", lambda: pytest.fail("made although nobody listens"))
    assert not seen


def test_taps_that_match_no_pattern_are_not_computed() -> None:
    with gsm.record("stage/*", "layer/?/doubled") as seen:
        Tapped()(torch.ones(1))
        tap("decoder/weights", lambda: pytest.fail("made although nobody asked"))
    assert list(seen) == ["layer/1/doubled"]


def test_recordings_nest() -> None:
    with gsm.record() as outer:
        Tapped()(torch.ones(1))
        with gsm.record("*/weights") as inner:
            Tapped()(torch.ones(1))
        Tapped()(torch.ones(1))
    assert list(inner) == ["layer/1/weights"]
    assert len(inner.all("layer/1/weights")) == 1
    assert len(outer.all("layer/1/weights")) == 3


def test_a_recording_has_every_call_in_order_and_returns_the_last() -> None:
    with gsm.record() as seen:
        for step in range(3):
            tap("state", torch.tensor(step))
    assert [int(value) for value in seen.all("state")] == [0, 1, 2]
    assert int(seen["state"]) == 2


def test_later_writes_to_a_memory_do_not_change_a_recording() -> None:
    ring = torch.zeros(2, requires_grad=True)
    with gsm.record() as seen, torch.no_grad():
        tap("ring", ring)
        ring.fill_(1)
    assert torch.equal(seen["ring"], torch.zeros(2))
    assert not seen["ring"].requires_grad


def test_detach_false_keeps_the_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    with gsm.record(detach=False) as seen:
        loss = Tapped()(x).sum()
    (gradient,) = torch.autograd.grad(loss, seen["layer/1/doubled"])
    assert torch.equal(gradient, torch.ones(2))


def test_an_unknown_name_raises_an_error_with_the_closest_of_the_recorded_names() -> None:
    with gsm.record() as seen:
        tap("stage/1/weights", torch.ones(1))
    for ask in (seen.__getitem__, seen.all):
        with pytest.raises(KeyError, match=r"stage/2/weights.* stage/1/weights"):
            ask("stage/2/weights")


def test_a_recording_of_names_that_no_tap_has_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"'layer/1/wieghts'.* layer/1/weights"), gsm.record("layer/1/wieghts"):
        Tapped()(torch.ones(1))
    with gsm.record("layer/1/wieghts", "*/weights") as seen:
        Tapped()(torch.ones(1))
    assert list(seen) == ["layer/1/weights"]


@pytest.mark.parametrize("name", variants("model"))
def test_every_layer_of_every_model_has_names_for_all_that_passes_it(name: str) -> None:
    with torch.device("meta"):
        model = gsm.build_model(name, "pico")
    listed, (batch, rows) = gsm.taps(model), (1, 16)
    for layer in (part for part in model.modules() if isinstance(part, Block)):
        streams = layer.attention_residual.streams
        shapes = dict.fromkeys(("stream", "stream/between", "stream/after", "attention", "feed_forward"), [model.dim])
        shapes |= dict.fromkeys(("streams", "streams/between"), [streams, model.dim]) if streams > 1 else {}
        for what, shape in shapes.items():
            assert list(listed[f"{layer.name}/{what}"][0]) == [batch, rows, *shape]
        heads, queries = (listed[f"{layer.name}/{what}"][0] for what in ("heads", "query"))
        assert heads[:2] == queries[:2] == (batch, rows) and heads[2] == queries[2]
    assert repr(listed).count("\n") == len(listed) - 1


def documented() -> set[str]:
    """The names in the tables of the module's docstring, without numbers."""
    tables = re.findall(r"^ {4}(\S+(?:, \S+)*)(?: {2,}|$)", gsm.observe.__doc__ or "", re.MULTILINE)
    return {re.sub("<n>", "", name) for names in tables for name in names.split(", ")}


@pytest.mark.parametrize("case", cases())
def test_the_table_of_names_has_every_tap_and_every_part_has_taps_for_what_it_reads(case: str) -> None:
    model = build(case, geometry=SHALLOW)
    listed, known = gsm.taps(model), documented()
    for name in listed:
        word = re.sub(r"^((encoder|decoder|stage)/\d+/)|(?<=group)\d+$", "", name)
        prefix, _, rest = word.partition("/")
        branch = prefix in BRANCHES and rest in known
        assert word in known or branch, f"{name} is not in the docstring of gsm.observe"

    def of(part: str) -> set[str]:
        return {name.removeprefix(f"{part}/").rpartition("/")[2] for name in listed if name.startswith(f"{part}/")}

    for layer in (part for part in model.modules() if isinstance(part, Block)):
        if isinstance(layer.attention, StateAttention):
            assert "weights" in of(layer.name)
        else:
            assert of(layer.name) >= {"window", "weights"} or of(layer.name) >= {"key", "value"}
            assert of(layer.name) & {"weights", "state"}
    if isinstance(model, GSM):
        assert of("state") >= {"e", "z", *(part.name for part in model.writer.parts)}
        for stage in model.aggregation:
            selected = set() if isinstance(stage.retriever, WindowOnly) else {"top_k"}
            assert of(stage.name) == {"query", "weights", "heads", "increment"} | selected


def test_a_recording_prints_as_one_line() -> None:
    with gsm.record() as seen:
        for number in range(100):
            tap(f"layer/{number}/weights", torch.ones(1))
    assert "100" in repr(seen) and "layer/0/weights" in repr(seen)
    assert len(repr(seen)) < 150 and "\n" not in repr(seen)


def test_a_recording_ends_when_its_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), gsm.record() as seen:
        raise ZeroDivisionError
    tap("late", torch.ones(1))
    assert not seen


def test_recordings_and_patches_do_not_affect_other_threads() -> None:
    """A patch once changed the calls of a server beside it, and recordings mixed."""

    def call(number: int) -> Tensor:
        with gsm.record() as seen, gsm.patch("x", lambda x: x + number):
            tap("x", torch.zeros(()))
        return torch.stack(seen.all("x"))

    with gsm.record() as outer, gsm.patch("x", torch.ones_like), ThreadPoolExecutor(4) as pool:
        alone = pool.submit(tap, "x", torch.zeros(())).result()
        many = [int(x) for x in torch.cat(list(pool.map(call, range(50))))]
        assert int(tap("x", torch.zeros(()))) == 1
    assert int(alone) == 0 and many == list(range(50))
    assert len(outer.all("x")) == 1
    assert not observed()


def test_taps_leave_no_trace_in_a_compiled_graph() -> None:
    x = torch.randn(2, 3)
    compiled = torch.compile(Tapped(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), Tapped()(x))


def test_a_compiled_model_can_be_recorded_if_graph_breaks_are_allowed() -> None:
    x = torch.randn(2, 3)
    compiled = torch.compile(Tapped(), backend="aot_eager")
    compiled(x)
    with gsm.record() as seen:
        compiled(x)
    assert torch.equal(seen["layer/1/doubled"], x * 2)
