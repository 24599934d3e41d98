"""The notebooks as pages of the site, with their outputs: a hook of MkDocs.

Git keeps notebooks without outputs, so they are executed while the site is built. An executed notebook stays in
`build/notebooks` until it or the library changes. With NOTEBOOKS=bare they are not executed, and shown without outputs.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build/notebooks"
VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and the pictures in it. Called by MkDocs."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4) if os.environ.get("NOTEBOOKS") == "bare" else executed(path)
        for cell in notebook.cells:
            cell["outputs"] = [shown for output in cell.get("outputs", []) for shown in still(output, notebook)]
        names = {"unique_key": path.stem, "output_files_dir": path.stem}
        text, resources = MarkdownExporter().from_notebook_node(notebook, resources=names)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def executed(path: Path) -> Any:
    """The notebook with its outputs, from the cache where neither it nor the library has changed."""
    sources = [path, *sorted((ROOT / "src/gsm").rglob("*.py"))]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    file = CACHE / f"{path.stem}-{digest}.ipynb"
    if not file.is_file():
        notebook = nbformat.read(path, as_version=4)
        place = {"metadata": {"path": str(path.parent)}}
        with tempfile.TemporaryDirectory() as folder:  # short: the path of a socket has 107 characters at most
            sockets = {"transport": "ipc", "ip": f"{folder}/kernel"}  # files of this user's, no ports
            config = Config({"KernelManager": sockets})
            NotebookClient(notebook, timeout=None, resources=place, config=config).execute()
        CACHE.mkdir(parents=True, exist_ok=True)
        for outdated in CACHE.glob(f"{path.stem}-*.ipynb"):
            outdated.unlink()
        nbformat.write(notebook, file)
    return nbformat.read(file, as_version=4)


def still(output: Any, notebook: Any) -> list[Any]:
    """The output, or what a slider shows at first, as a page without a kernel cannot move it."""
    view = output.get("data", {}).get(VIEW)
    if view is None:
        return [output]
    states = notebook.metadata["widgets"][STATE]["state"]
    children = states[view["model_id"]]["state"].get("children", [])
    return [
        shown for child in children for shown in states[child.removeprefix("IPY_MODEL_")]["state"].get("outputs", [])
    ]
