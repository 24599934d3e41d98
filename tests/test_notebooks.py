"""Every notebook runs from its first cell to its last."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from short_runs import NO_PICTURES
from small import RATIO, W, build, random_tokens
from test_train_cli import QUICK, arguments

import gsm
from gsm.analysis import needles
from gsm.analysis.attention import attention_map, attention_of
from gsm.config.compose import compose
from gsm.errors import ConfigError
from gsm.layers.key_value import RangeAttention
from gsm.models.gsm import GSM
from gsm.notebook import (
    arms,
    ask,
    compare_states,
    finished_runs,
    load,
    picture,
    save,
    show_beside,
    show_curves,
    show_state,
    show_states,
    show_values,
    trained,
    words,
)
from gsm.paths import ROOT, TRAINED, variants
from gsm.training.run import train

WIDGETS = "application/vnd.jupyter.widget-state+json"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BRIEF = ("trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1")
BRIEF += ("data.validation_sequences=4", NO_PICTURES)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A kernel that has its imports done after the first notebook, and its cache, which is empty."""
    for needed in ("ipykernel", "matplotlib", "nbclient"):
        pytest.importorskip(needed)
    from nbclient.util import run_sync

    manager, cache = pytest.importorskip("jupyter_client").AsyncKernelManager(), tmp_path_factory.mktemp("cache")
    # More threads than cores would wait for one another.
    run_sync(manager.start_kernel)(env={**os.environ, "GSM_CACHE": str(cache), "OMP_NUM_THREADS": "1"})
    yield manager, cache
    run_sync(manager.shutdown_kernel)(now=True)


def read(path: Path) -> Any:
    """A notebook that begins without names, in its own folder."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n__import__('os').chdir({str(path.parent)!r})"))
    return notebook


def with_own(path: Path, folder: Path) -> Any:
    """A notebook whose commented line, for a model or an experiment of the reader's, is in force and opens a folder."""
    notebook, found = read(path), 0
    for cell in notebook.cells:
        line = r'^# (.* = (?:notebook\.(?:load|arms)|gsm\.load_model)\()".*"\)$'
        cell.source, here = re.subn(line, lambda match: f"{match[1]}{str(folder)!r})", cell.source, flags=re.MULTILINE)
        found += here
    assert found == 1
    return notebook


def slide(client: Any, widget: str, index: int) -> list[str]:
    """Move a slider as a browser does; the kinds of what the kernel shows for it."""
    from nbclient.util import run_sync

    data = {"method": "update", "state": {"index": index}, "buffer_paths": []}
    message = client.session.msg("comm_msg", {"comm_id": widget, "data": data})
    client.shell_channel.send(message)
    kinds: list[str] = []
    while True:
        answer = run_sync(client.get_iopub_msg)(timeout=60)
        if answer["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            if answer["content"].get("execution_state") == "idle":
                return kinds
            kinds += ["error"] if answer["msg_type"] == "error" else list(answer["content"].get("data", {}))


@pytest.mark.slow
def test_a_slider_shows_an_error_of_its_picture(kernel: tuple[Any, Path]):
    from nbclient import NotebookClient

    cells = [
        "from gsm import notebook, plots\ntitles = ['first']",
        "draw = lambda number: notebook.show_one(lambda axes: axes.set_title(titles[number]))",
        "notebook.explore(draw, range(2))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, km=kernel[0], timeout=None)
    client.execute()
    models = notebook.metadata["widgets"][WIDGETS]["state"]
    slider = next(name for name, model in models.items() if model["model_name"] == "SelectionSliderModel")
    assert "error" in slide(client.kc, slider, 1)
    assert "image/png" in slide(client.kc, slider, 0)
    client.kc.stop_channels()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a busy machine is no mistake of a notebook's
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path: Path, kernel: tuple[Any, Path]):
    """Every cell that shows something leaves a picture, and nothing that it looks at has to be trained first."""
    from nbclient import NotebookClient

    manager, cache = kernel
    notebook = read(path)
    client = NotebookClient(notebook, km=manager, timeout=None)
    client.execute()
    models = notebook.metadata.get("widgets", {}).get(WIDGETS, {}).get("state", {})
    for name, model in models.items():
        if model["model_name"] == "SelectionSliderModel":
            moved = slide(client.kc, name, len(model["state"]["_options_labels"]) - 1)
            assert "image/png" in moved and "error" not in moved, f"the slider shows {moved} when it is moved later"
    client.kc.stop_channels()
    assert not (cache / "notebook").exists()
    for cell in notebook.cells:
        if "show_" in cell.source and cell.cell_type == "code":
            shown = {kind for output in cell.outputs for kind in output.get("data", {})}
            chosen = "application/vnd.jupyter.widget-view+json" in shown  # the picture lies in what a slider has drawn
            assert "image/png" in (json.dumps(notebook.metadata.get("widgets", {})) if chosen else shown), cell.source


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param("02_what_a_state_holds", "words[questions.key_N[0]]", marks=pytest.mark.nightly),
        ("03_retrieval", "words[questions.key_N[0]]"),
        ("04_needle_maps", "list(models)[-1]"),
        pytest.param("08_patching", "list(models)[-1]", marks=pytest.mark.nightly),
        pytest.param("10_inside_an_experiment", "words[last]", marks=pytest.mark.nightly),
    ],
)
def test_a_notebook_takes_a_model_of_another_task(name: str, shown: str, kernel: tuple[Any, Path], tmp_path: Path):
    from nbclient import NotebookClient

    config = compose(["data=recall", "size=pico", "trainer=cpu", f"logs={tmp_path}", *BRIEF])
    train(config)
    run, path = Path(config["folder"]), ROOT / f"notebooks/{name}.ipynb"
    notebook = with_own(path, run.parent if "notebook.arms" in path.read_text() else run)
    notebook.cells.append(nbformat.v4.new_code_cell(f"print(type(data.task).__name__, {shown})"))
    client = NotebookClient(notebook, km=kernel[0], timeout=None)
    client.execute()
    client.kc.stop_channels()
    assert re.fullmatch(rf"MultiQueryRecall (K\d+\?|yours|{config['arm']})\n", notebook.cells[-1].outputs[0].text)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_entries_of_one_position_have_one_token_and_one_rank(kernel: tuple[Any, Path], tmp_path: Path):
    from nbclient import NotebookClient

    config = compose(["data=recall", "size=pico", "model/writer=multi_slot", "trainer=cpu", f"logs={tmp_path}", *BRIEF])
    train(config)
    notebook = with_own(ROOT / "notebooks/02_what_a_state_holds.ipynb", Path(config["folder"]))
    drawn = "notebook.show_beside(draws, height=2.4, grid=False).axes[0].images[0].get_array().shape"
    notebook.cells.append(nbformat.v4.new_code_cell(f"print(len(words), len(ranks), len(asked), *{drawn})"))
    client = NotebookClient(notebook, km=kernel[0], timeout=None)
    client.execute()
    client.kc.stop_channels()
    tokens, ranks, asked, *drawn = map(int, notebook.cells[-1].outputs[0].text.split())
    assert ranks == tokens and drawn == [2 * asked, 2 * tokens]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lens_takes_a_model_that_is_no_gsm(kernel: tuple[Any, Path], tmp_path: Path):
    from nbclient import NotebookClient

    config = compose([*arguments(tmp_path), *QUICK, "model/residual=plain", "model=baseline"])
    train(config)
    notebook = with_own(ROOT / "notebooks/09_lens_and_attribution.ipynb", Path(config["folder"]))
    notebook.cells.append(nbformat.v4.new_code_cell("print(type(model).__name__, *lenses, found.by_entry_LE)"))
    client = NotebookClient(notebook, km=kernel[0], timeout=None)
    client.execute()
    client.kc.stop_channels()
    assert notebook.cells[-1].outputs[0].text == "Baseline whole None\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_arms_that_were_trained_on_text_are_compared_on_text(kernel: tuple[Any, Path], tmp_path: Path):
    """Every next token is a question, and the last picture has tokens on the axis of each arm with a state."""
    from nbclient import NotebookClient

    makes = {"shared": [], "separate": ["model/retriever=separate_indexer"], "baseline": ["model=baseline"]}
    for arm, overrides in makes.items():
        train(compose([*arguments(tmp_path), *QUICK, "model/residual=plain", f"arm={arm}", *overrides]))
    model, data = arms(tmp_path / "logs/default")["shared"]
    asked = ask(data, 2)
    asked_BT = asked.target_BT[:, :-1] >= 0
    assert asked_BT.any() and torch.equal(asked.target_BT[:, :-1][asked_BT], asked.token_BT[:, 1:][asked_BT])
    assert words(data, asked.token_BT[0]) == words(model, asked.token_BT[0])
    notebook = with_own(ROOT / "notebooks/10_inside_an_experiment.ipynb", tmp_path / "logs/default")
    shown = "{axes.get_title(): [tick.get_text() for tick in axes.get_xticklabels()] for axes in figure.axes}"
    again = "figure = notebook.show_beside(draws, grid=False)"
    facts = f"print(__import__('json').dumps([list(models), words, {shown}]))"
    notebook.cells.append(nbformat.v4.new_code_cell(f"{again}\n{facts}"))
    client = NotebookClient(notebook, km=kernel[0], timeout=None)
    client.execute()
    client.kc.stop_channels()
    read_by, written, ticks = json.loads(notebook.cells[-1].outputs[0].text)
    assert set(read_by) == set(makes) and {"t", "e", "·"} <= set(written)
    for arm in ("shared", "separate", "untrained"):
        assert len(ticks[arm]) > 1 and set(ticks[arm]) <= {*written, "sink"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_in_the_cache_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An arm that goes on from another one trains that first; each says so before it begins."""
    monkeypatch.setenv("GSM_CACHE", str(tmp_path))
    trained("handed_on", *BRIEF, "++runs.wait.trainer.max_steps=4")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Training")]
    assert said == [f"Training handed_on-seed0-{run} for 4 steps, once:" for run in ("start", "wait")]
    monkeypatch.setattr("gsm.notebook.train", lambda config: pytest.fail("trained once more"))
    model, data = trained("gsm", *BRIEF)
    assert not model.training and data.task.pairs == 10
    assert {run.arm for run in finished_runs(tmp_path / "notebook")} == {"gsm", "handed_on"}
    assert load(tmp_path / "notebook/handed_on-seed0-wait")[1].context == data.context


def test_names_that_do_not_exist(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^arm .* gsm, delta_net, .* got 'gsmm'$"):
        trained("gsmm")
    with pytest.raises(FileNotFoundError, match="^folder .*nothing$"):
        finished_runs(tmp_path / "nothing")
    runs = finished_runs(TRAINED / "needle")
    with pytest.raises(ConfigError, match="metric 'val/acuracy'.*val/accuracy"):
        show_curves(runs, "val/acuracy")
    with pytest.raises(ConfigError, match="column 'acuracy'.*accuracy"):
        show_values(runs, ["val_loss", "acuracy"])


def test_the_arms_of_an_experiment_are_loaded_in_its_order_with_the_seed_asked_for(tmp_path: Path):
    (tmp_path / "experiment.json").write_text(json.dumps({"arms": {"second": [], "first": [], "failed": []}}))
    runs = [("first", 0, "delta_net"), ("first", 1, "gsm"), ("second", 1, "delta_net"), ("failed", 0, "gsm")]
    for arm, seed, model in runs:
        folder = shutil.copytree(TRAINED / f"needle_{model}", tmp_path / f"{arm}-seed{seed}")
        facts = {"arm": arm, "seed": seed, "status": "failed" if arm == "failed" else "finished"}
        (folder / "summary.json").write_text(json.dumps(facts))
    first, second = arms(tmp_path), arms(tmp_path, seed=1)
    assert list(first) == list(second) == ["second", "first"], "the failed one has no model"
    assert [isinstance(model, GSM) for model, _ in first.values()] == [False, False], "each with its lowest seed"
    assert [isinstance(model, GSM) for model, _ in second.values()] == [False, True]
    model, data = second["first"]
    assert torch.equal(model.embedding.weight, trained("gsm")[0].embedding.weight) and data.task.pairs == 10
    assert list(arms(tmp_path, seed=0)) == ["first"]
    with pytest.raises(FileNotFoundError, match="^seed .* got 7$"):
        arms(tmp_path, seed=7)


def test_the_questions_of_a_run_are_those_of_its_task():
    _, data = trained("gsm")
    asked, questions = ask(data, 3), needles.ask(data.task, data.context, 3)
    assert torch.equal(asked.token_BT, questions.token_BT) and torch.equal(asked.target_BT, questions.target_BT)
    assert words(data, asked.token_BT[0]) == words(data.task, asked.token_BT[0])


def test_states_are_compared_by_length_rank_and_shares():
    one_entry, token_BT = build("gsm-writer=additive", state_size=1), random_tokens(2, 20)
    models = {
        "one entry": one_entry,
        "encoder only": build("gsm-writer=encoder_only"),
        "none": build("gsm-stages=none"),
    }
    found = compare_states(models, token_BT)
    with torch.no_grad(), gsm.record() as seen:
        one_entry(token_BT)
    assert found["one entry"]["state/norm"] == pytest.approx(float(seen["state/z"].norm(dim=-1).mean()))
    assert found["one entry"]["state/effective_rank"] == pytest.approx(1)
    assert found["none"]["state/effective_rank"] > 1.5
    ways = [seen[name].norm(dim=-1) for name in ("state/e", "stage/1/increment", "stage/2/increment")]
    for name, way_BT in zip(("encoder", "stage1", "stage2"), ways, strict=True):
        share = float((way_BT / sum(ways)).mean())
        assert found["one entry"][f"state/share/{name}"] == pytest.approx(share), "additive: z is their sum"
        assert found["encoder only"][f"state/share/{name}"] == (name == "encoder")
    assert str(found).splitlines()[-1].split()[3:] == ["-", "-", "-"], "a model without stages has no shares"
    with gsm.patch("stage/1/increment", torch.zeros_like, one_entry):
        assert compare_states({"": one_entry}, token_BT)[""]["state/share/stage1"] == 0


def test_the_picture_of_states_has_their_numbers():
    pytest.importorskip("matplotlib")
    found = compare_states({"a": build("gsm-writer=additive"), "b": build("gsm-stages=none")}, random_tokens(2, 20))
    length, rank, shares = show_states(found).axes
    for axes, name in ((length, "state/norm"), (rank, "state/effective_rank")):
        assert {line.get_xdata()[0] for line in axes.lines} == {facts[name] for facts in found.values()}
    widths = [[bar.get_width() for bar in way] for way in shares.containers]
    ways = ("encoder", "stage1", "stage2")
    assert widths == [pytest.approx([found["a"][f"state/share/{way}"], 0]) for way in ways]
    assert [text.get_text() for text in shares.get_legend().get_texts()] == list(ways)


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_pictures_stand_three_in_a_row_at_most(count: int):
    pytest.importorskip("matplotlib")
    figure = show_beside([lambda axes, name=name: axes.set_title(str(name)) for name in range(count)])
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [str(name) for name in range(count)]
    columns, rows = min(3, count), -(-count // 3)
    assert {axes.get_subplotspec().get_gridspec().get_geometry() for axes in shown} == {(rows, columns)}
    assert figure.get_figheight() == pytest.approx(3 * rows) and figure.get_figwidth() == pytest.approx(7.3)


def test_a_figure_is_saved_for_print(tmp_path: Path):
    pytest.importorskip("matplotlib")
    model = build("gsm-retriever=shared_topk")
    with gsm.record() as seen:
        model(random_tokens(1, 20))
    files = save(show_state(model, seen), str(tmp_path / "figures/state"))
    assert [file.name for file in files] == ["state.pdf", "state.svg", "state.png"]
    pdf, svg, png = (file.read_bytes() for file in files)
    assert pdf.startswith(b"%PDF") and b"/Type3" not in pdf, "letters that a journal's checks refuse"
    assert b"decoder layer</text>" in svg
    assert int.from_bytes(png[16:20]) == round(7.3 * 300)


def test_without_a_picture_its_command_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("IPython")
    (tmp_path / "one.png").write_bytes(b"one")
    assert picture(tmp_path / "one.png", "python").data == b"one"
    assert picture(tmp_path / "two.png", "python benchmark.py") is None
    assert capsys.readouterr().out == f"no {tmp_path}/two.png: python benchmark.py\n"


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


def test_the_map_of_a_layer_with_a_window_of_its_own_has_it_beside_the_state():
    model = build("gsm-state_reader=state_and_window", state_size=2)
    own = model.get_submodule("decoder.blocks.0.attention").own_size
    assert own > 2
    with gsm.record() as seen:
        model(random_tokens(1, 20))
    map_RT, weight_RE = attention_map(model, seen, "decoder/5"), seen["decoder/5/weights"][0].mean(1)
    assert torch.allclose(map_RT[19, 18], weight_RE[19, 0] + weight_RE[19, 2 + own - 2])
    assert torch.allclose(map_RT[19, 20 - own], weight_RE[19, 2])
    assert torch.allclose(map_RT.sum(1) + weight_RE[:, -1], torch.ones_like(weight_RE[:, -1]))


@pytest.mark.parametrize("model_name", variants("model"))
def test_every_recorded_attention_has_a_causal_map_that_sums_to_one_with_its_sink(model_name: str):
    model = build(model_name)
    with gsm.record() as seen:
        model(random_tokens(1, 20))
    for tap in [tap for tap in seen if tap.endswith("/weights")]:
        name, weight_RHE = tap.removesuffix("/weights"), seen[tap][0]
        map_RT = attention_map(model, seen, name)
        assert map_RT.shape == (20, 20) and not map_RT.triu(1).any(), name
        no_sink = isinstance(attention_of(model, name), RangeAttention)
        whole_R = weight_RHE.sum(-1).mean(1) if no_sink else 1 - weight_RHE[..., -1].mean(1)
        assert torch.allclose(map_RT.sum(1), whole_R), name
        heads_HRT = torch.stack([attention_map(model, seen, name, head=head) for head in range(weight_RHE.shape[1])])
        assert torch.allclose(heads_HRT.mean(0), map_RT), name


def test_a_map_names_the_attentions_or_heads_that_there_are():
    model = build("gated_delta_net")
    with gsm.record() as seen:
        model(random_tokens(1, 20))
    with pytest.raises(KeyError, match="decoder/1/weights"):
        attention_map(model, seen, "decoder/1")
    model = build("transformer")
    with gsm.record() as seen:
        model(random_tokens(1, 20))
    with pytest.raises(ValueError, match=r"head .* \[0, 3\], got 9"):
        attention_map(model, seen, "decoder/1", head=9)


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
