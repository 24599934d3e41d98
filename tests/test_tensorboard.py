"""What TensorBoard's own server shows of runs: nothing that was not measured, charts, pictures."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from short_runs import folder_of
from stored import store
from tensorboard import default, program
from tensorboard.backend import application
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.data_ingester import LocalDataIngester
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import event_file_writer
from test_train_cli import arguments
from werkzeug.test import Client

from gsm.config.compose import compose
from gsm.evaluation.held_out import WHOLE, HeldOut
from gsm.evaluation.records import mean
from gsm.training.callbacks import tensorboard
from gsm.training.callbacks.tensorboard import (
    COLUMNS,
    FIRST,
    LAYOUT,
    METRICS,
    Hyperparameters,
    TensorBoard,
    charts,
    records,
)
from gsm.training.report import BOARD
from gsm.training.run import differing, train

RUNS = {
    "gsm": ["model/retriever=separate_indexer"],
    "no_stages": ["model.stages=[]"],
    "baseline": ["model=baseline"],
    "transformer": ["model=transformer"],
    "gated_delta_net": ["model=gated_delta_net"],
}
LACKS = {  # the metrics that a model has nothing to measure of, besides the accuracy, which text has not
    "gsm": set(),
    "no_stages": {"val/overlap/mean"},
    "baseline": {"val/overlap/mean", "val/without_state"},
    "transformer": {"val/overlap/mean", "val/without_state", "train/indexer_recall"},
    "gated_delta_net": {"val/overlap/mean", "val/without_state", "train/indexer_recall"},
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


def arm_of(run: str) -> str:
    """The arm of a run in TensorBoard, which is called as its folder."""
    found = re.fullmatch(r"(\w+)-seed0-[0-9a-f]{8}", run)
    assert found is not None
    return found[1]


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


def test_the_table_opens_on_arm_and_seed(server: Client):
    columns = [info["name"] for info in ask(server, "hparams/experiment", {"experimentName": ""})["hparamInfos"]]
    assert set(columns[: len(FIRST)]) == set(FIRST)
    metrics = [info["name"]["tag"] for info in ask(server, "hparams/experiment", {"experimentName": ""})["metricInfos"]]
    assert metrics[0] == "val/bits_per_byte"


def test_the_columns_of_an_experiment_are_those_in_which_its_arms_differ(tmp_path: Path):
    described = {"arms": {"plain": ["model/residual=plain"], "wide": ["+model/residual=mhc", "model.extra=3"]}}
    (tmp_path / "experiment.json").write_text(json.dumps(described))
    config = {"arm": "wide", "seed": 1, "folder": str(tmp_path / "wide"), "model": {"extra": 3}}
    assert differing(config) == ["model/residual", "model.extra"]
    assert differing({**config, "arm": "alone"}) == []
    written = Hyperparameters({**config, "choices": {"model/residual": "mhc"}}, 10, differing(config))
    assert (written.values["residual"], written.values["model.extra"]) == ("mhc", 3)
    (columns, _, _) = records(written.values, written.differing)
    content = HParamsPluginData.FromString(columns.value[0].metadata.plugin_data.content)
    shown = [info.name for info in content.experiment.hparam_infos]
    assert shown == ["arm", "seed", "residual", "model.extra"]


def test_a_task_has_its_accuracy_before_the_other_metrics():
    (columns, _, _) = records({"arm": "plain"}, metric="val/accuracy")
    content = HParamsPluginData.FromString(columns.value[0].metadata.plugin_data.content)
    metrics = [info.name.tag for info in content.experiment.metric_infos]
    assert metrics[0] == "val/accuracy" and sorted(metrics) == sorted(METRICS)


def test_a_run_says_how_it_was_started_and_what_opens_it(server: Client, logs: Path):
    for run in ask(server, "text/tags"):
        (text,) = ask(server, f"text/text?run={run}&tag=run/text_summary")
        assert f"gsm.load_model(&quot;{logs / run}" in text["text"] or f'gsm.load_model("{logs / run}' in text["text"]
        assert ("explore" in text["text"]) == (arm_of(run) in ("gsm", "no_stages"))
        assert f"arm={arm_of(run)}" in text["text"]


def test_metrics_are_those_of_the_summaries_and_missing_where_nothing_was_measured(server: Client, logs: Path):
    for arm, group in groups(server).items():
        values = {value["name"]["tag"]: float(value["value"]) for value in group["metricValues"]}
        summary = json.loads((folder_of(logs, f"{arm}-seed0") / "summary.json").read_text())
        assert values["val/loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
        assert values["val/bits_per_byte"] == pytest.approx(summary["bits_per_byte"], rel=1e-6)
        assert set(METRICS) - values.keys() == {"val/accuracy"} | LACKS[arm]
        if arm == "gsm":
            assert values["val/overlap/mean"] == pytest.approx(summary["overlap"]["mean"], rel=1e-6)


def test_summaries_say_what_every_model_remembers(logs: Path):
    found = {arm: json.loads((folder_of(logs, f"{arm}-seed0") / "summary.json").read_text()) for arm in RUNS}
    for summary in found.values():
        by_kind = summary["memory_bytes"]
        assert summary["cache_bytes"] == sum(by_kind.values()) - by_kind["bookkeeping"] > 0
    for arm in ("transformer", "gated_delta_net"):
        assert found[arm]["state_bytes"] == found[arm]["cache_bytes"], "all that these remember is read by every row"
    assert found["gsm"]["state_bytes"] == found["gsm"]["memory_bytes"]["shared_state"] < found["gsm"]["cache_bytes"]
    assert found["baseline"]["state_bytes"] is None, "its decoder has no state of its own"


def test_a_comparator_is_evaluated_like_any_other_model(logs: Path):
    (result,) = HeldOut(str(logs / "gated_delta_net-seed0"), overlap=True, device="cpu").evaluate()
    summary = json.loads((folder_of(logs, "gated_delta_net-seed0") / "summary.json").read_text())
    assert mean(result.where(**WHOLE)) == pytest.approx(summary["val_loss"], rel=1e-5)
    assert not result.where(part="overlap")


def test_no_run_has_a_point_of_what_it_has_not_measured(server: Client, logs: Path):
    tags = ask(server, "scalars/tags")
    assert {arm_of(run) for run in tags} == set(RUNS)
    for run, of_run in tags.items():
        assert set(METRICS) - set(of_run) == {"val/accuracy"} | LACKS[arm_of(run)]
        assert "hp_metric" not in of_run
        events = EventAccumulator(str(logs / run), size_guidance={"scalars": 0}).Reload()
        for tag in of_run:
            assert all(point.step > 0 and math.isfinite(point.value) for point in events.Scalars(tag)), tag


@pytest.mark.parametrize("accumulator", [EventAccumulator, plugin_event_accumulator.EventAccumulator])
def test_what_a_resumed_run_logs_again_is_there_once(tmp_path: Path, accumulator: Any):
    """Both of TensorBoard's readers in Python; its slower server hid nothing where a run was resumed for the first
    time."""
    for after, steps in ((None, (5, 10, 15, 20)), (10, (15, 20, 25)), (20, (25, 30))):
        if after is not None:
            store(tmp_path, global_step=after)
        logger = TensorBoard(tmp_path)
        for step in steps:
            logger.log_metrics({"train/loss": float(step)}, step)
        logger.finalize("success")
    events = accumulator(str(tmp_path)).Reload()
    points = events.Scalars("train/loss") if accumulator is EventAccumulator else events.Tensors("train/loss")
    assert [point.step for point in points] == [5, 10, 15, 20, 25, 30]


def test_the_address_that_a_run_prints_gives_seeds_of_an_arm_one_colour():
    """TensorBoard 2.21 colours runs alike for which the groups of the expression are the same."""
    (pattern,) = parse_qs(urlsplit(BOARD).query)["runColorGroup"]

    def groups(run: str) -> tuple[str, ...]:
        found = re.match(pattern.removeprefix("regex:"), run)
        assert found is not None
        return found.groups()

    first, second, other = (groups(f"{run}-1f3a9c07") for run in ("a-seed0", "a-seed12", "b-seed0"))
    assert first == second != other
    further = [groups(f"x/a-seed{n}-{run}-{n}f3a9c07") for n in (0, 1) for run in "tu"]
    assert further[0] == further[2] != further[1] == further[3], "of an arm's runs each has its colour"


def test_what_is_seen_first_is_training_and_validation(server: Client):
    """TensorBoard opens the first two groups of the TIME SERIES tab, and sorts them by name."""
    tags = [
        tag
        for plugin in ("scalars", "images", "histograms")
        for of in ask(server, f"{plugin}/tags").values()
        for tag in of
    ]
    assert sorted({tag.partition("/")[0] for tag in tags}) == ["train", "val", "view"]


def test_charts_put_the_curves_of_all_runs_together_and_none_is_empty(server: Client):
    layout = ask(server, "custom_scalars/layout")
    tabs = {
        tab["title"]: {chart["title"]: chart["multiline"]["tag"] for chart in tab["chart"]}
        for tab in layout["category"]
    }
    of_questions = "held-out questions answered (fraction)"
    text = {name: patterns for name, patterns in LAYOUT["loss"].items() if name != of_questions}
    assert tabs == {**LAYOUT, "loss": text}, "text asks no questions; all others belong to one of the runs"
    runs = {arm_of(run): run for run in ask(server, "scalars/tags")}
    drawn = {
        name: {arm: curves(server, run, tags) for arm, run in runs.items()}
        for of in tabs.values()
        for name, tags in of.items()
    }
    for name, of in drawn.items():
        assert any(of.values()), f"{name} is empty"
    for run in runs:
        assert drawn["loss in training (nats per token)"][run] == {"train/loss"}
        assert drawn["held-out loss (nats per token)"][run] == {"val/loss"}
        assert drawn["tokens per second"][run] == {"train/tokens_per_second"}
    recall = drawn["recall by layer and stage"]
    assert {f"train/indexer_recall/stage{s}" for s in (1, 2)} < recall["gsm"]
    assert recall["baseline"] and not recall["transformer"]
    overlap = drawn["overlap with the encoder, of a few sequences"]
    assert overlap["gsm"] == {"val/overlap_sample/stage1", "val/overlap_sample/stage2"}
    without = drawn["loss added without a stage (nats per token)"]
    assert without["gsm"] == {"val/without_stage1", "val/without_stage2"} and not without["no_stages"]
    assert {run for run, of in drawn["effective rank of the state"].items() if of} == {"gsm", "no_stages"}


def test_a_run_has_the_charts_of_what_it_logs():
    assert charts([]) == {}
    assert charts(["val/accuracy", "train/lossy"]) == {
        "loss": {"held-out questions answered (fraction)": ["Multiline", ["val/accuracy$"]]}
    }


def curves(server: Client, run: str, patterns: list[str]) -> set[str]:
    """The tags that a chart draws for a run."""
    answers = [server.get("/data/plugin/custom_scalars/scalars", query_string={"run": run, "tag": p}) for p in patterns]
    return {tag for answer in answers for tag in json.loads(answer.text).get("tag_to_events", {})}


def test_pictures_are_there_where_the_model_has_what_they_show(server: Client):
    images, shapes = ask(server, "images/tags"), ask(server, "histograms/tags")
    distances = {"view/retrieval_distance/stage1", "view/retrieval_distance/stage2"}
    drawn = {arm_of(run): set(of_run) for run, of_run in images.items() if of_run}
    reads = {"view/decoder_reads", "view/decoder_reads_by_row"}
    assert drawn == {"gsm": reads | {"view/stages_select", "view/state_is_made_of"}, "no_stages": reads}
    assert {arm_of(run): set(of_run) for run, of_run in shapes.items() if of_run} == {"gsm": distances}


@pytest.mark.parametrize("ahead", [3600, 0])
def test_a_run_goes_on_after_its_clock_was_ahead(tmp_path: Path, ahead: int, monkeypatch: pytest.MonkeyPatch):
    """TensorBoard showed the first part for ever. Within one second, it reads the tenth file before the ninth."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    now = time.time()
    for part, clock in enumerate([now + ahead, now + ahead, now, now]):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        monkeypatch.setattr(tensorboard, "newest", lambda _, part=part: Path(f"step_{3 * part:08}") if part else None)
        logger = TensorBoard(tmp_path)
        for step in (3, 6):
            logger.log_metrics({"val/loss": part + step / 10}, 3 * part + step)
        logger.finalize("success")
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("val/loss")
    found = [(event.step, round(event.value, 1)) for event in events]
    assert found == [(3, 0.3), (6, 1.3), (9, 2.3), (12, 3.3), (15, 3.6)]
