"""Which of several processes this one is, what all of them take from the one that leads, and which of them are gone."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    import lightning

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # torchrun's, that of processes which Lightning starts, srun's
BROKEN = re.compile(r"gloo|nccl|connection (was )?(closed|reset)|broken pipe|process ?group", re.IGNORECASE)
PATIENCE = 5.0  # seconds that ranks wait for one another to answer
# For what the leading rank does before it has decided: to go on, it may have to tokenise the text; and before it ends.
PREPARING, ENDING = timedelta(days=7), timedelta(minutes=1)
OBSERVER = "lightning.fabric.strategies.launchers.subprocess_script"
Decision = TypeVar("Decision")


def rank() -> int:
    """This process among those that were started together, as whoever has started them says; 0 if there is only one."""
    return next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)


def sharing(trainer: lightning.Trainer) -> tuple[int, int]:
    """Among how many ranks the sequences of a step are shared out, and which of them this is: those that divide the
    same sequences among themselves (``trainer=context``) count as one."""
    context: int = getattr(trainer.strategy, "context", 1)
    return trainer.world_size // context, trainer.global_rank // context


def agreed(
    decide: Callable[[], Decision],
    group: torch.distributed.ProcessGroup | None = None,
    patience: timedelta = PREPARING,
) -> Decision:
    """What the leading rank decides, on all ranks that have met; the others do not decide, and so change nothing.

    Ranks that have not met yet decide for themselves. Raises on all of them what the decision has raised. They wait in
    ``group``, or in one that is made for it and has that much ``patience``.
    """
    if not torch.distributed.is_initialized():
        return decide()
    if group is None:
        made = torch.distributed.new_group(backend="gloo", timeout=patience)
        assert not isinstance(made, int)  # which it would be for a rank that is not in it
        group = made
    said: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            said = [decide()]
        except Exception as error:  # whatever it is, the others wait for it
            said = [portable(error)]
    torch.distributed.broadcast_object_list(said, group=group)
    if isinstance(said[0], Exception):
        raise said[0]
    return said[0]


def portable(error: Exception) -> Exception:
    """The same error, or one that says so, which another process can be told."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # which attributes and constructors do not let themselves be copied, nobody knows
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def gone(error: BaseException, patience: float = PATIENCE) -> list[int]:
    """The ranks that do not answer any more, asked by those whose collective has broken with ``error``.

    At least one of them has ended; others may only be waiting for somebody and notice nothing (of four in a ring, rank
    1 hears that rank 0 is gone, and ranks 2 and 3 go on waiting).

    Empty if the error says nothing of a connection: then it is this rank's own.
    """
    if not BROKEN.search(str(error)) or not torch.distributed.is_initialized():
        return []
    world, here = torch.distributed.get_world_size(), torch.distributed.get_rank()
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = torch.distributed.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=patience))
        # torchrun keeps one store for all its restarts, and the answers of an earlier one in it.
        answers = f"gsm/answers/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        store.set(f"{answers}/{here}", "")
        end = time.monotonic() + patience
        while absent := [one for one in range(world) if not store.check([f"{answers}/{one}"])]:
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        return absent
    except RuntimeError:  # nobody is at home where all of them had met: with the leader
        return [0]


@contextlib.contextmanager
def before_lightning_kills(say: Callable[[list[int]], None]) -> Iterator[None]:
    """Has ``say`` called with the rank that has failed, before Lightning kills all the others that it has started.

    Lightning looks at its processes every few seconds, and kills this one too as soon as another has ended with an
    error. This one needs a moment to find out by itself, to save what can be saved, and to say what has happened.
    """

    def wait(record: logging.LogRecord) -> bool:
        found = re.search(r"rank: (\d+)", record.getMessage())
        time.sleep(2 * PATIENCE)  # a daemon's thread: the process ends meanwhile if it can
        say([int(found[1])] if found else [])
        return False

    observer = logging.getLogger(OBSERVER)
    observer.addFilter(wait)
    try:
        yield
    finally:
        observer.removeFilter(wait)
