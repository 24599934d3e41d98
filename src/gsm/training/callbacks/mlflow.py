"""Runs in MLflow (extra ``mlflow``): a local database unless one wants a server."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import MLFlowLogger

from gsm import paths
from gsm.training.callbacks.boards import Known


class MLflow(MLFlowLogger):
    """Lightning's logger, with the pictures of a run, and with one run there however often it is resumed.

    MLflow has no histograms: they are left out. What was logged between the last checkpoint and an interruption is
    there twice, at the same step with the same values: MLflow takes nothing back.

    Args:
        folder: of the run.
        experiment, arm, seed: what it is called.
        store: the folder of a database and of what is stored beside it, or the address of a server (``http://...``).
        options: of Lightning's logger.

    Raises:
        ImportError: the library is missing; the message says how to install it.
    """

    def __init__(self, folder: str, experiment: str, arm: str, seed: int, store: str, **options: Any) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise ImportError(f"logger=mlflow needs MLflow: {paths.install('mlflow')}")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing is sent that nobody asked for
        self.known = Known(folder, "mlflow")
        place: dict[str, Any] = {"tracking_uri": store}
        self._place = None if "://" in store else Path(store).resolve()
        if where := self._place:
            where.mkdir(parents=True, exist_ok=True)
            place = {
                "tracking_uri": f"sqlite:///{where}/mlflow.db",
                "artifact_location": (where / "artifacts").as_uri(),
            }
        named = {"experiment_name": experiment, "run_name": f"{arm}-seed{seed}", "tags": {"arm": arm}}
        with self._alone():
            super().__init__(run_id=self.known.read(), **{**place, **named, **options})

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, no other run makes the database or the experiment in it: MLflow does not see to that."""
        if self._place is None:
            yield
            return
        with (self._place / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @property
    def experiment(self) -> Any:
        """The client; the run is made when it is first asked for, and its name there noted."""
        if self._initialized:
            return super().experiment
        from mlflow.exceptions import MlflowException

        with self._alone():
            try:
                client = super().experiment
            except MlflowException as error:
                if self._run_id is None:
                    raise
                print(
                    f"logger=mlflow: a new run, as the one noted in {self.known.file} is not there ({error})",
                    flush=True,
                )
                self._run_id = None
                self.known.file.unlink(missing_ok=True)
                client = super().experiment
        if self._run_id:
            self.known.note(self._run_id)
        return client

    @rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Values of a run that has none yet: MLflow, as TensorBoard, keeps the first ones."""
        client = self.experiment
        known = client.get_run(self.run_id).data.params
        super().log_hyperparams({key: value for key, value in dict(params).items() if key not in known})

    def show_image(self, name: str, pixels_YXC: np.ndarray, step: int) -> None:
        """A picture, uint8."""
        self.experiment.log_image(self.run_id, pixels_YXC, key=name, step=step)

    def show_histogram(self, *_: Any) -> None:
        """Nothing."""
