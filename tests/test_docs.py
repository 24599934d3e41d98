"""The documentation names what there is, and leads nowhere that there is nothing. Only the last test needs MkDocs."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from gsm.config.options import HIDDEN
from gsm.layers.operations import OPS
from gsm.paths import ROOT, variants

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
READ = ["README.md", "CONTRIBUTING.md", *(f"docs/{page}" for page in PAGES)]
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HOME = {  # slot: its page
    "model": "mixers",
    "model/decoder_start": "decoder",
    "model/encoder_layer": "encoder",
    "model/encoder_reading": "encoder",
    "model/feed_forward": "experts",
    "model/indexer_training": "retrievers",
    "model/mixer": "mixers",
    "model/residual": "residual",
    "model/retriever": "retrievers",
    "model/stage_input": "aggregation",
    "model/stage_query": "aggregation",
    "model/state_reader": "decoder",
    "model/writer": "writers",
    "benchmark": "benchmarks",
    "data": "data",
    "experiment": "experiments",
    "optimizer": "training",
    "size": "start",
    "trainer": "training",
}


def anchors(page: Path) -> set[str]:
    """What its headings are called, as Python-Markdown and forges do."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain}


@pytest.mark.parametrize("name", READ)
def test_links_and_pictures_are_there(name: str):
    page = ROOT / name
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name} leads to {link}, and there is no {target}"
        assert not anchor or anchor in anchors(target), f"{name} leads to {link}, and {target.name} has no such heading"
        inside = target.is_relative_to(DOCS) or not page.is_relative_to(DOCS)
        assert inside, f"{name} leads to {link}, which is no part of the site: name it as code"


def test_the_python_of_the_readme_runs_and_its_patch_changes_the_logits(capsys: pytest.CaptureFixture[str]):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert float(re.search(r"[\d.]+", capsys.readouterr().out)[0]) > 0.1
    assert names["seen"]["stage/1/increment"].shape == (1, 200, names["model"].dim)


@pytest.mark.slow
def test_the_python_of_look_inside_prints_what_its_page_shows(capsys: pytest.CaptureFixture[str]):
    page, names = (DOCS / "tutorial_inside.md").read_text(), dict[str, Any]()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    assert capsys.readouterr().out == "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL))


@pytest.mark.parametrize("slot", sorted(HOME))
def test_every_yaml_of_a_slot_is_on_its_page(slot: str):
    text = (DOCS / f"{HOME[slot]}.md").read_text()
    missing = [name for name in variants(slot) if not name.startswith(HIDDEN) and f"`{name}`" not in text]
    assert not missing, f"docs/{HOME[slot]}.md does not say what {slot} {missing} is"


def test_every_slot_of_a_model_has_its_page():
    assert {f"model/{folder.name}" for folder in (ROOT / "configs/model").iterdir() if folder.is_dir()} < set(HOME)


def test_every_operation_is_on_the_page_of_kernels():
    text = (DOCS / "kernels.md").read_text()
    assert [op.name for op in OPS if f"`{op.name}`" not in text] == []


def test_every_module_is_in_the_reference():
    """A page of a package takes its modules along; those at the top are named one by one."""
    packages = {f"gsm.{path.parent.name}" for path in (ROOT / "src/gsm").glob("*/__init__.py")} | {"gsm", "gsm_kernels"}
    assert {Path(page).stem for page in PAGES if page.startswith("reference/")} == packages
    told = re.findall(r"^::: (\S+)", (DOCS / "reference/gsm.md").read_text(), re.MULTILINE)
    modules = [f"gsm.{path.stem}" for path in (ROOT / "src/gsm").glob("*.py") if path.stem != "__init__"]
    assert sorted(told) == sorted(["gsm", *modules])
    for package in packages - {"gsm"}:
        assert f"\n::: {package}\n" in (DOCS / f"reference/{package}.md").read_text()


@pytest.mark.parametrize("root", ["src/gsm", "kernels/gsm_kernels"])
def test_an_argument_that_a_docstring_names_is_one(root: str):
    """mkdocstrings would ask that, too, but does not know several arguments with one description."""
    for path in sorted((ROOT / root).rglob("*.py")):
        for name, docstring, arguments in documented(ast.parse(path.read_text())):
            taken = {one.arg for one in ast.walk(arguments) if isinstance(one, ast.arg)}
            unknown = described(docstring) - taken
            assert not unknown, f"{path.relative_to(ROOT)}: {name} takes no {sorted(unknown)}"


def documented(tree: ast.Module) -> Iterator[tuple[str, str, ast.arguments]]:
    """Name, docstring and signature of every function, and of every class that has a constructor."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name, ast.get_docstring(node) or "", node.args
        elif isinstance(node, ast.ClassDef):
            made = (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
            yield from ((node.name, ast.get_docstring(node) or "", one.args) for one in made)


def described(docstring: str) -> set[str]:
    """The names in its list of arguments."""
    listed = re.search(r"^Args:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    names = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", listed[1] if listed else "", re.MULTILINE)
    return {name.lstrip("*") for together in names for name in together.split(", ")}


def load(name: str, *needed: str) -> Any:
    """A module in docs/, which lies on no import path here."""
    for library in needed:
        pytest.importorskip(library)
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_equation_becomes_mathml():
    pages = load("pages", "latex2mathml", "markdown")
    made = pages.EQUATION.sub(pages.equation, r'<span class="arithmatex">\(z = e + r_{s}\)</span>')
    assert made.startswith("<math") and "arithmatex" not in made and "<msub>" in made


def test_markdown_in_a_fold_is_rendered():
    pages, markdown = load("pages", "latex2mathml", "markdown"), pytest.importorskip("markdown")
    page = "<details><summary>More</summary>\n\n* one\n\n</details>\n"
    made = markdown.markdown(page, extensions=["md_in_html", pages.Pages()])
    assert "<li>one</li>" in made and "<summary>More</summary>" in made


def test_a_site_has_an_executed_notebook_where_mkdocs_runs_in_another_folder(tmp_path: Path):
    """The paths of the kernel's sockets were relative: each process looked for them in its own folder."""
    for needed in ("mkdocs", "nbclient", "nbconvert", "ipykernel"):
        pytest.importorskip(needed)
    clone, site = tmp_path / "a clone", tmp_path / "site"
    for name, text in {
        "mkdocs.yml": "site_name: x\nuse_directory_urls: false\nhooks: [docs/notebooks.py]\n",
        "docs/index.md": "# x\n",
        "docs/notebooks.py": (DOCS / "notebooks.py").read_text(),
    }.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    path = clone / "notebooks/where.ipynb"
    path.parent.mkdir()
    cells = [nbformat.v4.new_code_cell("import os; print('cell ran in', os.getcwd())")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    environment = {name: value for name, value in os.environ.items() if name != "NOTEBOOKS"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-f", str(clone / "mkdocs.yml"), "-d", str(site)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"cell ran in {path.parent.resolve()}" in (site / "notebooks/where.html").read_text()
    assert list(path.parent.iterdir()) == [path], "a socket was left"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path):
    for needed in ("mkdocs", "material", "mkdocstrings", "latex2mathml", "nbconvert"):
        pytest.importorskip(needed)
    path = os.pathsep.join([str(DOCS), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1", "NOTEBOOKS": "bare"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.rglob("*.html"))) > len(PAGES), "every page, and one for what is not found"
    assert "<math" in (tmp_path / "writers.html").read_text()
    assert "StateWriter" in (tmp_path / "reference/gsm.slots.html").read_text()
    assert "show_attention" in (tmp_path / "notebooks/01_one_forward_pass.html").read_text()
