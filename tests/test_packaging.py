"""The two packages install as they should, and the folder `kernels/` never poses as the package of that name.

transformers looks for an optional package `kernels` when it is imported; what a folder of ours in its place breaks
differs from one release to the next, so it must not be seen at all.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from gsm import paths

ROOT = paths.ROOT


def test_the_test_process_does_not_take_our_folder_for_a_package() -> None:
    spec = importlib.util.find_spec("kernels")
    assert not _is_ours(spec), f"`import kernels` finds {spec}: a folder of that name lies on sys.path {sys.path}"


def test_a_script_does_not_take_our_folder_for_a_package() -> None:
    """As in `python train.py --help`: the script's folder is first on the path until the script drops it."""
    found = _python(
        f"import importlib.util, runpy, sys; sys.path[0] = {str(ROOT)!r}; sys.argv = ['train.py', '--help']\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "spec = importlib.util.find_spec('kernels'); print('FOUND', *(spec.submodule_search_locations if spec else []))"
    )
    assert str(ROOT) not in found.rpartition("FOUND")[2], found


def test_without_hide_root_the_trap_is_there() -> None:
    """Else the two tests above would prove nothing."""
    find = "import importlib.util; spec = importlib.util.find_spec('kernels')"
    where = f"{find}; print(*(spec.submodule_search_locations if spec else []))"
    unhidden = _python(where).strip()
    if unhidden and str(ROOT) not in unhidden:
        pytest.skip("the real package `kernels` is installed and wins over a folder")
    assert unhidden == str(ROOT / "kernels")
    assert _python(f"from gsm.paths import hide_root; hide_root(); {where}").strip() == ""


def test_kernels_is_a_folder_and_not_a_package() -> None:
    assert not (ROOT / "kernels/__init__.py").exists(), "kernels/__init__.py hides the real package: remove it"


def test_importing_gsm_is_light() -> None:
    heavy = "{'torch', 'lightning', 'hydra', 'omegaconf', 'triton', 'transformers', 'xformers', 'numpy'}"
    assert _python(f"import sys, gsm; print(sorted({heavy} & set(sys.modules)), gsm.__version__)").startswith("[] 0.")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    import gsm

    with pytest.raises(AttributeError, match="'biuld_model'.*build_model"):
        gsm.biuld_model  # noqa: B018


def test_the_package_offers_what_it_is_used_for_and_nothing_else() -> None:
    import gsm

    assert {"analysis", "notebook", "load_model", "load_tokenizer", "taps", "tokens"} < set(dir(gsm))
    assert not {"os", "Any", "import_module"} & set(dir(gsm))
    assert "patching" in dir(gsm.analysis) and gsm.analysis.patching.__name__ == "gsm.analysis.patching"
    for name in dir(gsm):
        assert getattr(gsm, name)
    for package in (gsm, gsm.analysis):
        with pytest.raises(AttributeError, match="nothing"):
            _ = package.nothing


def test_configs_missing_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match="pip install -e"):
        paths.variants("model")


def test_an_unknown_config_group_is_named() -> None:
    with pytest.raises(ValueError, match="'model/writter'"):
        paths.variants("model/writter")


@pytest.mark.slow
def test_a_command_of_the_wheel_trains_in_an_empty_folder_with_yamls_of_the_users_own(
    wheel: Path, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (named,) = (tmp_path / "site").glob("*.dist-info/entry_points.txt")
    assert "gsm-train = gsm.scripts:train" in named.read_text()
    mine, empty = tmp_path / "mine/size", tmp_path / "empty"
    for folder in (mine, empty):
        folder.mkdir(parents=True)
    (mine / "mine.yaml").write_text("# A size of one's own.\ndefaults: [pico, _self_]\ndim: 32\n")
    words = ["size=mine", "trainer.max_steps=2", "ngrams=false", "sample=false", "trainer=cpu", "data=bytes", "seeds=1"]
    words += ["data.validation_sequences=2", "jobs=1", "size.context=32"]
    script = tmp_path / "gsm-train"
    script.write_text("from gsm.scripts import train\ntrain()\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "GSM_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(script), *words, "--config-dir", str(mine.parent)]
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(empty.glob("logs/default/*-seed0-*/checkpoints/step_*/state.json"))) == 1, (
        "as a run of an experiment"
    )
    log = next(empty.glob("logs/default/*-seed0-*/train.log")).read_text()
    (following,) = [line.partition("gsm-generate")[2].split() for line in log.splitlines() if "gsm-generate" in line]
    assert following[:2] == ["--config-dir", str(mine.parent)], "its size is composed from the same folder"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
    place = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(place)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True, cwd=place, timeout=120)
    (made,) = place.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path, tmp_path: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    named = ("__init__.py", "py.typed", "trained/nano/config.json", "experiments/page.html.jinja")
    assert {"gsm_kernels/__init__.py", *(f"gsm/{name}" for name in named)} <= set(names)
    page = {path.name for path in (ROOT / "src/gsm/explorer").iterdir() if path.suffix in (".css", ".jinja", ".js")}
    assert len(page) > 4 and {f"gsm/explorer/{name}" for name in page} <= set(names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"gsm", "gsm_kernels", "gsm_playground"}
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    build = "import gsm; print(gsm.__file__, gsm.build_model('gsm', 'pico').dim, gsm.load_model('nano').dim)"
    elsewhere = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    options = {"cwd": tmp_path, "env": elsewhere, "capture_output": True, "text": True, "timeout": 120}
    built = subprocess.run([sys.executable, "-c", build], **options, check=False)
    assert built.stdout.startswith(str(tmp_path / "site")), (
        f"the yamls and checkpoints come with it: {built.stdout}{built.stderr}"
    )


def _is_ours(spec: ModuleSpec | None) -> bool:
    return spec is not None and any(str(ROOT) in place for place in spec.submodule_search_locations or [])


def _python(code: str) -> str:
    """Run code in a process of its own, at the repository's root as a user would, and return what it printed."""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=plain, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    ("given", "found"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_threads_spin_shortly_while_they_wait_unless_the_user_wants_otherwise(given, found):
    own = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    environment = {name: value for name, value in os.environ.items() if name not in own} | given
    program = "import gsm, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [found, "False"]


def test_where_it_is_installed_commands_and_extras_are_called_by_other_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripts = ("generate.py", "evaluate.py ruler=true")
    assert [paths.called(script) for script in scripts] == ["python generate.py", "python evaluate.py ruler=true"]
    assert paths.install("hf") == "pip install -c constraints.txt -e '.[hf]'"
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert [paths.called(script) for script in scripts] == ["gsm-generate", "gsm-evaluate ruler=true"]
    assert paths.install("hf") == "pip install 'gsm-playground[hf]'"
