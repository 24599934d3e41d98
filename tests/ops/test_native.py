"""Compiled loops for the CPU: their division among threads, their cache on disk, and calls without Numba."""

import ast
import concurrent.futures
import functools
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import attending, cast, gradients, hyper_connection
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gsm_kernels import attend, explain, listening, mhc_boundary, rms_norm
from gsm_kernels.cpu import native
from gsm_kernels.cpu import threads as shared

numba = pytest.importorskip("numba")
from gsm_kernels.cpu.arrays import integers  # noqa: E402


@numba.njit(nogil=True)
def marks(first, last, number, half, marked):
    counts = integers(marked, (last,))
    for item in range(first, last):
        counts[item] += int(number / half)


@numba.njit(nogil=True)
def raises(first, last):
    if first:
        raise ValueError("a part")


@pytest.fixture
def threads():
    """Set the number of threads, and restore it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def call(tokens: int = 600) -> dict:
    return cast(hyper_connection(batch=1, rows=tokens, width=16), torch.float32)


def results(inputs: dict) -> list[Any]:
    """Return both results and all gradients."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    out = mhc_boundary(**{**inputs, **leaves})
    torch.autograd.backward(out, [torch.ones_like(x) for x in out])
    return [*(x.detach() for x in out), *(x.grad for x in leaves.values())]


def test_a_loop_is_given_every_item_once_in_as_many_pieces_as_there_are_threads(threads):
    for count in (1, 2, 3):
        threads(count)
        for items in (0, 1, 7, 64, 65, 1000):
            pieces = []
            native.run(lambda first, last, number: pieces.append((first, last, number)), items, 5, least=4)  # noqa: B023
            covered = [item for first, last, _ in sorted(pieces) for item in range(first, last)]
            assert covered == list(range(items)) and {number for *_, number in pieces} == {5}
            assert len(pieces) <= max(1, min(count, -(-items // 32))), "a Python thread is worth more"
            assert all(first % 4 == 0 for first, *_ in pieces)
            marked = torch.zeros(items, dtype=torch.int64)
            native.run(marks, items, 5, 0.5, marked, least=4)
            assert marked.tolist() == [10] * items


def test_a_loop_runs_on_the_threads_of_pytorchs_operations(threads, monkeypatch: pytest.MonkeyPatch):
    if shared._library() is None:
        pytest.skip("this PyTorch has not GNU's OpenMP")
    threads(2)
    monkeypatch.setattr(shared, "_pool", None)
    marked = torch.zeros(9, dtype=torch.int64)
    native.run(marks, 9, 5, 0.5, marked, least=4)
    assert marked.tolist() == [10] * 9


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list threads")
def test_loops_of_any_size_leave_pytorchs_threads_alive(threads):
    if shared._library() is None:
        pytest.skip("this PyTorch has not GNU's OpenMP")
    threads(4)
    many, seen = torch.ones(1 << 20), []
    for items in (40, 9, 17, 40):  # parts for all four threads, for two, for three
        many.add_(1)
        native.run(marks, items, 5, 0.5, torch.zeros(items, dtype=torch.int64), least=8)
        seen.append(set(os.listdir("/proc/self/task")))
    assert all(count == seen[0] for count in seen[1:]), "threads were ended and started"


def test_fewer_threads_than_parts_run_them_all():
    team = shared._team(marks, [5, 0.5, 0])
    if team is None:
        pytest.skip("this PyTorch has not GNU's OpenMP")
    for threads in (1, 2, 3):
        marked = torch.zeros(100, dtype=torch.int64)
        team.run(100, threads, 7, [5, 0.5, marked.data_ptr()])
        assert marked.tolist() == [10] * 100


def test_a_compiled_loop_that_raises_is_not_taken_for_one_that_has_run(threads):
    threads(2)
    with pytest.raises((RuntimeError, ValueError)):
        native.run(raises, 1000, least=4)


def test_an_error_in_another_thread_is_raised(threads):
    threads(2)

    def loop(first, last):
        if first:
            raise ValueError("the second piece")

    with pytest.raises(ValueError, match="the second piece"):
        native.run(loop, 64, least=4)


def test_the_number_of_threads_changes_no_bit_of_what_a_loop_writes(threads):
    """The products with phi are PyTorch's, whose sums may depend on it: one thread does these."""
    from gsm_kernels.cpu.loops import mhc as loops

    inputs, outputs = call(), []
    number = inputs["streams_BRXD"].view(600, -1) @ inputs["phi"].T
    for count in (1, 3):
        threads(count)
        out = [number.clone(), torch.empty(600), *(torch.empty_like(inputs[name]) for name in list(inputs)[:2])]
        tensors = [inputs[name] for name in ("streams_BRXD", "update_BRD", "bias", "scale")]
        native.run(loops.forward, 600, 600, 16, 20, 1e-6, 1e-6, *tensors, *out, least=128)
        outputs.append(out)
    assert all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))


def test_python_threads_at_once_get_what_each_gets_alone(threads):
    threads(2)
    rows = {"rows": 500, "entries": 520, "width": 150, "heads": 3, "channels": 16, "pairs": 4, "bias": True}
    jobs = [functools.partial(results, call(600 + 100 * number)) for number in range(2)]
    jobs += 2 * [lambda: list(gradients(attend, cast(attending(**rows), torch.float32))[1].values())]
    alone = [job() for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for expected, output in zip(alone, pool.map(lambda job: job(), jobs), strict=True):
                assert all(torch.equal(x, y) for x, y in zip(expected, output, strict=True) if x is not None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_computes_the_same_with_threads_of_its_own(threads, tmp_path: Path):
    threads(2)
    inputs = {name: x for name, x in call().items() if isinstance(x, torch.Tensor)}
    with torch.no_grad():
        expected = mhc_boundary(**inputs)[0]  # has made this process' threads
    child = os.fork()
    if not child:
        torch.randn(800, 800) @ torch.randn(800, 800)  # waited for threads that did not come along
        native.torch.get_num_threads = lambda: 2
        with torch.no_grad():
            (tmp_path / "output").write_bytes(pickle.dumps(mhc_boundary(**inputs)[0].tolist()))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pickle.loads((tmp_path / "output").read_bytes()) == expected.tolist()


def test_numba_is_imported_when_it_is_needed_and_everything_runs_without_it():
    program = """
import importlib.util
import sys
import gsm
import gsm_kernels
assert "numba" not in sys.modules
sys.modules["numba"] = None
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "numba" else find_spec(name, *more)
import torch
from gsm_kernels import attend, explain, listening, mhc_boundary
with listening() as heard:
    mhc_boundary(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 8), torch.ones(24, 32), torch.ones(24), torch.ones(3))
print(heard, explain()["mhc_boundary"])
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "[('mhc_boundary', 'reference')]" in output and "Numba is not installed" in output


def test_compiled_code_is_kept_under_the_digest_of_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    folder = Path(native.cache_folder())
    with torch.no_grad():
        mhc_boundary(**call(3))
    assert list(folder.rglob("mhc.forward*.nbc")), folder
    for file in (*native.HERE.glob("loops/*.py"), native.HERE / "arrays.py", native.HERE / "native.py"):
        (tmp_path / file.relative_to(native.HERE)).parent.mkdir(exist_ok=True)
        (tmp_path / file.relative_to(native.HERE)).write_text(file.read_text())
    monkeypatch.setattr(native, "HERE", tmp_path)
    same = native.cache_folder.__wrapped__()
    (tmp_path / "arrays.py").write_text("# another function that loops have inlined")
    assert Path(same).name == folder.name != Path(native.cache_folder.__wrapped__()).name


def test_explain_has_the_choice_and_its_reason():
    assert explain()["mhc_boundary"].startswith("numba: ")
    with listening() as heard, torch.no_grad():
        mhc_boundary(**call(3))
        mhc_boundary(**hyper_connection())
        mhc_boundary(**cast(hyper_connection(streams=2), torch.float32))
    assert [name for _, name in heard] == ["numba", "reference", "reference"]


def test_recomputation_that_keeps_products_gives_the_same_gradients():
    """With frozen weights the loop would run directly, and scale a stored product."""
    inputs = call(40)
    store_products = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def gradient(through) -> torch.Tensor:
        x = inputs["streams_BRXD"].clone().requires_grad_()

        def frozen(x):
            with torch.no_grad():
                left = mhc_boundary(**{**inputs, "streams_BRXD": x.detach()})[0]
            return (left * x).square().sum()

        through(frozen, x).backward()
        return x.grad

    again = functools.partial(checkpoint, use_reentrant=False, context_fn=store_products)
    assert torch.equal(gradient(again), gradient(lambda function, x: function(x)))


def test_tensors_without_memory_have_shapes_alone():
    with FakeTensorMode(), torch.no_grad():
        streams = torch.empty(1, 3, 4, 8)
        left, mixed = mhc_boundary(streams, streams[:, :, 0], torch.empty(24, 32), torch.empty(24), torch.empty(3))
        assert left.shape == streams.shape and rms_norm(mixed, torch.empty(8)).shape == mixed.shape


def test_where_nothing_can_be_written_code_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "own"))
    assert Path(native.cache_folder.__wrapped__()).parent == tmp_path / "own"
    monkeypatch.setattr(native.tempfile, "TemporaryFile", _refused)
    assert native.cache_folder.__wrapped__() == ""


def _refused(**_):
    raise PermissionError


def test_the_other_pieces_have_ended_when_an_error_is_raised(threads):
    threads(2)
    ended = []

    def loop(first, last):
        if not first:
            raise ValueError("the first piece")
        time.sleep(0.2)
        ended.append(first)

    with pytest.raises(ValueError, match="the first piece"):
        native.run(loop, 64, least=4)
    assert ended


def test_a_loop_that_cannot_be_compiled_is_an_error_with_the_way_around(monkeypatch: pytest.MonkeyPatch):
    from numba.core.errors import TypingError

    from gsm_kernels.cpu.loops import mhc as loops

    def forward(*_):
        raise TypingError("a Numba that knows less")

    monkeypatch.setattr(loops, "forward", forward)
    with torch.no_grad(), pytest.raises(TypingError, match="a Numba that knows less") as raised:
        mhc_boundary(**call(3))
    assert "GSM_KERNELS=reference" in raised.value.__notes__[0]


def test_what_loops_call_is_compiled_into_them():
    for file in native.HERE.glob("loops/*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
                assert [ast.unparse(decorator) for decorator in node.decorator_list] == ["part"], f"{file}: {node.name}"


DIGEST = """
import hashlib
import torch
from gsm_kernels import mhc_boundary
torch.manual_seed(0)
inputs = [torch.randn(1, 70, 4, 64), torch.randn(1, 70, 64), torch.randn(24, 256) / 16, torch.randn(24), torch.ones(3)]
inputs = [x.requires_grad_() for x in inputs]
out = mhc_boundary(*inputs)
torch.autograd.backward(out, [torch.ones_like(x) for x in out])
output = b"".join(x.detach().numpy().tobytes() for x in (*out, *(x.grad for x in inputs)))
print(hashlib.sha256(output).hexdigest())
"""


@pytest.mark.slow
def test_a_process_that_compiles_and_one_that_reads_the_cache_compute_the_same(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    digests = [
        subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert any(tmp_path.rglob("*.nbc")) and digests[0] == digests[1]
