"""`benchmarks/gpu.py`: its words, what it says is missing, and its stage of tests, killed and gone on."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gsm.paths import ROOT
from gsm_benchmarks import results

MODULES = ("gpu", "gpu_lines", "gpu_tests", "wheels")
ASKS = "# mark" + ".gpu"  # a file with this is run on a GPU; this file is not
COUNTED = f"import os, pathlib, time, pytest  {ASKS}\nHERE = pathlib.Path(__file__).parents[2]\n" + (
    "@pytest.fixture(autouse=True)\n"
    "def counted(request):\n"
    "    with (HERE / 'ran').open('a') as file: file.write(request.node.name + '\\n')\n"
)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with these scripts and our packages, whose tests are toys; they are seen by no test but these."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "tests/ops").mkdir(parents=True)
    for path in (ROOT / "benchmarks").glob("*.py"):
        shutil.copy(path, tmp_path / "benchmarks")
    (tmp_path / "benchmarks/gsm_benchmarks").symlink_to(ROOT / "benchmarks/gsm_benchmarks")
    for name in ("kernels", "src", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "benchmarks"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # two versions of a toy may be of the same second
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    monkeypatch.syspath_prepend(tmp_path / "benchmarks")
    return tmp_path


@pytest.fixture
def load(tree: Path) -> Iterator[Callable[[str], Any]]:
    """The scripts of the tree as modules."""
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def gpu(load: Callable[[str], Any]) -> Any:
    return load("gpu")


@pytest.fixture
def stage(load: Callable[[str], Any]) -> Callable[..., int]:
    """The stage of tests, in this process, in one process more."""
    return lambda **words: load("gpu_tests").main(**{"device": "cpu", "workers": 1, **words})


def write(tree: Path, *tests: str) -> None:
    """A file of toy tests, each of which says that it ran."""
    (tree / "tests/ops/test_toy.py").write_text(COUNTED + "\n".join(tests) + "\n")


def ran(tree: Path) -> list[str]:
    """What has run, in its order."""
    path = tree / "ran"
    return path.read_text().split() if path.exists() else []


def lines(tree: Path) -> list[dict[str, Any]]:
    """Whole lines that there are."""
    text = "".join(path.read_text() for path in tree.glob("results/*-tests.jsonl"))
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def outcomes(tree: Path) -> dict[str, str]:
    """The last of every test, by its name alone."""
    return {line["test"].partition("::")[2]: line["outcome"] for line in lines(tree) if "test" in line}


def runs(process: int) -> bool:
    """Whether a process of this number is there, and is more than what is left of one that has ended."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return done.stdout.strip()[:1] not in ("", "Z")


def wait(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def called(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tree / "benchmarks/gpu.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_names_every_stage_and_word(gpu, capsys):
    assert gpu.main([]) == 0 == gpu.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in gpu.STAGES)
    assert all(f"  {word}" in said for word in gpu.WORDS)
    assert {word for stage in gpu.STAGES.values() for word in stage.words} <= gpu.WORDS.keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tset"], "there is no stage 'tset'; say smoke, tests, kernels, inference, training"),
        (["smoke", "peers=false"], "smoke does not understand 'peers=false'; there are results=, .*, only=$"),
        (["kernels", "force"], "kernels does not understand 'force'; there are"),
        (["kernels", "peers=no"], "peers is 'no'; say true or false"),
        (["tests", "device=tpu"], "device is 'tpu'; say cuda or cpu"),
        (["tests", "minutes=ten"], "minutes is 'ten'; say a number"),
        (["training", "model=gsm"], "training does not understand 'model=gsm'; .* benchmark.NAME="),
    ],
)
def test_a_word_that_is_not_understood_is_answered_with_those_that_are(gpu, words, said):
    with pytest.raises(ValueError, match=said):
        gpu.main(words)


def test_measurements_lie_where_git_does_not_look_unless_they_are_sent_elsewhere(gpu):
    """A benchmark without output= left files in benchmarks/results, or changed those that are committed there."""
    child = "from gsm_benchmarks import results; print(results.usual_path({'device': 'cpu'}, 'kernels'))"
    paths = os.pathsep.join(str(ROOT / name) for name in ("src", "kernels", "benchmarks"))
    plain = {name: value for name, value in os.environ.items() if name != "GSM_RESULTS"} | {"PYTHONPATH": paths}
    said = subprocess.run([sys.executable, "-c", child], env=plain, capture_output=True, text=True, check=True).stdout
    assert Path(said.strip()) == ROOT / "logs/benchmarks/cpu-kernels.json"
    assert gpu.folder_of_results({}) == gpu.ROOT / "logs/benchmarks"
    assert "logs/" in (ROOT / ".gitignore").read_text().split()


def test_words_go_to_the_stage_and_to_its_environment(gpu, tmp_path):
    words = gpu.read("inference", [f"results={tmp_path}", "commit=abc", "benchmark.models=[gsm]", "minutes=2.5"])
    assert words["benchmark.models"] == "[gsm]"
    environment = gpu.surroundings(words)
    assert environment["GSM_RESULTS"] == str(tmp_path) and environment["GSM_COMMIT"] == "abc"
    assert str(gpu.ROOT) not in environment["PYTHONPATH"].split(os.pathsep)


def test_what_is_missing_is_named_with_what_to_do(gpu, monkeypatch):
    gone = {"numpy", "pytest", "xdist", "omegaconf", "fla", "liger_kernel"}
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name in gone else name)
    monkeypatch.setattr(gpu.shutil, "which", lambda name, path=None: None)
    fatal, spared = gpu.missing("tests", {})
    assert fatal[0] == "the package numpy (install it)"
    assert fatal[1].startswith("the package pytest (install it, or lay its wheel into wheels/")
    assert fatal[2].startswith("a C compiler")
    assert [clause.partition(":")[0] for clause in spared] == [
        "the package omegaconf",
        "the package xdist",
        "compute-sanitizer on the PATH or in /usr/local/cuda/bin",
        "git",
    ]
    fatal, spared = gpu.missing("kernels", {})
    assert fatal[0].startswith("a C compiler")
    assert spared[:2] == ["the package fla: it is no peer", "the package liger_kernel: it is no peer"]
    fatal, spared = gpu.missing("training", {})
    assert "the package numpy" in fatal[0] and "the package omegaconf" in fatal[1]
    assert spared[0] == "the package fla: delta_rule and slot_attention run their chunked forms, attend_blocks SDPA"


def test_headers_are_looked_for_where_triton_looks(gpu, monkeypatch):
    """Debian's own scheme names a folder that its Python leaves empty."""
    monkeypatch.setattr(gpu.sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(gpu.sysconfig, "get_paths", lambda scheme: {"include": f"/{scheme}/include"})
    assert gpu.headers() == Path("/posix_prefix/include")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_stage_says_so_behind_what_else_is_missing(tree):
    done = called(tree, "kernels", "peers=false")
    assert done.returncode == 1 and "missing: git: results name no commit; say commit=ID" in done.stdout
    assert done.stderr.startswith("error: PyTorch sees no CUDA device here") and done.stderr.count("\n") == 1


def test_wheels_are_unpacked_once_and_again_when_they_change(gpu, tree):
    def wheel(name: str) -> None:
        with zipfile.ZipFile(tree / f"wheels/{name}-1-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}.py", "")

    (tree / "wheels").mkdir()
    gpu.unpack(tree / "wheels")
    assert not gpu.SITE.exists()
    wheel("one")
    gpu.unpack(tree / "wheels")
    (gpu.SITE / "one.py").unlink()
    gpu.unpack(tree / "wheels")
    assert not (gpu.SITE / "one.py").exists(), "they are unpacked already"
    wheel("two")
    gpu.unpack(tree / "wheels")
    assert (gpu.SITE / "one.py").exists() and (gpu.SITE / "two.py").exists()


def test_results_of_an_earlier_call_are_gone_on_from(gpu, tmp_path):
    before, now = tmp_path / "before", tmp_path / "now"
    before.mkdir()
    for name in ("a-kernels.json", "a-tests.jsonl", "b-kernels.json"):
        (before / name).write_text("old")
        (before / name).chmod(0o444)
    now.mkdir()
    (now / "a-kernels.json").write_text("new")
    gpu.bring(before, now, "kernels")
    assert {path.name: path.read_text() for path in now.iterdir()} == {"a-kernels.json": "new", "b-kernels.json": "old"}
    (now / "b-kernels.json").write_text("gone on")
    with pytest.raises(ValueError, match="there is no such folder"):
        gpu.bring(tmp_path / "none", now, "kernels")


def test_a_stage_that_does_not_end_is_ended_with_all_that_it_started(gpu, tmp_path, monkeypatch):
    mark, path = tmp_path / "mark", tmp_path / "stage.py"
    path.write_text(
        "import pathlib, signal, subprocess, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '99'])\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(child.pid))\ntime.sleep(99)"
    )
    monkeypatch.setattr(gpu, "GRACE", (2, 1))
    monkeypatch.setitem(gpu.STAGES, "smoke", gpu.Stage("", 3, (), (str(path),)))
    began = time.monotonic()
    assert gpu.run("smoke", {"minutes": "0.02"}, os.environ, began) == 130 and time.monotonic() - began < 10
    wait(lambda: not runs(int(mark.read_text())), 10)


def test_a_measurement_that_was_taken_down_is_started_again_as_long_as_it_writes(gpu, tree, monkeypatch):
    path, words = tree / "stage.py", {"results": str(tree / "results"), "only": "a", "force": "true", "commit": "abc"}
    path.write_text(
        "import os, pathlib, sys\n"
        f"ran = pathlib.Path({str(tree / 'ran')!r})\n"
        "ran.write_text((ran.read_text() if ran.exists() else '') + ' '.join(sys.argv[1:3]) + '\\n')\n"
        "number = ran.read_text().count('\\n')\n"
        "if number % 3: pathlib.Path(os.environ['GSM_RESULTS'], 'a-smoke.json').write_text('')\n"
        "sys.exit(number)\n"
    )
    (tree / "results").mkdir()
    monkeypatch.setitem(gpu.STAGES, "smoke", gpu.Stage("", 3, (), (str(path),)))
    assert gpu.run("smoke", words, gpu.surroundings(words), time.monotonic()) == 3
    assert (tree / "ran").read_text() == "only=a force=true\n" * 3
    assert gpu.run("smoke", {**words, "minutes": "0.5"}, gpu.surroundings(words), time.monotonic()) == 4


def test_every_test_is_a_line_with_what_it_said(tree, stage, capsys):
    write(
        tree,
        "def test_random_shapes(): pass",
        "def test_b(): assert 1 == 2",
        "def test_c(): pytest.skip('no')",
        "def test_in_bfloat16(): pass",
    )
    (tree / "tests/ops/test_broken.py").write_text(f"import nothing_of_this_name  {ASKS}")
    assert stage() == 1
    assert outcomes(tree) == {"": "failed", "test_in_bfloat16": "passed", "test_b": "failed"} | {
        "test_c": "skipped",
        "test_random_shapes": "passed",
    }
    assert ran(tree) == ["test_in_bfloat16", "test_b", "test_c", "test_random_shapes"]
    line = next(line for line in lines(tree) if line.get("outcome") == "failed" and "::test_b" in line["test"])
    assert line["first"].startswith("assert 1 == 2") and any("in test_b" in text for text in line["tail"])
    said = capsys.readouterr().out
    assert "| tests/ops/test_toy.py | 2 | 1 | 1 |  |  |" in said
    assert "* `tests/ops/test_toy.py::test_b`: failed, assert 1 == 2" in said
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in said


def test_what_has_failed_runs_again_behind_the_others_and_what_has_passed_does_not(tree, stage):
    write(tree, "def test_a(): assert not (HERE / 'fails').exists()", "def test_b(): pass")
    (tree / "fails").touch()
    assert stage(only="test_a") == 1
    (tree / "fails").unlink()
    assert stage() == 0 and ran(tree) == ["test_a", "test_b", "test_a"]
    assert stage() == 0 and len(ran(tree)) == 3
    assert stage(force=True) == 0 and len(ran(tree)) == 5


def test_a_result_counts_as_long_as_nothing_of_its_sources_has_changed(tree, stage):
    write(tree, "def test_a(): pass")
    assert stage() == 0
    write(tree, "def test_a(): assert True")
    assert stage(keep=True) == 0 and ran(tree) == ["test_a"]
    assert stage() == 0 and ran(tree) == ["test_a"] * 2


def test_a_torn_line_is_left_out(tree, stage):
    write(tree, "def test_a(): pass", "def test_b(): pass")
    assert stage() == 0
    (path,) = tree.glob("results/*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b'"outcome"')])
    assert stage() == 0 and ran(tree) == ["test_a", "test_b", "test_b"]


def test_a_test_that_takes_its_process_down_is_noted_and_the_others_run(tree, stage):
    write(tree, "def test_a(): os._exit(0)", "def test_b(): pass", "def test_c(): os.kill(os.getpid(), 11)")
    assert stage() == 1 and ran(tree) == ["test_a", "test_b", "test_c"]
    assert outcomes(tree) == {"test_a": "crashed", "test_b": "passed", "test_c": "crashed"}
    write(tree, "def test_a(): os._exit(0)", "def test_b(): pass", "def test_c(): pass", "def test_d(): pass")
    assert stage() == 1 and ran(tree)[3:] == ["test_a", "test_b", "test_c", "test_d"], "its sources have changed"
    assert stage() == 1 and ran(tree)[7:] == ["test_a"]


def test_pytest_that_does_not_start_is_said(tree, stage):
    write(tree, "def test_a(): pass")
    (tree / "tests/conftest.py").write_text("import os; os._exit(7)")
    with pytest.raises(ValueError, match="pytest has run no test, and ended with exit status 7"):
        stage()


def killed_and_gone_on(tree: Path, workers: int) -> None:
    """Kills the whole stage where a third of it has ended, calls it again, and looks at what ran how often."""
    write(tree, *(f"def test_{n:02}(): time.sleep(0.3)" for n in range(24)))
    words = ["tests", "device=cpu", f"workers={workers}", f"results={tree / 'results'}"]
    process = subprocess.Popen(
        [sys.executable, str(tree / "benchmarks/gpu.py"), *words], stdout=subprocess.DEVNULL, start_new_session=True
    )
    wait(lambda: len(outcomes(tree)) >= 8)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1)  # all that it has started ends with it
    ended, before = set(outcomes(tree)), ran(tree)
    time.sleep(1)
    assert ran(tree) == before and len(ended) < 20
    done = called(tree, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    again = ran(tree)[len(before) :]
    assert not ended & set(again) and ended | set(again) == {f"test_{n:02}" for n in range(24)}
    assert len(again) == 24 - len(ended)
    in_flight = [test for test in before if test not in ended]
    assert set(in_flight) <= set(again[-2 * workers - 2 :]), "what began and did not end comes last"


@pytest.mark.slow
def test_killed_at_any_second_it_goes_on_behind_the_last_test_that_has_ended(tree):
    killed_and_gone_on(tree, 1)


@pytest.mark.slow
def test_killed_with_several_processes_it_goes_on_too(tree):
    pytest.importorskip("xdist")
    killed_and_gone_on(tree, 2)


@pytest.mark.slow
def test_of_several_processes_one_that_is_taken_down_is_replaced(tree, stage):
    pytest.importorskip("xdist")
    tests = [f"def test_{n}(): pass" for n in range(10)]
    tests += [f"def test_offsets_beyond_two_to_the_31_{n}(): alone()" for n in range(2)]
    alone = "def alone():\n    (HERE / 'busy').mkdir()\n    time.sleep(1)\n    (HERE / 'busy').rmdir()"
    write(tree, "def test_astray(): os._exit(3)", alone, *tests, "def test_hurt(): assert False")
    (tree / "tests/ops/test_broken.py").write_text(f"import nothing_of_this_name  {ASKS}")
    assert stage(workers=2) == 1
    found = outcomes(tree)
    assert {test for test, outcome in found.items() if outcome == "passed"} == {
        line.partition("(")[0].removeprefix("def ") for line in tests
    }
    assert found["test_astray"] == found["test_hurt"] == found[""] == "failed"
    assert sorted(ran(tree)) == sorted({*found} - {""})


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_that_lost_the_gpu_is_replaced_by_another(tree, stage, workers):
    if workers > 1:
        pytest.importorskip("xdist")
    source = (ROOT / "tests/conftest.py").read_text().partition("# For tests of how runs end")[0]
    (tree / "tests/ops/conftest.py").write_text(source)
    lost = "torch.cuda.is_initialized = lambda: True\ndef lost(): raise RuntimeError('CUDA error')\n"
    tests = "".join(f"def test_{n}(): assert torch.cuda.synchronize is not lost\n" for n in range(20))
    write(
        tree, f"import torch\n{lost}def test_astray():\n    torch.cuda.synchronize = lost\n    assert 1 == 2\n{tests}"
    )
    assert stage(workers=workers) == 1
    found = outcomes(tree)
    assert found.pop("test_astray") == "failed" and list(found.values()) == ["passed"] * 20
    said = [line["first"] for line in lines(tree) if line.get("outcome") == "failed"]
    assert said == ["assert 1 == 2"], "what it said counts for more than that its process has ended"


def test_compute_sanitizer_goes_on_operation_by_operation_and_tool_by_tool(tree, load, monkeypatch):
    stage = load("gpu_tests")
    log, end = tree / "log", 'echo "========= ERROR SUMMARY: 2 errors"; exit 99'
    sanitizer = tree / "bin/compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text(
        f'#!/bin/sh\nfor test; do :; done; echo "$2 $test $PYTORCH_NO_CUDA_MEMORY_CACHING" >>{log}\n'
        f'case "$2 $test" in initcheck*swiglu*) echo "========= Uninitialized read"; {end};; esac\n'
    )
    sanitizer.chmod(0o755)
    how = stage.Stage(tree / "results/a-tests.jsonl", {}, "", False, False, 4, time.monotonic() + 60)
    stage.gpu_lines.append(how.path, {"marks": {}})
    table = {"tests/ops/test_triton.py": {"": "all", "attend": "one", "swiglu": "other"}}
    names = [piece.name for piece in stage.pieces(how, table)]
    assert names[0] == "compute-sanitizer memcheck[attend]" and "compute-sanitizer initcheck[swiglu]" in names
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(stage.gpu_lines, "append", killing(stage.gpu_lines.append, after=9))
        stage.sanitize(how, table, str(sanitizer))
    ended = [line["test"] for line in lines(tree) if "test" in line]
    begun = [line["begun"] for line in lines(tree) if "begun" in line]
    left = [piece.name for piece in stage.pieces(how, table)]
    assert ended and not set(ended) & set(left) and set(left[-len(set(begun) - set(ended)) :]) == {*begun} - {*ended}
    stage.sanitize(how, table, str(sanitizer))
    assert [piece.name for piece in stage.pieces(how, table)] == ["compute-sanitizer initcheck[swiglu]"]
    assert {line.split()[2] for line in log.read_text().splitlines()} == {"1"}
    assert f"memcheck {stage.SMALLEST}[attend] 1" in log.read_text()
    found = [line for line in lines(tree) if line.get("outcome") == "failed"]
    assert [line["first"] for line in found] == ["========= ERROR SUMMARY: 2 errors"]
    assert found[0]["tail"][0] == "========= Uninitialized read"
    assert "* `compute-sanitizer initcheck[swiglu]`: failed" in stage.summary(how, table)


def killing(function: Callable[..., None], after: int) -> Callable[..., None]:
    """A function that is interrupted behind so many calls."""
    calls = iter(range(after))

    def call(*args: Any) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        function(*args)

    return call


def test_the_stage_runs_what_moves_to_a_gpu(load, monkeypatch):
    stage = load("gpu_tests")
    monkeypatch.setattr(stage, "ROOT", ROOT)
    paths = stage.files()
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    assert {"tests/ops/test_triton.py", "tests/ops/test_triton_mhc.py", "tests/test_engine.py"} <= set(
        names
    ) and "tests/test_gpu_stage.py" not in names
    test, _, parameter = stage.SMALLEST.partition("::")
    assert f"def {parameter}(op)" in (ROOT / test).read_text()
    of = stage.fingerprints(paths)["tests/ops/test_triton.py"]
    sources = stage.gpu_lines.sources
    assert sources({test: of}, f"{stage.SMALLEST}[mhc_boundary]") == of["mhc_boundary"] != of["attend"] != of[""]
    assert sources({test: of}, f"{test}::test_an_empty_call_launches_nothing") == of[""]


def test_the_wheels_are_named_once_and_each_has_a_version(load, tmp_path):
    wheels = load("wheels")
    (names,) = [
        [key.value for key in node.value.keys]
        for node in ast.walk(ast.parse((ROOT / "benchmarks/wheels.py").read_text()))
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PACKAGES"
    ]
    assert len(names) == len(set(names)) and wheels.versions().keys() == set(names)
    assert all(version[0].isdigit() for version in wheels.versions().values())
    (tmp_path / "hydra_core-1.3.8-py3-none-any.whl").touch()
    assert wheels.wheel(tmp_path, "hydra-core", "1.3.8") and not wheels.wheel(tmp_path, "hydra-core", "1.3.9")
