"""What TensorBoard shows of runs, asked of TensorBoard's own server: one schema for all models, charts, pictures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard import default, program
from tensorboard.backend import application
from tensorboard.backend.event_processing.data_ingester import LocalDataIngester
from tensorboard.summary.writer import event_file_writer
from test_train_cli import arguments
from werkzeug.test import Client

from gsm.config.compose import compose
from gsm.evaluation.held_out import HeldOut
from gsm.experiments.fit import train
from gsm.training.callbacks.tensorboard import COLUMNS, LAYOUT, METRICS

RUNS = {
    "gsm": ["model/retriever=separate_indexer"],
    "no_stages": ["model.stages=[]"],
    "baseline": ["model=baseline"],
    "transformer": ["model=transformer"],
    "gated_delta_net": ["model=gated_delta_net"],
}
LACKS = {  # the metrics that a model has nothing to measure of, besides the accuracy, which text has not
    "gsm": set(),
    "no_stages": {"overlap/mean"},
    "baseline": {"overlap/mean"},
    "transformer": {"overlap/mean", "train/indexer_recall"},
    "gated_delta_net": {"overlap/mean", "train/indexer_recall"},
}
QUICK = ["trainer.max_steps=1", "trainer.log_every_n_steps=1", "ngrams=false", "sample=false", "model/residual=plain"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one step: of two arms of one model, and of others, of which two are among the comparators."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        # Files of events are read in the order of their names: second, process, count. A run begins a second one when
        # it is done, here within the same second; 10 would then be read before 9.
        patch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
        for arm, overrides in RUNS.items():
            train(compose([*arguments(folder), *QUICK, f"arm={arm}", *overrides]))
    return folder / "logs" / "default"


@pytest.fixture(scope="module")
def server(logs: Path) -> Client:
    """TensorBoard over these runs, without a socket: its WSGI application, the event files read once."""
    board = program.TensorBoard(default.get_plugins())
    board.configure(logdir=str(logs), load_fast="false", reload_interval=0, reload_task="blocking")
    ingester = LocalDataIngester(board.flags)
    ingester.start()
    return Client(
        application.TensorBoardWSGIApp(
            board.flags,
            board.plugin_loaders,
            ingester.data_provider,
            board.assets_zip_provider,
            ingester.deprecated_multiplexer,
        )
    )


def ask(server: Client, route: str, body: dict[str, Any] | None = None) -> Any:
    """The answer of a plugin's endpoint."""
    path = f"/data/plugin/{route}"
    answer = server.get(path) if body is None else server.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text)


def groups(server: Client) -> dict[str, dict[str, Any]]:
    """What the HPARAMS tab shows, by arm."""
    experiment = ask(server, "hparams/experiment", {"experimentName": ""})
    request = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"],
        "colParams": [{"metric": info["name"]} for info in experiment["metricInfos"]],
        "startIndex": 0,
        "sliceSize": 100,
    }
    return {group["hparams"]["arm"]: group for group in ask(server, "hparams/session_groups", request)["sessionGroups"]}


def test_all_runs_have_the_same_columns(server: Client):
    found = groups(server)
    assert set(found) == set(RUNS)
    for group in found.values():
        assert set(group["hparams"]) == {*COLUMNS, "parameters"}
        assert len(group["sessions"]) == 1
    experiment = ask(server, "hparams/experiment", {"experimentName": ""})
    assert {info["name"]["tag"] for info in experiment["metricInfos"]} == set(METRICS)
    assert found["baseline"]["hparams"]["retriever"] == "-"
    assert found["gsm"]["hparams"]["retriever"] == "separate_indexer"


def test_metrics_are_those_of_the_summaries_and_nan_where_nothing_was_measured(server: Client, logs: Path):
    for arm, group in groups(server).items():
        values = {value["name"]["tag"]: float(value.get("value", "nan")) for value in group["metricValues"]}
        summary = json.loads((logs / arm / "seed0" / "summary.json").read_text())
        assert values["val/loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
        assert values["val/bits_per_byte"] == pytest.approx(summary["bits_per_byte"], rel=1e-6)
        unmeasured = {name for name, value in values.items() if not math.isfinite(value)}
        assert unmeasured == {"val/accuracy"} | LACKS[arm]
        if arm == "gsm":
            assert values["overlap/mean"] == pytest.approx(summary["overlap"]["mean"], rel=1e-6)


def test_summaries_say_what_every_model_remembers(logs: Path):
    found = {arm: json.loads((logs / arm / "seed0" / "summary.json").read_text()) for arm in RUNS}
    for summary in found.values():
        by_kind = summary["memory_bytes"]
        assert summary["cache_bytes"] == sum(by_kind.values()) - by_kind["bookkeeping"] > 0
    for arm in ("transformer", "gated_delta_net"):
        assert found[arm]["state_bytes"] == found[arm]["cache_bytes"], "all that these remember is read by every row"
    assert found["gsm"]["state_bytes"] == found["gsm"]["memory_bytes"]["shared_state"] < found["gsm"]["cache_bytes"]
    assert found["baseline"]["state_bytes"] is None, "its decoder has no state of its own"


def test_a_comparator_is_evaluated_like_any_other_model(logs: Path):
    (result,) = HeldOut(str(logs / "gated_delta_net"), overlap=True, device="cpu").evaluate()
    summary = json.loads((logs / "gated_delta_net" / "seed0" / "summary.json").read_text())
    assert result["text"]["loss"] == pytest.approx(summary["val_loss"], rel=1e-5)
    assert result["overlap"] is None


def test_every_run_has_the_scalars_of_the_table(server: Client):
    tags = ask(server, "scalars/tags")
    assert set(tags) == {f"{arm}/seed0" for arm in RUNS}
    for run, of_run in tags.items():
        assert set(METRICS) <= set(of_run), run
        assert "hp_metric" not in of_run


def test_charts_put_the_curves_of_all_runs_together(server: Client):
    layout = ask(server, "custom_scalars/layout")
    tabs = {
        tab["title"]: {chart["title"]: chart["multiline"]["tag"] for chart in tab["chart"]}
        for tab in layout["category"]
    }
    assert tabs == LAYOUT
    for run in ask(server, "scalars/tags"):
        assert curves(server, run, tabs["loss"]["training and validation"]) == {"train/loss", "val/loss"}
        assert curves(server, run, tabs["speed"]["tokens per second"]) == {"train/tokens_per_second"}
    stages = tabs["retrieval"]["indexer recall by stage"]
    assert curves(server, "gsm/seed0", stages) == {f"train/indexer_recall/stage{s}" for s in (1, 2)}
    assert curves(server, "baseline/seed0", stages) == set()
    overlap = tabs["retrieval"]["overlap of stages with the encoder, of a few sequences"]
    assert curves(server, "gsm/seed0", overlap) == {"overlap_sample/stage1", "overlap_sample/stage2"}
    for run, drawn in (("gsm/seed0", {"state/effective_rank"}), ("baseline/seed0", set())):
        assert curves(server, run, tabs["state"]["effective rank of the state"]) == drawn


def curves(server: Client, run: str, patterns: list[str]) -> set[str]:
    """The tags that a chart draws for a run."""
    answers = [server.get("/data/plugin/custom_scalars/scalars", query_string={"run": run, "tag": p}) for p in patterns]
    return {tag for answer in answers for tag in json.loads(answer.text).get("tag_to_events", {})}


def test_pictures_are_there_where_the_model_has_what_they_show(server: Client):
    images, shapes = ask(server, "images/tags"), ask(server, "histograms/tags")
    distances = {"retrieval_distance/stage1", "retrieval_distance/stage2"}
    drawn = {run.partition("/")[0]: set(of_run) for run, of_run in images.items() if of_run}
    attention = {"decoder/attention", *(f"decoder/{layer}/attention" for layer in (5, 6, 7, 8))}
    assert drawn == {"gsm": attention, "no_stages": attention}
    assert {run.partition("/")[0]: set(of_run) for run, of_run in shapes.items() if of_run} == {"gsm": distances}
