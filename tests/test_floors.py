"""The floors of the house: a package imports those above it in the list of CONTRIBUTING.md, none beside or below it.

Read from the source with `ast`, so that an import inside a function counts like any other.
"""

from __future__ import annotations

import ast
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from gsm.paths import ROOT

SECTION = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Imports\n")[2].partition("\n## ")[0]
# The number of a package or module in that list: a higher number stands further down, and may import more.
FLOORS = {
    name: int(number)
    for number, line in re.findall(r"^(\d+)\. (.*(?:\n    .*)*)", SECTION, re.MULTILINE)
    for name in re.findall(r"`([\w.]+)`", line)
}
# The floor from which a library may be imported. Up to the models, PyTorch is the only one.
LIBRARIES = {"torch": 0, "hydra": FLOORS["config"], "omegaconf": FLOORS["config"], "gsm_benchmarks": 99}
ELSEWHERE = FLOORS["models"] + 1
KERNEL_LIBRARIES = {"torch", "triton", "xformers", "fla"}
COMPILED_LIBRARIES = {"numba", "llvmlite", "numpy"}  # of compiled loops, which are imported when they run
COMPILED = "gsm_kernels.cpu."


def test_no_import_goes_up_a_floor() -> None:
    arrows = upward_arrows(ROOT / "src", ROOT / "kernels")
    assert not arrows, "imports that go up:\n" + "\n".join(arrows)


def test_every_module_of_the_house_has_a_floor() -> None:
    modules = {path.stem for path in (ROOT / "src/gsm").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert modules - {"__init__"} <= set(FLOORS), "give these a place in the list of CONTRIBUTING.md"


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("gsm/layers/block.py", "from gsm.models.gsm import GSM"),
        ("gsm/layers/block.py", "from ..models.gsm import GSM"),
        ("gsm/layers/block.py", "from gsm import models"),
        ("gsm/layers/block.py", "import gsm"),
        ("gsm/models/gsm.py", "def late():\n    import hydra.utils"),
        ("gsm/models/gsm.py", "from lightning import LightningModule"),
        ("gsm/training/module.py", "from omegaconf import DictConfig"),
        ("gsm/training/means.py", "from gsm.evaluation import held_out"),
        ("gsm/config/load.py", "from gsm.training import folder"),
        ("gsm/training/run.py", "def late():\n    from gsm.experiments import entries"),
        ("gsm/evaluation/held_out.py", "def late():\n    from gsm.experiments import table"),
        ("gsm/analysis/probes.py", "from gsm.evaluation import measure"),
        ("gsm/data/text.py", "from gsm.costs import model"),
        ("gsm/slots/writer/gated.py", "from gsm.slots.retriever.base import Retriever"),
        ("gsm/layers/linear.py", "import triton"),
        ("gsm_kernels/attend/reference.py", "from gsm.span import Span"),
        ("gsm_kernels/dispatch.py", "import numpy"),
        ("gsm_kernels/attend/triton.py", "import numba"),
        ("gsm_kernels/dispatch.py", "from gsm_benchmarks import timing"),
        ("gsm/notebook.py", "def late():\n    from gsm_benchmarks import inference"),
    ],
)
def test_a_planted_upward_import_is_found(tmp_path: Path, place: str, line: str) -> None:
    _plant(tmp_path, place, line)
    assert len(upward_arrows(tmp_path)) == 1, f"{line!r} in {place} went unseen"


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("gsm/models/gsm.py", "import math\nfrom gsm.layers import block\nfrom gsm_kernels import attend"),
        ("gsm/layers/linear.py", "from .base import Mixer"),
        ("gsm/data/text.py", "import numpy as np\nfrom tokenizers import Tokenizer"),
        ("gsm/training/callbacks/summary.py", "from gsm import __version__"),
        ("gsm/experiments/runs.py", "import hydra\nfrom gsm.training.module import LanguageModeling"),
    ],
)
def test_an_import_that_goes_down_is_let_through(tmp_path: Path, place: str, line: str) -> None:
    _plant(tmp_path, place, line)
    assert upward_arrows(tmp_path) == []


@pytest.mark.parametrize("source", ["kernels", "src", "benchmarks"])
def test_no_module_imports_itself_by_way_of_others(source: str) -> None:
    """For types alone or inside a function counts too: modules that need each other can only be read together."""
    circle = import_circle(ROOT / source)
    assert not circle, "imports go round in a circle: " + " -> ".join(circle)


@pytest.mark.parametrize("line", ["from .. import score", "def late():\n    from ..score.triton import tile"])
def test_a_planted_circle_is_found(tmp_path: Path, line: str) -> None:
    _plant(tmp_path, "ops/top/triton.py", line)
    _plant(tmp_path, "ops/score/triton.py", "from ..top.triton import rows\ntile = rows")
    (tmp_path / "ops/score/__init__.py").write_text("from . import triton\n", encoding="utf-8")
    assert {"ops.top.triton", "ops.score.triton"} <= set(import_circle(tmp_path))
    (tmp_path / "ops/top/triton.py").write_text("rows = 1\n", encoding="utf-8")
    assert import_circle(tmp_path) == []


def upward_arrows(*sources: Path) -> list[str]:
    """List the imports below these source roots that the floors forbid, as `file:line module imports target`."""
    return [
        f"{path}:{line} {importer} imports {target}"
        for source in sources
        for path in sorted(source.rglob("*.py"))
        for importer in [_dotted(path, source)]
        for line, target in _imports(path, source)
        if not _may_import(importer, target)
    ]


def _may_import(importer: str, target: str) -> bool:
    library = target.partition(".")[0]
    if library in sys.stdlib_module_names:
        return True
    if library not in ("gsm", "gsm_kernels"):
        return _library_allowed(importer, library)
    if _slot(importer) and _slot(target):
        return _slot(importer) == _slot(target)
    own, other = FLOORS[_part(importer)], FLOORS[_part(target)]
    return own > other or own == other and _part(importer).partition(".")[0] == _part(target).partition(".")[0]


def _library_allowed(importer: str, library: str) -> bool:
    if _part(importer) == "gsm_kernels":
        loops = importer.startswith(COMPILED)
        return library in KERNEL_LIBRARIES or loops and library in COMPILED_LIBRARIES
    return FLOORS[_part(importer)] >= LIBRARIES.get(library, ELSEWHERE)


def _part(dotted: str) -> str:
    """The part of the house a dotted name belongs to: `gsm.layers.block` -> `layers`, `gsm.record` -> `gsm`."""
    package, *rest = dotted.split(".")
    longest = [".".join(rest[:length]) for length in range(len(rest), 0, -1)]
    return next((name for name in longest if package == "gsm" and name in FLOORS), package)


def _slot(dotted: str) -> str | None:
    """The slot that a name belongs to: `gsm.slots.writer.gated` -> `writer`. One does not import another, so that each
    can be read and replaced alone."""
    return dotted.split(".")[2] if dotted.startswith("gsm.slots.") else None


def _imports(path: Path, source: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, target) for target in _from_targets(node, path.relative_to(source).parts)]
    return found


def _from_targets(node: ast.ImportFrom, parts: tuple[str, ...]) -> list[str]:
    """`from gsm import layers` names a part of the house, `from gsm.layers import block` is in one already, but for a
    module that has a floor of its own."""
    base = _base(node, parts)
    targets = [f"{base}.{alias.name}" for alias in node.names]
    if base == "gsm":
        return targets
    return [target if target.removeprefix("gsm.") in FLOORS else base for target in targets]


def _base(node: ast.ImportFrom, parts: tuple[str, ...]) -> str:
    """The module that names are imported from, in full: `from ..rows import slices` -> `gsm_kernels.rows`."""
    return ".".join([*(parts[: -node.level] if node.level else ()), *([node.module] if node.module else ())])


def import_circle(source: Path) -> list[str]:
    """One circle of imports among the modules below this source root, from a module back to itself; [] if none."""
    paths = {_dotted(path, source): path for path in source.rglob("*.py")}
    graph = {name: _modules_imported(path, source, set(paths)) - {name} for name, path in paths.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def _dotted(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def _modules_imported(path: Path, source: Path, known: set[str]) -> set[str]:
    """The known modules that one imports: `from .attend import reference` names `attend.reference`, not `attend`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, path.relative_to(source).parts)
            found |= {name if (name := f"{base}.{alias.name}") in known else base for alias in node.names}
    return found & known


def _plant(root: Path, place: str, line: str) -> None:
    path = root / place
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n", encoding="utf-8")
