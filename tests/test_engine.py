"""The engine: that one recording serves all lengths, as a CUDA graph where there is a GPU, and everywhere as a tape."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from small import GEOMETRY, MEMORIES, RATIO, SHALLOW, M, W, assert_same, build, mostly_nightly, random_tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsm.cache.memory import _tensors
from gsm.engine import CHUNK, Engine
from gsm.evaluation import generate
from gsm.graphs import CudaGraphs
from gsm.models.prompts import left_pad
from gsm.models.sampling import sample
from gsm.observe import record
from gsm.tape import Tapes

SEPARATE = "gsm-retriever=separate_indexer"
VARIED = (SEPARATE, "gsm-writer=delta", "baseline-pool", "hybrid-residual=mhc")
QUICK = ("gsm", SEPARATE, "gsm-writer=delta", "baseline-pool", "transformer", "gated_delta_net")
SOME_QUICK = mostly_nightly(MEMORIES, *QUICK)
LENGTH = 2 * M + 3  # beyond windows, state and K groups, so that all of them turn over
EXACT = 1e-12

SLOTS = ("encoder_bank", "index_keys")
recorders = pytest.mark.parametrize("recorder", ["tape", pytest.param("cuda", marks=pytest.mark.gpu)])


ALL_LENGTHS = Tapes(prompts=CudaGraphs.prompts, chunks=CudaGraphs.chunks, room=None)  # what a GPU records, on a CPU


class Counting:
    """A recorder that counts its recordings."""

    def __init__(self, recorder: Any = ALL_LENGTHS):
        self.recorder, self.count = recorder, 0
        self.prompts, self.chunks, self.room = recorder.prompts, recorder.chunks, recorder.room

    def __call__(self, call, undo):
        self.count += 1
        return self.recorder(call, undo)


def engine(case: str, recorder: str = "tape", *, capacity: int, **options) -> Engine:
    """An engine around a shallow model."""
    model = build(case, geometry=SHALLOW).to("cuda" if recorder == "cuda" else "cpu")
    graphs = CudaGraphs(torch.device("cuda")) if recorder == "cuda" else ALL_LENGTHS
    return Engine(model, capacity=capacity, graphs=Counting(graphs), **options)


def read(running: Engine, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Logits after every token, [B, T, V], one token at a time."""
    return torch.stack([running.decode(token_B).clone() for token_B in tokens_BT.unbind(1)], dim=1)


@recorders
@pytest.mark.parametrize("case", SOME_QUICK)
@torch.no_grad()
def test_one_recorded_step_decodes_at_every_length(case, recorder):
    running = engine(case, recorder, capacity=LENGTH, batch=2, chunk=8)
    tokens = random_tokens(2, LENGTH).to(running.device)
    want = running.model(tokens).logits
    running.warm_up()
    assert_same(read(running, tokens[:, : M + 1]), want[:, : M + 1], f"{case}: the first tokens", EXACT)
    assert_same(running.prefill(tokens[:, M + 1 : 2 * M]), want[:, 2 * M - 1], f"{case}: a few at once", EXACT)
    assert_same(read(running, tokens[:, 2 * M :]), want[:, 2 * M :], f"{case}: the last tokens", EXACT)
    running.reset()
    assert_same(read(running, tokens[:, :2]), want[:, :2], f"{case}: after a reset", EXACT)
    assert running._recorder.count == (1 if running.memory.keeps_padding else 2), "a step, and a chunk"


@recorders
@pytest.mark.parametrize("case", VARIED)
@torch.no_grad()
def test_one_recorded_prefill_reads_prompts_of_all_its_lengths(case, recorder):
    running = engine(case, recorder, capacity=40, batch=2)
    for lengths in ((5, 16), (1, 2), (32, 17)):
        prompts = [random_tokens(1, length, seed=length)[0].to(running.device) for length in lengths]
        out = running.model.prefill(prompts, running.model.start(2))
        assert_same(running.prefill(prompts), out.logits[:, -1], f"{case}: prompts of {lengths}", EXACT)
        more = random_tokens(2, 2).to(running.device)
        after = running.model(more, memory=out.memory).logits
        assert_same(read(running, more), after, f"{case}: tokens after prompts of {lengths}", EXACT)
        running.reset()
    assert running._recorder.count == 3, "16 tokens, 32 tokens, and a step"


@recorders
@pytest.mark.parametrize("case", SOME_QUICK)
@torch.no_grad()
def test_one_recorded_chunk_reads_long_prompts_of_any_length(case, recorder):
    """All but the last two chunks, behind other tokens, and again."""
    running = engine(case, recorder, capacity=44, batch=2, chunk=4)
    tokens = random_tokens(2, 44).to(running.device)
    want = running.model(tokens).logits
    for before, length in ((1, 33), (5, 32), (3, 21), (2, 8)):
        running.reset()
        read(running, tokens[:, :before])
        end = before + length
        assert_same(running.prefill(tokens[:, before:end]), want[:, end - 1], f"{case}: {length} tokens", EXACT)
        assert running.memory.used == end
        assert_same(read(running, tokens[:, end : end + 2]), want[:, end : end + 2], f"{case}: after them", EXACT)
    assert running._recorder.count == (1 if running.memory.keeps_padding else 2), "a step, and a chunk"


@torch.no_grad()
def test_an_interrupted_chunk_leaves_the_memory_as_it_was(monkeypatch):
    running = engine(SEPARATE, capacity=80, chunk=4)
    running.warm_up()
    tokens = random_tokens(1, 60)
    read(running, tokens[:, :10])
    replay, calls = running._chunk.replay, []

    def stop():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return replay()

    monkeypatch.setattr(running, "_chunk", running._chunk._replace(replay=stop))
    with pytest.raises(KeyboardInterrupt):
        running.prefill(tokens[:, 10:])
    assert running.memory.used == 10
    with pytest.raises(ValueError, match="^capacity .*81"):
        running.prefill(random_tokens(1, 71))
    assert_same(running.prefill(tokens[:, 10:]), running.model(tokens).logits[:, -1], "the whole prompt", EXACT)


def scale_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def assign(model):
    model.load_state_dict({name: x * 1.1 for name, x in model.state_dict().items()}, assign=True)


def exchange(model):
    model.norm = copy.deepcopy(model.norm)
    model.norm.weight.data.mul_(3)


def add_hook(model):
    model.norm.register_forward_hook(lambda part, given, out: out * 2)


def add_hook_before(model):
    model.encoder.blocks[0].register_forward_pre_hook(lambda part, given: None)
    model.norm.register_forward_pre_hook(lambda part, given: given[0] ** 2)


def replace_forward(model):
    model.norm.forward = lambda x: x * 2


def parametrize(model):
    torch.nn.utils.parametrize.register_parametrization(model.norm, "weight", torch.nn.Tanh())


def set_a_number(model):
    model.norm.eps = 1.0


CHANGES = (
    scale_data, assign, exchange, add_hook, add_hook_before, replace_forward, parametrize, set_a_number
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_changed_model_is_recorded_again(change):
    """Recordings went on with the old weights, or with memory that was free."""
    running, tokens = engine(SEPARATE, capacity=40), random_tokens(1, 20)
    running.prefill(tokens[:, :16])
    before = read(running, tokens[:, 16:])
    change(running.model)
    running.reset()
    want = running.model(tokens).logits
    assert_same(running.prefill(tokens[:, :16]), want[:, 15], "a prompt", EXACT)
    assert_same(read(running, tokens[:, 16:]), want[:, 16:], "tokens", EXACT)
    assert not torch.allclose(before, want[:, 16:])


@torch.no_grad()
def test_the_mode_and_values_of_weights_may_change_without_another_recording():
    running = engine(SEPARATE, capacity=40)
    for change in (running.model.train, running.model.eval, lambda: running.model.norm.weight.mul_(2)):
        running.decode(torch.tensor([1]))
        change()
    running.decode(torch.tensor([1]))
    assert running._recorder.count == 1


@torch.no_grad()
def test_autocast_is_that_of_the_call():
    running, tokens = engine("transformer", capacity=40), random_tokens(1, 6)
    running.model.float()
    running = Engine(running.model, capacity=40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert read(running, tokens[:, :3]).dtype == torch.bfloat16
    running.reset()
    assert_same(read(running, tokens), running.model(tokens).logits, "without autocast", 1e-4)


@pytest.mark.parametrize("change", [torch.nn.Module.float, lambda model: model.to("meta")])
def test_a_model_moved_to_another_dtype_or_device_is_refused(change):
    running = engine(SEPARATE, capacity=40)
    running.decode(torch.tensor([1]))
    change(running.model)
    with pytest.raises(ValueError, match="^(model|memory)"):
        running.decode(torch.tensor([1]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda running: pickle.loads(pickle.dumps(running))])
@torch.no_grad()
def test_a_copy_has_a_memory_of_its_own(copied):
    """The recordings of a copy once wrote to the original."""
    running, tokens = Engine(build("transformer", geometry=SHALLOW), capacity=40), random_tokens(1, 12)
    running.prefill(tokens[:, :5])
    read(running, tokens[:, 5:6])
    other, want = copied(running), running.model(tokens).logits
    for one in (other, running):
        assert_same(read(one, tokens[:, 6:]), want[:, 6:], "the copy, and the original behind it", EXACT)


def interrupted(call, number: int) -> int:
    """Makes a call, in which KeyboardInterrupt is raised at this one of the places where Python looks for signals;
    returns how many it has come by."""
    places = 0

    def look(frame, event, argument):
        nonlocal places
        places += event in ("call", "c_return")
        if places == number and event in ("call", "c_return"):
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return places


@pytest.mark.parametrize("recorded", [True, False])
@torch.no_grad()
def test_the_memory_counts_an_interrupted_token_only_if_it_was_read(recorded):
    """A memory was left half a token further."""
    model, tokens = build("gated_delta_net", geometry=SHALLOW), random_tokens(1, 4)
    running, token = Engine(model, capacity=40, graphs=recorded), torch.tensor([3])
    want = [model(torch.cat((tokens, token.expand(1, more)), 1)).logits[:, -1] for more in (1, 2)]
    running.prefill(tokens)
    mark = running.memory.clone()
    running.decode(token)
    total = interrupted(lambda: running.decode(token), 0)
    assert total > 50
    for number in range(max(1, total - (300 if recorded else 40)), total):
        running.load(mark)
        interrupted(lambda: running.decode(token), number)
        torch.set_grad_enabled(False)
        assert_same(running.decode(token), want[running.memory.used - 5], f"behind place {number}", EXACT)


def test_an_engine_serves_one_call_and_one_stream_at_a_time():
    running = Engine(build("transformer", geometry=SHALLOW), capacity=40)
    for call in (running.reset, lambda: running.prefill([1, 2]), lambda: running.decode(torch.tensor([1]))):
        stream = running.stream([1, 2, 3], 5)
        next(stream)
        call()
        with pytest.raises(RuntimeError, match="^stream"):
            next(stream)
        running.reset()
    running.model.norm.register_forward_hook(lambda *arguments: running.reset())
    with pytest.raises(RuntimeError, match="^engine"):
        running.decode(torch.tensor([1]))


def test_threads_that_generate_leave_the_model_in_its_mode():
    """One thread put the modules back in training while others were computing."""
    model = build("transformer", geometry=SHALLOW).train()
    inside, go_on = threading.Event(), threading.Event()

    def wait():
        with model.evaluating():
            inside.set()
            go_on.wait()
            return [part.training for part in model.modules()]

    with ThreadPoolExecutor(1) as pool:
        modes = pool.submit(wait)
        inside.wait()
        with model.evaluating():
            pass
        assert not model.training
        go_on.set()
        assert not any(modes.result())
    assert all(part.training for part in model.modules())


@recorders
@torch.no_grad()
def test_a_recorded_prefill_takes_documents(recorder):
    running = engine(SEPARATE, recorder, capacity=40)
    tokens, documents = random_tokens(1, 13).to(running.device), (torch.arange(13) // 8)[None].to(running.device)
    want = running.model(tokens, documents=documents).logits[:, -1]
    assert_same(running.prefill(tokens, documents), want, "two documents in a prompt", EXACT)
    assert running._recorder.count == 1


@pytest.mark.parametrize(("case", "recorded"), [(SEPARATE, 1), ("transformer", 0)])
@torch.no_grad()
def test_padding_of_a_prompt_takes_no_room(case, recorded):
    running = engine(case, capacity=33)
    running.prefill(random_tokens(1, 17))
    assert (running.memory.used, running._recorder.count) == (17, recorded)
    read(running, random_tokens(1, 16))
    with pytest.raises(ValueError, match="^capacity .*34"):
        running.decode(torch.zeros(1, dtype=torch.int64))


@torch.no_grad()
def test_a_model_that_keeps_padding_records_prompts_that_need_none():
    running = engine("transformer", capacity=40)
    tokens = random_tokens(1, 16)
    assert_same(running.prefill(tokens), running.model(tokens).logits[:, -1], "16 tokens", EXACT)
    assert running._recorder.count == 1


@recorders
@pytest.mark.parametrize("used", [0, 5, 19, 20])
@torch.no_grad()
def test_recording_leaves_the_memory_as_it_was(used, recorder):
    running = engine(SEPARATE, recorder, capacity=20)
    tokens = random_tokens(1, 20).to(running.device)
    if used:
        running.model.prefill(tokens[:, :used], running.memory)
    before = running.memory.clone()
    running.warm_up()
    assert running.memory.ledger == before.ledger
    for (kind, got), (_, want) in zip(_tensors(running.memory, ""), _tensors(before, ""), strict=True):
        there = used // RATIO if kind in SLOTS else None  # what lies behind is out of sight
        assert torch.equal(got[:, :there], want[:, :there]) if got.ndim > 1 else torch.equal(got, want), kind
    if used < 20:
        next_BTV = running.model(tokens).logits[:, used : used + 3]
        assert_same(read(running, tokens[:, used : used + 3]), next_BTV, f"what follows {used} tokens", EXACT)


def test_a_prompt_of_up_to_a_whole_chunk_is_one_recording():
    running = engine(SEPARATE, capacity=2 * CHUNK)
    lengths = [CHUNK // 2, CHUNK // 2 + 1, CHUNK, CHUNK + 1]
    sizes = [running._bucket_size(torch.zeros(1, length, dtype=torch.int64)) for length in lengths]
    assert sizes == [CHUNK // 2, CHUNK, CHUNK, None]


@torch.no_grad()
def test_warming_up_records_everything_that_would_be_recorded_later():
    running = engine(SEPARATE, capacity=100, chunk=40)
    running.warm_up()
    assert running._recorder.count == 1 + 1 + 2  # a step, a chunk, 16 and 32 tokens
    for length in (1, 20, 32, 33):
        running.reset()
        running.prefill(random_tokens(1, length))
        running.decode(torch.zeros(1, dtype=torch.int64))
    assert running._recorder.count == 4


@recorders
@torch.no_grad()
def test_a_saved_prefix_can_be_continued(recorder):
    running = engine(SEPARATE, recorder, capacity=30)
    tokens = random_tokens(1, 30).to(running.device)
    memory = running.memory
    running.prefill(tokens[:, :13])
    prefix = memory.clone()
    want = read(running, tokens[:, 13:20])
    running.load(prefix)
    assert running.memory is memory and memory.used == 13
    assert torch.equal(read(running, tokens[:, 13:20]), want)


@pytest.mark.parametrize("graphs", [False, ALL_LENGTHS])
@torch.no_grad()
def test_a_full_memory_is_refused_before_anything_is_written(graphs):
    running, tokens = Engine(build(SEPARATE, geometry=SHALLOW), capacity=20, graphs=graphs), random_tokens(1, 21)
    running.prefill(tokens[:, :18])
    before = running.memory.clone()
    with pytest.raises(ValueError, match="^capacity .*21"):
        next(running.stream(tokens[0, :2], 2))
    with pytest.raises(ValueError, match="^capacity .*21"):
        running.prefill(tokens[:, :3])
    assert running.memory.used == 18
    for (kind, got), (_, want) in zip(_tensors(running.memory, ""), _tensors(before, ""), strict=True):
        assert torch.equal(got, want), f"{kind} was written"
    read(running, tokens[:, 18:20])
    with pytest.raises(ValueError, match="^capacity .*21"):
        running.decode(tokens[:, 20])


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9}])
@pytest.mark.parametrize("graphs", [False, ALL_LENGTHS])
def test_the_engine_generates_the_same_ids_as_the_model(graphs, options):
    model, prompts = build(SEPARATE, geometry=SHALLOW), [random_tokens(1, length, seed=length)[0] for length in (3, 12)]
    running = Engine(model, batch=2, capacity=21, graphs=graphs)
    ids = [
        writer.generate(prompts, 10, **options, generator=torch.Generator().manual_seed(3))
        for writer in (running, model)
    ]
    assert torch.equal(*ids)


@torch.no_grad()
def test_generation_continues_a_prefilled_prompt():
    model, tokens = build(SEPARATE, geometry=SHALLOW), random_tokens(1, 12)
    running = Engine(model, capacity=20)
    running.prefill(tokens[:, :8])
    assert torch.equal(running.generate(tokens[:, 8:], 5), model.generate(tokens, 5))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@torch.no_grad()
def test_scores_that_are_not_finite_choose_no_token(value, temperature):
    """Token 0 was written, in greedy decoding."""
    model = build("transformer", geometry=SHALLOW)
    model.norm.weight.fill_(value)
    for writer in (model, Engine(model, capacity=20)):
        with pytest.raises(ValueError, match="scores"):
            writer.generate([1, 2, 3], 2, temperature)


def test_the_smallest_temperature_and_top_p_take_the_likeliest():
    logits = torch.randn(20, 9)
    for options in ({"temperature": 1e-320}, {"temperature": 1e-37}, {"temperature": 1.0, "top_p": 1e-320}):
        assert torch.equal(sample(logits, **options), logits.argmax(-1))


def test_sampling_draws_as_multinomial_does_without_waiting_for_the_device():
    logits = torch.randn(50, 9)
    for seed in range(5):
        got = sample(logits, 0.7, generator=torch.Generator().manual_seed(seed))
        probability = (logits / 0.7).softmax(-1)
        want = torch.multinomial(probability, 1, generator=torch.Generator().manual_seed(seed))[:, 0]
        assert torch.equal(got, want)


@pytest.mark.parametrize("graphs", [False, ALL_LENGTHS])
def test_an_engine_made_in_inference_mode_works_outside_of_it(graphs):
    with torch.inference_mode():
        running = Engine(build("gsm-writer=additive"), capacity=20, graphs=graphs)
        running.prefill([1, 2, 3])
    running.decode(torch.tensor([4]))
    assert running.memory.used == 4
    running.reset()
    running.prefill([1, 2])
    assert running.memory.used == 2


def test_a_recording_that_fails_leaves_nothing_behind():
    def broken(call, undo):
        call()
        raise torch.OutOfMemoryError("no room for a graph")

    broken.prompts, broken.chunks, broken.room = 0, 0, None
    running = Engine(build("gsm-writer=additive"), capacity=20, graphs=broken)
    before = running.memory.clone()
    with pytest.raises(torch.OutOfMemoryError):
        running.decode(torch.tensor([4]))
    assert running.memory.ledger == before.ledger
    for (kind, got), (_, want) in zip(_tensors(running.memory, ""), _tensors(before, ""), strict=True):
        assert kind in SLOTS or torch.equal(got, want), f"{kind} was written"


def test_ctrl_c_ends_the_line_and_leaves_the_written_text(monkeypatch, capsys):
    def pieces(*arguments):
        yield "a = "
        raise KeyboardInterrupt

    for name, stub in (
        ("read_checkpoint", lambda *arguments, **options: {"hyper_parameters": {"config": {}}}),
        ("tokenizer_of", lambda *arguments: None),
        ("load_model", lambda *arguments: None),
        ("pieces", pieces),
    ):
        monkeypatch.setattr(generate, name, stub)
    with pytest.raises(SystemExit) as ended:
        generate.generate("somewhere", prompt="def f():", device="cpu")
    assert ended.value.code == 130 and capsys.readouterr().out == "def f():a = \n"


@torch.no_grad()
def test_a_prefill_in_a_large_static_memory_does_not_read_slots_beyond_its_prompt():
    running = Engine(build("gsm-writer=additive"), capacity=1000)
    with record("encoder/*/bank") as seen:
        running.prefill(random_tokens(1, 10))
        assert {bank.shape[1] for bank in seen.values()} == {10 // 2 + 1}
        running.decode(torch.tensor([1]))
        assert {bank.shape[1] for bank in seen.values()} == {11 // 2 + 1}


@pytest.mark.parametrize(
    ("key", "call"),
    [
        ("token_B", lambda running: running.decode(torch.tensor([1, 2]))),
        ("tokens", lambda running: running.decode(torch.tensor([GEOMETRY.vocabulary]))),
        ("tokens", lambda running: running.prefill([GEOMETRY.vocabulary])),
        ("tokens", lambda running: running.prefill(torch.zeros(1, 0, dtype=torch.int64))),
        ("memory", lambda running: running.prefill([[1], [2]])),
        ("max_new_tokens", lambda running: running.generate([1], 0)),
        ("capacity", lambda running: Engine(running.model, capacity=0)),
        ("chunk", lambda running: Engine(running.model, capacity=9, chunk=0)),
    ],
)
@pytest.mark.parametrize("graphs", [False, ALL_LENGTHS])
def test_wrong_arguments_are_refused_and_nothing_is_read(key, call, graphs):
    running = Engine(build("gsm-writer=additive"), capacity=40, graphs=graphs)
    with pytest.raises(ValueError, match=f"^{key} "):
        call(running)
    assert running.memory.used == 0


# Finds operations that a capture would refuse, without a GPU: PyTorch's meta device has shapes and no values.


class OneDevice(TorchDispatchMode):
    """Fails for an operation on a tensor of the host: its copy to the device would make the host wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            assert not isinstance(x, torch.Tensor) or x.is_meta, f"{func} has a tensor on {x.device}"
        return out


@pytest.mark.parametrize("case", SOME_QUICK)
@torch.no_grad()
def test_a_captured_call_neither_synchronises_nor_copies_from_the_host(case):
    model = build(case, geometry=SHALLOW).to("meta")
    memory = model.start(2, capacity=64)
    token, tokens = (torch.zeros(2, length, dtype=torch.int64, device="meta") for length in (1, 16))
    with OneDevice():
        model(tokens, documents=torch.zeros_like(tokens), memory=memory, rows=1)
        logits_BV = model(token, memory=memory, rows=1).logits[:, -1]
        assert sample(logits_BV, 0.8, top_p=0.9).shape == (2,)


def test_a_copy_from_the_host_and_a_synchronisation_are_caught():
    with OneDevice(), pytest.raises(AssertionError, match="has a tensor on cpu"):
        torch.zeros(2, device="meta") + torch.tensor(1.0)
    with OneDevice(), pytest.raises(RuntimeError, match="meta"):
        torch.zeros(2, device="meta").sum().item()


# With a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["gsm", "baseline", "transformer", "gated_delta_net"])
@torch.no_grad()
def test_in_bfloat16_graphs_compute_the_same_as_plain_calls(case):
    model = build(case).to("cuda", torch.bfloat16)
    graphs, plain = (Engine(model, batch=2, capacity=300, graphs=graphs) for graphs in (True, False))
    prompts, more = random_tokens(2, 130).cuda(), random_tokens(2, 150, seed=2).cuda()
    for one in (graphs, plain):
        one.prefill(prompts)
    got, want = (torch.stack([one.decode(token_B).clone() for token_B in more.unbind(1)]) for one in (graphs, plain))
    assert (got - want).float().abs().mean() <= 0.02 * want.float().abs().mean()


@pytest.mark.gpu
@torch.no_grad()
def test_generation_never_waits_for_the_device():
    running = Engine(build("gsm").to("cuda", torch.bfloat16), batch=2, capacity=60)
    running.warm_up()
    tokens, documents = left_pad([[1, 2, 3], [4] * W], "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits_BV = running.prefill(tokens, documents)
        for _ in range(20):
            logits_BV = running.decode(sample(logits_BV, 0.8, 0.9, generator))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits_BV.isfinite().all()


@pytest.mark.gpu
def test_replays_reserve_no_more_memory():
    running = Engine(build("gsm").to("cuda", torch.bfloat16), capacity=1024)
    running.warm_up()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(5):
        running.generate([1, 2, 3], 20)
        running.reset()
    assert torch.cuda.memory_reserved() == before
