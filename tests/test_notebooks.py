"""Every notebook runs from its first cell to its last, and is kept without output."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
import torch
from small import GEOMETRY, RATIO, W, build, random_tokens

import gsm
from gsm.eval.attention import attention_map
from gsm.notebook import describe, finished_runs, load, trained
from gsm.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICK = ("01_one_forward_pass",)  # the others train models, here of a few steps, or compute for a while
BRIEF = ("trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1")
BRIEF += ("data.validation_sequences=4",)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which both models of the notebooks lie, though they have learned nothing yet."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GSM_CACHE", str(folder))
        for arm in ("gsm", "delta_net"):
            trained(arm, *BRIEF)
    return folder


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_output(path: Path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
            assert len(cell.source.splitlines()) <= 12, "what is longer belongs into gsm.notebook"


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem in QUICK], ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path: Path):
    run(path)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem not in QUICK], ids=lambda path: path.stem)
def test_a_notebook_about_trained_models_runs_and_draws(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GSM_CACHE", str(cache))
    run(path)


def run(path: Path) -> None:
    """Executes a notebook in a kernel of its own; every cell that shows something has to leave a picture."""
    for needed in ("ipykernel", "matplotlib"):
        pytest.importorskip(needed)
    client = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    client.NotebookClient(notebook, timeout=170, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        if "show_" in cell.source and cell.cell_type == "code":
            assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.source


@pytest.mark.slow
def test_a_model_in_the_cache_is_not_trained_again(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GSM_CACHE", str(cache))
    monkeypatch.setattr("gsm.notebook.train", lambda config: pytest.fail("trained once more"))
    model, data = trained("gsm")
    assert not model.training and data.task.pairs == 10
    assert {run.arm for run in finished_runs(cache / "notebook")} == {"gsm", "delta_net"}
    assert load(cache / "notebook/gsm/seed0")[1].context == data.context


@pytest.mark.parametrize("writer", ["additive", "multi_slot"])
def test_the_map_of_a_decoder_layer_is_a_band_of_the_positions_in_the_state(writer: str):
    """With several entries a position, every entry was drawn as a position of its own."""
    model = build(f"gsm-writer={writer}")
    positions = model.writer.positions
    assert (positions < model.state_size) == (writer == "multi_slot")
    with gsm.record() as seen:
        model(random_tokens(1, 20))
    map_RT = attention_map(model, seen, "decoder/5")
    for row in range(20):
        assert (map_RT[row] > 0).nonzero().flatten().tolist() == list(range(max(0, row - positions + 1), row + 1))
    sink_R = seen["decoder/5/weights"][0, :, :, -1].mean(1)
    assert torch.allclose(map_RT.sum(1) + sink_R, torch.ones_like(sink_R))


@pytest.mark.parametrize("name", ["encoder/2", "encoder/4", "stage/1"])
def test_the_map_of_a_layer_with_a_bank_shows_the_window_and_the_tokens_that_were_selected(name: str):
    model = build("gsm-retriever=shared_topk")
    with gsm.record() as seen:
        model(random_tokens(1, 20), rows=3)
    map_RT = attention_map(model, seen, name)
    rows = map_RT.shape[0]
    for row, chosen in enumerate(seen[f"{name}/top_k"][0].tolist()):
        position = 20 - rows + row
        window = range(max(0, position - W + 1), position + 1)
        selected = {slot * RATIO + offset for slot in chosen if slot >= 0 for offset in range(RATIO)}
        assert set((map_RT[row] > 0).nonzero().flatten().tolist()) == selected | set(window)
    sink_R = seen[f"{name}/weights"][0, :, :, -1].mean(1)
    assert torch.allclose(map_RT.sum(1) + sink_R, torch.ones_like(sink_R))


def test_the_description_names_every_tap_with_its_shape():
    model = build("gsm-retriever=shared_topk")
    with gsm.record("state/*") as seen:
        model(random_tokens(1, 5))
    lines = [line.split(maxsplit=1) for line in describe(seen).splitlines()]
    assert [line[0] for line in lines] == ["state/entries", "state/e", "state/z"]
    assert lines[1][1].split("  ")[0] == f"[1, 5, {GEOMETRY.dim}]"
