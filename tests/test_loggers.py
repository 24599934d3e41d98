"""Loggers: TensorBoard, Weights & Biases and MLflow have the same curves, hyper-parameters and pictures of a run, also
of one that was resumed; read back with their own libraries."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from short_runs import arguments, scalars

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.experiments.fit import train
from gsm.training.callbacks.boards import Board, Known
from gsm.training.callbacks.metrics_file import MetricsFile, read_metrics

CURVES = ("train/loss", "val/loss", "val/bits_per_byte")
Points = dict[str, dict[int, float]]


def config(home: Path, name: str, *more: str) -> dict[str, Any]:
    return compose(arguments(home, name, "callbacks.progress.every=100", *more))


@pytest.fixture(scope="module")
def resumed(home: Path) -> Path:
    """A run of 9 steps that went on to 18, in the same folder."""
    for library in ("wandb", "mlflow", "matplotlib"):
        pytest.importorskip(library)
    first = config(home, "logged", "logger=all", "trainer.max_steps=9")
    train(first)
    last = Path(first["folder"]) / "checkpoints/last.ckpt"
    train(config(home, "logged", "logger=all", "trainer.max_steps=18", f"resume={last}"))
    importlib.import_module("wandb").finish()  # as the end of a process does
    return Path(first["folder"])


def of_mlflow(folder: Path) -> Any:
    """The client, and the run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parents[2] / '.mlflow/mlflow.db'}")
    return client, client.get_run((folder / "mlflow.id").read_text())


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


def test_curves_are_the_same_in_all_of_them(resumed: Path):
    board = {tag: dict(points) for tag, points in scalars(resumed).items()}
    file = read_metrics(resumed / "metrics.csv")
    weights, _, _ = of_wandb(resumed)
    client, run = of_mlflow(resumed)
    for tag in CURVES:
        history = {one.step: one.value for one in client.get_metric_history(run.info.run_id, tag)}
        assert board[tag].keys() == file[tag].keys() == weights[tag].keys() == history.keys(), tag
        assert max(history) == 18
        for step, value in board[tag].items():
            assert file[tag][step] == pytest.approx(value, rel=1e-6)
            assert weights[tag][step] == pytest.approx(value, rel=1e-6)
            assert history[step] == pytest.approx(value, rel=1e-6)


def test_a_resumed_run_is_one_run_to_all_of_them(resumed: Path):
    client, run = of_mlflow(resumed)
    runs = client.search_runs([run.info.experiment_id])
    assert [one.info.run_id for one in runs] == [run.info.run_id] and runs[0].info.status == "FINISHED"
    known = (resumed / "wandb.id").read_text()
    parts = [part.name for part in resumed.glob("wandb/offline-run-*")]
    assert parts and all(part.endswith(known) for part in parts)


def test_hyperparameters_are_those_of_the_tab(resumed: Path):
    _, settings, _ = of_wandb(resumed)
    _, run = of_mlflow(resumed)
    for name, value in (("model", "gsm"), ("residual", "plain"), ("batch_size", 4), ("seed", "0")):
        assert settings[name] == value and run.data.params[name] == str(value)


def test_pictures_are_there(resumed: Path):
    client, run = of_mlflow(resumed)
    images = [one.path for one in client.list_artifacts(run.info.run_id, "images")]
    _, _, media = of_wandb(resumed)
    for name in ("decoder_reads", "stages_select"):
        assert any(name in path for path in images) and any(name in path for path in media)


def test_runs_that_begin_together_share_a_database(tmp_path: Path):
    """MLflow itself makes its tables twice then, of which the second fails."""
    pytest.importorskip("mlflow")
    code = (
        "import sys; from gsm.training.callbacks.mlflow import MLflow\n"
        "logger = MLflow(sys.argv[1], 'together', 'gsm', 0, sys.argv[2]); logger.log_metrics({'a': 1.0}, 1)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / name), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    for process in started:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert (tmp_path / "one/mlflow.id").read_text() != (tmp_path / "two/mlflow.id").read_text()


def test_a_run_that_the_database_has_lost_begins_there_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("mlflow")
    from gsm.training.callbacks.mlflow import MLflow

    known = Known(str(tmp_path / "run"), "mlflow")
    known.note("0" * 32)
    logger = MLflow(str(tmp_path / "run"), "lost", "gsm", 0, str(tmp_path / "store"))
    logger.log_metrics({"a": 1.0}, 1)
    assert known.read() == logger.run_id != "0" * 32
    assert "a new run, as the one noted" in capsys.readouterr().out


@pytest.mark.parametrize("library", ["wandb", "mlflow"])
def test_a_library_that_is_missing_is_named_with_the_remedy(library: str, home: Path, monkeypatch: pytest.MonkeyPatch):
    found, imported = importlib.util.find_spec, builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == library:
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == library else found(name, *rest)
    )
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=rf"logger=\w+ needs .*pip install .*\[{library}\]"):
        train(config(home, f"without_{library}", f"logger={library}", "trainer.max_steps=2"))


def test_csv_alone_leaves_one_file(home: Path):
    chosen = config(home, "csv_alone", "logger=csv", "trainer.max_steps=4")
    assert list(chosen["logger"]) == ["csv"]
    train(chosen)
    folder = Path(chosen["folder"])
    assert "val/loss" in read_metrics(folder / "metrics.csv") and not list(folder.glob("events*"))


def test_an_id_is_noted_once_and_read_again(tmp_path: Path):
    known = Known(str(tmp_path / "run"), "library")
    assert known.read() is None and not known.file.parent.exists()
    known.note("first")
    known.note("second")
    assert Known(str(tmp_path / "run"), "library").read() == "first"


def test_what_shows_pictures_is_known_by_its_methods(tmp_path: Path):
    from gsm.training.callbacks.tensorboard import TensorBoard

    assert isinstance(TensorBoard(str(tmp_path), name="", version=""), Board)
    assert not isinstance(MetricsFile(tmp_path / "metrics.csv"), Board)
