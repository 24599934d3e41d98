"""What cases begin with: a short text, a finished run on it, its cache. Made once, and copied by whoever changes it."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import tiny_text
import torch
from short_runs import arguments
from stored import store

from adversary import inside
from gsm.checkpoint import newest, read

STEPS = "trainer.max_steps=6"
QUICK = ["trainer.val_check_interval=6", STEPS]


class World:
    """Folders with what cases begin with.

    Args:
        home: a folder that is there for as long as the cases run.
    """

    def __init__(self, home: Path):
        self.home = home
        (home / "text").mkdir()
        for path in tiny_text.write(home / "text").iterdir():
            path.write_text(path.read_text()[:150])
        self.run = home / "logs/plain/gsm/seed0"
        self.composed = inside.compose(arguments(home, "plain", *QUICK))
        self.finish(self.config("plain"))
        last = newest(self.run)
        assert last is not None
        self.last, self.saved = last, read(last)

    def config(self, name: str, *more: str) -> dict[str, Any]:
        """The run's configuration under another name, the caller's own. Where nothing but places are other, that is
        filled in, as it would be composed: composing takes longer than most cases."""
        given = dict(word.split("=", 1) for word in more)
        if given.keys() - {"folder", "start_from", "data.cache_dir"}:
            return inside.compose(arguments(self.home, name, *QUICK, *more))
        folder = given.pop("folder", str(self.home / f"logs/{name}/gsm/seed0"))
        config = _moved(self.composed, str(self.run), folder) | {"name": name}
        if "data.cache_dir" in given:
            config["data"]["cache_dir"] = given.pop("data.cache_dir")
        return config | given

    def finish(self, config: dict[str, Any]) -> None:
        """A run, in a process of its own, as this one must stay without threads: it is forked from."""
        child = os.fork()
        if not child:
            code = 1
            try:
                with (self.home / f"{config['name']}.log").open("w") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                torch.set_num_threads(1)
                inside.train(config)
                code = 0
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        if status:
            raise RuntimeError((self.home / f"{config['name']}.log").read_text())

    def checkpoint(self) -> dict[str, Any]:
        """The run's last, to be changed."""
        return copy.deepcopy(self.saved)

    @functools.cached_property
    def needle(self) -> dict[str, Any]:
        """A node of data that are made when they are needed."""
        return inside.compose(["size=pico", "data=needle"])["data"]

    def put(self, checkpoint: dict[str, Any], folder: Path, config: dict[str, Any] | None = None) -> Path:
        """A run's folder that holds this checkpoint."""
        if config is not None:
            checkpoint["hyper_parameters"]["config"] = config
        return store(folder / "run", **checkpoint)


def _moved(value: Any, old: str, new: str) -> Any:
    """A copy in which what lies in one folder lies in another."""
    if isinstance(value, dict):
        return {key: _moved(below, old, new) for key, below in value.items()}
    if isinstance(value, list):
        return [_moved(below, old, new) for below in value]
    return value.replace(old, new) if isinstance(value, str) else value
