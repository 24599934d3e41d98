"""The ranks of a run: the number of this process, and decisions of the leading rank for all."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gsm.errors import ConfigError

if TYPE_CHECKING:
    import lightning

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # torchrun's, Lightning's own, srun's, jsrun's
LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK")  # read and set by Lightning
# How long ranks wait for the leading one: while it decides (it may tokenise the text), and while it ends.
PREPARING, ENDING = timedelta(days=7), timedelta(minutes=1)
Decision = TypeVar("Decision")


def rank() -> int:
    """Return the rank of this process, from the environment; 0 if it was started alone."""
    return next((int(os.environ[name]) for name in RANKS if name in os.environ), 0) if _started_together() else 0


def _started_together() -> bool:
    """Return whether torchrun, srun or Lightning has started this process together with other ranks."""
    by_lightning = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT"} <= os.environ.keys()
    return by_lightning or "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("SLURM_NTASKS", "1") != "1"


@contextlib.contextmanager
def own_ranks() -> Iterator[None]:
    """Hide the variables of other launchers during a run in a process that was started alone.

    Lightning reads them from the environment and leaves its own there, so the next run of the process would wait for
    ranks that have ended.
    """
    if _started_together() or "NODE_RANK" in os.environ:  # by Lightning's convention for one process a node
        yield
        return
    before = {name: os.environ.pop(name) for name in LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        for name in LAUNCHER:
            os.environ.pop(name, None)
        os.environ |= before
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def sharing(trainer: lightning.Trainer) -> tuple[int, int]:
    """Return the number of ranks with different sequences, and the number of this one among them. Ranks that divide
    the same sequences (``trainer=context``) count as one."""
    context: int = getattr(trainer.strategy, "context", 1)
    return trainer.world_size // context, trainer.global_rank // context


def agreed(
    decide: Callable[[], Decision],
    group: torch.distributed.ProcessGroup | None = None,
    patience: timedelta = PREPARING,
) -> Decision:
    """Call ``decide`` on rank 0 alone, and return its result, or raise its error, on all ranks.

    A process that is not connected to others calls it itself. The other ranks wait in ``group``, or for up to
    ``patience`` in a new one.
    """
    if not torch.distributed.is_initialized():
        return decide()
    if group is None:
        made = torch.distributed.new_group(backend="gloo", timeout=patience)
        assert not isinstance(made, int)  # an int would stand for a rank outside of the group
        group = made
    decision: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            decision = [decide()]
        except Exception as error:  # whatever it is, the others wait for it
            decision = [portable(error)]
    torch.distributed.broadcast_object_list(decision, group=group)
    if isinstance(decision[0], Exception):
        raise decision[0]
    return decision[0]


def compare(make: Callable[[], Mapping[str, Any]]) -> None:
    """Check that all connected ranks have the same values: otherwise they would train different weights, or hang.

    Args:
        make: gives the values of this rank, by their keys.

    Raises, on all ranks, ConfigError, and any error that a rank raises while it makes its values.
    """
    if not torch.distributed.is_initialized():
        make()
        return
    try:
        mine: Any = dict(make())
    except Exception as error:
        mine = portable(error)
    values: list[Any] = [None] * torch.distributed.get_world_size()
    group = torch.distributed.new_group(backend="gloo", timeout=PREPARING)
    torch.distributed.all_gather_object(values, mine, group=group)
    for value in values:
        if isinstance(value, Exception):
            raise value
    for number, value in enumerate(values):
        for key in sorted({*value, *values[0]}):
            mine, first = value.get(key, "nothing"), values[0].get(key, "nothing")
            if mine != first:
                raise ConfigError(
                    f"{key} must be the same on all ranks, got {mine!s:.60} on rank {number} and {first!s:.60} on "
                    "rank 0"
                )


def portable(error: Exception) -> Exception:
    """Return the error, or a copy with its type and message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # any attribute or constructor may refuse to be copied
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
