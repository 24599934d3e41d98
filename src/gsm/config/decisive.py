"""Keys of a configuration that change training. All others choose the place of a run, and its output."""

from __future__ import annotations

DECISIVE = {"model", "size", "data", "optimizer", "trainer", "callbacks", "seed", "global_batch"}
# Callbacks that change nothing; older runs have `profile`.
WATCHING = {"throughput", "progress", "best", "latest", "charts", "pictures", "profile"}
IDLE = {
    "data.cache_dir",
    *("data.on_corrupt", "data.longest_line", "data.num_workers", "data.prepare_workers"),  # older runs have them
    *("trainer.log_every_n_steps", "trainer.val_check_interval", "trainer.check_val_every_n_epoch"),
    *("trainer.limit_val_batches", "trainer.num_sanity_val_steps"),
}
# Values of the trainer that a branch shares with its checkpoint; length, device and validations may differ.
BOUND = {"trainer.gradient_clip_val", "trainer.gradient_clip_algorithm"}
# The end of the schedule: a branch may have another one, as it may have another length.
ENDING = {"optimizer.decay_fraction"}
# How a step is divided among processes, and on which device: free, as long as it is a step of as many sequences.
DIVIDING = (
    "data.batch_size",
    "global_batch",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.context",
    "trainer.accelerator",
)

# Where the same data lie on each machine, and how they are read there: the data's fingerprint tells whether they are.
LOCAL = {"data.path", "data.cache_dir", "overrides"}


def decides(key: str, branches: bool = False, divided: bool = False) -> bool:
    """Return whether a run with another value of this key trains something else.

    Args:
        key: the path to a value of a composed configuration.
        branches: leave out the values that a branch may change.
        divided: leave out how a step is divided among processes.
    """
    head, _, rest = key.partition(".")
    if divided and (key in DIVIDING or key.startswith("trainer.strategy")):
        return False
    if head not in DECISIVE or key in IDLE or key.startswith(("trainer.enable_", "trainer.profiler")):
        return False
    if head == "callbacks":
        return rest.partition(".")[0] not in WATCHING
    return not (branches and (key in ENDING or head == "trainer" and key not in BOUND))
