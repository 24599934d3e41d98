"""What has to run on a GPU, in stages: `python benchmarks/gpu.py STAGE [name=value ...]`, or `make gpu STAGE=STAGE`.

It runs with the machine's own Python, as bare as that may be: this file imports the standard library alone. Wheels in
wheels/ are unpacked beside, what is missing is said before anything starts, and a stage ends in time. Killed at any
second, the same command goes on behind the last finished piece. docs/gpu.md is the page.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".gpu/site"
INTERRUPTED = 128 + signal.SIGINT
GRACE = 20, 10  # seconds: from the end of its minutes until a stage is interrupted, and from there until it is killed


class Stage(NamedTuple):
    """What it answers, how many minutes it takes at most, its own words, what Python runs, and what it runs with on a
    GPU, or in a rehearsal without one."""

    answers: str
    minutes: float
    words: tuple[str, ...]
    command: tuple[str, ...]
    on_gpu: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ("device=cpu",)


STAGES = {
    "smoke": Stage(
        "does every operation run and agree, and what do the numbers say that the kernels were designed by?",
        3,
        ("only",),
        ("-m", "gsm_benchmarks", "smoke"),
    ),
    "tests": Stage(
        "are results and gradients right, test by test, and does compute-sanitizer find anything?",
        7.5,
        ("only", "keep", "workers"),
        ("benchmarks/gpu_tests.py",),
    ),
    "kernels": Stage(
        "how close does every operation come to its floor, and how does it stand against its peers?",
        7.5,
        ("only", "peers"),
        ("-m", "gsm_benchmarks", "kernels"),
    ),
    "inference": Stage(
        "how fast do the models read and go on, at 4K, 64K and 256K first, GSM and its baseline first?",
        7.5,
        ("benchmark.",),
        ("benchmark.py", "benchmark=inference", "benchmark.text=random"),
        ("device=cuda",),
        (
            *("device=cpu", "benchmark.size=pico", "benchmark.models=[gsm,baseline]", "benchmark.lengths=[256]"),
            "benchmark.synthetic_lengths=[]",
        ),
    ),
    "training": Stage(
        "how fast do they train, 1.5B parameters, 4 sequences, with recomputation, GSM and its baseline first?",
        7.5,
        ("benchmark.",),
        ("benchmark.py", "benchmark=training", "benchmark.recompute=true"),
        ("device=cuda", "benchmark.size=1p5b", "benchmark.batch_size=4"),
        ("device=cpu", "benchmark.size=pico", "benchmark.batch_size=1", "benchmark.steps=2"),
    ),
}

WORDS = {
    "results": "FOLDER of results, which is also gone on from (logs/benchmarks)",
    "earlier": "FOLDER of results of an earlier call, copied to `results` first, unless they are there",
    "commit": "ID of the commit, where git does not travel with the tree",
    "minutes": "NUMBER of minutes, after which nothing new is begun",
    "force": "true: also what is there already",
    "only": "PREFIX of the rows that are measured; of tests, a part of their names",
    "peers": "false: ours alone",
    "keep": "true: a result counts, whatever was changed since",
    "device": "cpu: a rehearsal without a GPU, at toy sizes",
    "workers": "NUMBER of processes that run tests, where pytest-xdist is",
    "benchmark.": "NAME=VALUE, as benchmark.py takes it: benchmark.models=[gsm]",
}
EVERYWHERE = ("results", "earlier", "commit", "minutes", "force", "device")
TRUTH = ("force", "peers", "keep")

IN_WHEELS = ("hydra", "omegaconf", "antlr4", "tokenizers", "pytest", "xdist", "pytest_timeout")
CARRIED = " (install it, or lay its wheel into wheels/: python benchmarks/wheels.py, where there is a network)"
MEASURED = ("smoke", "kernels", "inference", "training")
MODELS = ("inference", "training")


class Need(NamedTuple):
    """A module, the stages that cannot do without it, those that can, and what these then go without."""

    module: str
    required: Sequence[str]
    optional: Sequence[str] = ()
    without: str = ""


ENGINE = "tests/test_engine.py and tests/test_compile.py fail"
NEEDS = (
    Need("torch", tuple(STAGES)),
    Need("triton", tuple(STAGES)),
    Need("numpy", ("tests", *MODELS)),
    Need("lightning", MODELS),
    Need("torchmetrics", MODELS),
    Need("hydra", MODELS, ("tests",), ENGINE),
    Need("omegaconf", MODELS, ("tests",), ENGINE),
    Need("antlr4", MODELS, ("tests",), ENGINE),
    Need("yaml", MODELS, ("tests",), ENGINE),
    Need("tokenizers", (), ("inference",), "benchmark.text= stays random"),
    Need("pytest", ("tests",)),
    Need("xdist", (), ("tests",), "tests run one by one, in one process"),
    Need("pytest_timeout", (), ("tests",), "a test that hangs takes the rest of the stage"),
    Need("fla", (), MODELS, "delta_rule and slot_attention run their chunked forms, attend_blocks SDPA"),
    Need("fla", (), ("kernels",), "it is no peer"),
    Need("einops", (), (*MODELS, "kernels"), "fla cannot be imported"),
    Need("liger_kernel", (), ("kernels",), "it is no peer"),
    Need("matplotlib", (), MODELS[:1], "pictures are drawn later, from the file of results"),
)


def usage() -> str:
    """What there is to type."""
    stages = [f"  {name:<10} {stage.minutes:g} minutes  {stage.answers}" for name, stage in STAGES.items()]
    where = {word: ", ".join(name for name, stage in STAGES.items() if word in stage.words) for word in WORDS}
    words = [
        f"  {word + '=' * (word[-1] != '.'):<11} {text}{f'; {where[word]} alone' * bool(where[word])}"
        for word, text in WORDS.items()
    ]
    parts = ["python benchmarks/gpu.py STAGE [name=value ...]", "", "Stages, in the order one runs them:", *stages]
    return "\n".join([*parts, "", "Words:", *words, "", "The same command goes on where the last one ended."])


def read(stage: str, given: Sequence[str]) -> dict[str, str]:
    """The words by name. Raises ValueError, in one sentence, for one that this stage does not understand."""
    words, known = {}, (*EVERYWHERE, *STAGES[stage].words)
    for word in given:
        name, equals, value = word.partition("=")
        whole = name if name in known else next((k for k in known if k.endswith(".") and name.startswith(k)), "")
        if not whole or not equals:
            there = ", ".join(f"{name}=" if name[-1] != "." else f"{name}NAME=" for name in known)
            raise ValueError(f"{stage} does not understand '{word}'; there are {there}")
        choices = ("true", "false") if name in TRUTH else ("cuda", "cpu") if name == "device" else ()
        if choices and value not in choices:
            raise ValueError(f"{name} is '{value}'; say {' or '.join(choices)}")
        words[name] = value
    for name in {"minutes", "workers"} & words.keys():
        if not words[name].replace(".", "" if name == "minutes" else ".", 1).isdigit():
            raise ValueError(f"{name} is '{words[name]}'; say a number")
    return words


def unpack(folder: Path) -> None:
    """The wheels of a folder lie in SITE, and no others."""
    wheels = sorted(folder.glob("*.whl"))
    names, mark = "\n".join(wheel.name for wheel in wheels), SITE / ".unpacked"
    if not wheels or (mark.exists() and mark.read_text() == names):
        return
    shutil.rmtree(SITE, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(SITE)
    mark.write_text(names)
    print(f"{len(wheels)} wheels are unpacked to {SITE}")


def surroundings(words: Mapping[str, str]) -> dict[str, str]:
    """The environment of a stage. A folder called kernels in the current one would be found by other packages, so the
    current one is left out of the import path."""
    paths = [str(SITE), *(str(ROOT / name) for name in ("src", "kernels", "benchmarks"))]
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    fresh = {"PYTHONPATH": os.pathsep.join([*paths, *inherited]), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    fresh["GSM_RESULTS"] = str(folder_of_results(words))
    return {**os.environ, **fresh, **({"GSM_COMMIT": words["commit"]} if "commit" in words else {})}


def folder_of_results(words: Mapping[str, str]) -> Path:
    return Path(words.get("results", ROOT / "logs/benchmarks")).resolve()


def missing(stage: str, words: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """What this stage cannot do without, and what it goes without: a clause each, with what to do."""
    gone = {need.module for need in NEEDS if importlib.util.find_spec(need.module) is None}
    lacking = [need.module for need in NEEDS if need.module in gone and stage in need.required]
    fatal = [f"the package {module}{CARRIED if module in IN_WHEELS else ' (install it)'}" for module in lacking]
    spared = [
        f"the package {need.module}: {need.without}" for need in NEEDS if need.module in gone and stage in need.optional
    ]
    if words.get("device") != "cpu":
        if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
            fatal.append(
                "a C compiler, with which Triton builds what launches a kernel (install gcc, or name one in CC)"
            )
        if not (headers() / "Python.h").exists():
            spared.append(f"Python.h in {headers()}: Triton may build nothing (install Python's headers)")
        if stage == "tests" and not sanitizer():
            spared.append(
                "compute-sanitizer on the PATH or in /usr/local/cuda/bin: out of bounds and races are not looked for"
            )
        if stage in MEASURED and not shutil.which("nvidia-smi"):
            spared.append("nvidia-smi on the PATH: clocks are not noted")
    if "commit" not in words and "GSM_COMMIT" not in os.environ and not in_git():
        spared.append("git: results name no commit; say commit=ID")
    return fatal, spared


def headers() -> Path:
    """Where Triton looks for Python's own."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def sanitizer() -> str | None:
    """The path of compute-sanitizer, which CUDA's images often leave off the PATH."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def in_git() -> bool:
    with contextlib.suppress(OSError):
        return not subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True).returncode
    return False


def device(environment: Mapping[str, str], wanted: str) -> str:
    """What the stage will find, in words. Raises ValueError where PyTorch sees no GPU and one is wanted."""
    asked = (
        "import platform, torch, triton; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '');"
        "print('Python', platform.python_version() + ', torch', torch.__version__ + ', triton', triton.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"PyTorch cannot be imported: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    name, versions = done.stdout.splitlines()[-2:]
    if wanted == "cuda" and not name:
        raise ValueError(f"PyTorch sees no CUDA device here ({versions}); start this on a machine with one")
    return f"{name or 'no CUDA device'}, {versions}"


def bring(earlier: Path, results: Path, stage: str) -> None:
    """What an earlier call has left of this stage, into the folder of results. Raises ValueError if it is no folder."""
    if not earlier.is_dir():
        raise ValueError(f"earlier is '{earlier}', and there is no such folder")
    results.mkdir(parents=True, exist_ok=True)
    for path in earlier.glob(f"*-{stage}.json*"):
        if not (results / path.name).exists():
            shutil.copyfile(path, results / path.name)  # not its mode: it may lie there read-only


def start(command: Sequence[str], environment: Mapping[str, str], **how: Any) -> subprocess.Popen[str]:
    """A process in a group of its own, so that all it starts can be ended; it ends with the one that started it."""

    def end_with_parent() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    how = {"cwd": ROOT, "env": dict(environment), "text": True, **how}
    return subprocess.Popen(command, process_group=0, preexec_fn=end_with_parent, **how)


@contextlib.contextmanager
def group(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Behind the block, nothing that the process has started goes on."""
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process, and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(stage: str, words: Mapping[str, str], environment: Mapping[str, str], began: float) -> int:
    """Runs a stage to its end, or to that of its minutes, counted from `began`; returns the exit status.

    A measurement that ends in an error may have been taken down by one row, which is then tried behind all others: as
    long as rows are written, it is started again, twice at most. The tests see to that themselves, and `kernels` ends
    with 1 where rows have failed and all others were measured.
    """
    minutes, status = float(words.get("minutes", STAGES[stage].minutes)), 0
    own = [f"{word}={value}" for word, value in words.items() if word == "force" or word not in EVERYWHERE]
    own = [*(STAGES[stage].on_cpu if words.get("device") == "cpu" else STAGES[stage].on_gpu), *own]
    for _ in range(3):
        left, now = max(0.0, minutes - (time.monotonic() - began) / 60), time.time()
        command = [sys.executable, *STAGES[stage].command, *own, f"minutes={left:.2f}"]
        status = once(start(command, environment), 60 * left)
        wrote = any(path.stat().st_mtime > now for path in folder_of_results(words).glob(f"*-{stage}.json"))
        is_done = stage == "tests" or status in (0, INTERRUPTED) or (stage == "kernels" and status == 1)
        if is_done or not wrote or time.monotonic() - began + 30 > 60 * minutes:
            break
        print(f"{stage} has ended with exit status {status}: it is started again behind what was written", flush=True)
    return status


def once(process: subprocess.Popen[str], seconds: float) -> int:
    """The exit status of a process that ends within so many seconds; others are interrupted, and then killed."""
    with group(process):
        try:
            return process.wait(seconds + GRACE[0])
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE[1])
            return INTERRUPTED


def main(arguments: Sequence[str]) -> int:
    """Prints the usage, or runs a stage. Raises ValueError, in one sentence, for what cannot be done."""
    began = time.monotonic()
    if not arguments or {"-h", "--help"} & set(arguments):
        print(usage())
        return 0
    stage = arguments[0]
    if stage not in STAGES:
        raise ValueError(f"there is no stage '{stage}'; say {', '.join(STAGES)}")
    words = read(stage, arguments[1:])
    results, environment = folder_of_results(words), surroundings(words)
    unpack(ROOT / "wheels")
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    importlib.invalidate_caches()
    fatal, spared = missing(stage, words)
    for clause in spared:
        print(f"missing: {clause}", flush=True)
    if fatal:
        raise ValueError(f"{stage} needs {'; '.join(fatal)}")
    print(device(environment, words.get("device", "cuda")), flush=True)
    if "earlier" in words:
        bring(Path(words["earlier"]).resolve(), results, stage)
    status = run(stage, words, environment, began)
    for path in sorted(results.glob(f"*-{stage}.*")):
        print(f"{path} ({path.stat().st_size / 1024:.0f} KiB)")
    return status


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036, a bare machine has what it has
        sys.exit("error: this is Python {}.{}, and GSM needs 3.11 or newer".format(*sys.version_info[:2]))
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")
