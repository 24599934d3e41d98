"""Runs in MLflow (extra ``mlflow``): a local database unless one wants a server."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import MLFlowLogger

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
            raise ImportError("logger=mlflow needs MLflow: pip install -c constraints.txt -e '.[mlflow]'")
        self.known = Known(folder, "mlflow")
        place: dict[str, Any] = {"tracking_uri": store}
        if "://" not in store:
            Path(store).mkdir(parents=True, exist_ok=True)
            where = Path(store).resolve()
            place = {
                "tracking_uri": f"sqlite:///{where}/mlflow.db",
                "artifact_location": (where / "artifacts").as_uri(),
            }
        named = {"experiment_name": experiment, "run_name": f"{arm}-seed{seed}", "tags": {"arm": arm}}
        super().__init__(run_id=self.known.read(), **{**place, **named, **options})

    @property
    def experiment(self) -> Any:
        """The client; the run is made when it is first asked for, and its name there noted."""
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
