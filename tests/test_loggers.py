"""Loggers: TensorBoard, Weights & Biases and MLflow have the same curves and hyper-parameters of a run, read back with
their own libraries."""

from __future__ import annotations

import importlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from short_runs import NO_PICTURES, arguments, scalars

from gsm.config.compose import compose
from gsm.training.callbacks.metrics_file import read_metrics
from gsm.training.run import train

CURVES = ("train/loss", "val/loss", "val/bits_per_byte")
Points = dict[str, dict[int, float]]


@pytest.fixture(scope="module")
def logged(home: Path) -> Path:
    """A run of 9 steps."""
    for library in ("wandb", "mlflow", "matplotlib"):
        pytest.importorskip(library)
    words = arguments(home, "logged", "logger=all", "trainer.max_steps=9")
    chosen = compose([word for word in words if word != NO_PICTURES])
    train(chosen)
    importlib.import_module("wandb").teardown()  # as the end of a process does
    return Path(chosen["folder"])


def of_mlflow(folder: Path) -> Any:
    """The client, and the only run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parents[1] / '.mlflow/mlflow.db'}")
    experiment = client.get_experiment_by_name(folder.parent.name)
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def of_wandb(folder: Path) -> tuple[Points, dict[str, Any], list[str]]:
    """Metrics, configuration and files of all parts of a run, by W&B's own reader."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    points, settings, parts = defaultdict(dict), {}, sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    for part in parts:
        store = DataStore()
        store.open_for_scan(str(part))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                for key, value in row.items():
                    points[key][row.get("trainer/global_step")] = value
            for item in (*record.config.update, *record.run.config.update):
                settings[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        store.close()
    return points, settings, [str(file) for file in folder.glob("wandb/offline-run-*/files/media/**/*.png")]


@pytest.mark.slow
def test_curves_and_hyperparameters_are_the_same_in_all_of_them(logged: Path):
    board = {tag: dict(points) for tag, points in scalars(logged).items()}
    file = read_metrics(logged / "metrics.jsonl")
    weights, settings, media = of_wandb(logged)
    client, run = of_mlflow(logged)
    for tag in CURVES:
        history = {point.step: point.value for point in client.get_metric_history(run.info.run_id, tag)}
        assert board[tag].keys() == file[tag].keys() == weights[tag].keys() == history.keys(), tag
        assert max(history) == 9
        for step, value in board[tag].items():
            assert [file[tag][step], weights[tag][step], history[step]] == pytest.approx([value] * 3, rel=1e-6)
    for name, value in (("model", "gsm"), ("residual", "plain"), ("batch_size", 4), ("seed", "0")):
        assert settings[name] == value and run.data.params[name] == str(value)
    assert all(any(name in path for path in media) for name in ("decoder_reads", "stages_select"))
    assert run.data.tags["mlflow.runName"] == "gsm-seed0" and run.info.status == "FINISHED"


def test_jsonl_alone_leaves_one_file(home: Path):
    chosen = compose(arguments(home, "jsonl_alone", "logger=jsonl", "trainer.max_steps=4"))
    assert list(chosen["logger"]) == ["jsonl"]
    train(chosen)
    folder = Path(chosen["folder"])
    assert "val/loss" in read_metrics(folder / "metrics.jsonl") and not list(folder.glob("events*"))
