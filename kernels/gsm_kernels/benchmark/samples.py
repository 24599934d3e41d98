"""The calls whose kernels `compiled` compiles: every operation, in the variants that its kernels are compiled for.

In bfloat16 and with the widths of the 0.5B and 1.5B models unless a name says otherwise, and with a few rows: the grid
alone knows how many. What chooses among slots, or sums over them, is also compiled for as many as a long text has.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from . import workloads
from .workloads import Call, Case

USUAL, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
ALL, NARROW, SMALL = (USUAL, HALF, FULL), (USUAL, HALF), (USUAL, FULL)
# Heads and channels of attention, and the dtypes that its kernels take them in.
ATTENTION = (
    ("32 heads", {}, ALL),
    ("64 heads", {"heads": 64}, ALL),
    ("32 heads, 64 channels", {"channels": 64}, ALL),
    ("32 heads, 256 channels", {"channels": 256}, NARROW),
    ("64 heads, 256 channels", {"heads": 64, "channels": 256}, NARROW),
    ("nano", {"heads": 4, "channels": 32, "angles": 8}, SMALL),
    ("tiny", {"heads": 8, "channels": 64}, SMALL),
)
# Heads and width of an indexer.
INDEXERS = (("", {}, ALL), ("nano", {"heads": 2, "width": 32}, SMALL), ("tiny", {"heads": 4, "width": 32}, SMALL))


def samples() -> tuple[Case, ...]:
    """All of them. A case makes its call in the dtype that it is for, whatever dtype it is asked for."""
    return *_attention(), *_searches(), *_losses(), *_pooling(), *_streams(), *_rows_alone()


def _attention() -> list[Case]:
    each = [(name, sizes, dtype) for name, sizes, dtypes in ATTENTION for dtype in dtypes]
    far = [_in(workloads.attend(name, 1, 512, **sizes), dtype) for name, sizes, dtype in each]
    band = [_in(workloads.attend_band(name, 1, 512, **sizes), dtype) for name, sizes, dtype in each]
    learning = [_biased(case) for case in far if "256" not in case.name and "float16" not in case.name]
    return [*far, *learning, *band, *(_last_rows(case, 1) for case in (*far, *band))]


def _searches() -> list[Case]:
    """Of few slots, and of so many that groups of them are chosen first."""
    found = []
    for name, sizes, dtypes in INDEXERS:
        for dtype in dtypes:
            whole = _in(workloads.index_top_k(name, 1, 512, **sizes), dtype)
            found += [whole, _pooled(whole), _in(workloads.score_slots(name, 1, 512, **sizes), dtype)]
    for dtype in ALL:
        long = _in(workloads.index_top_k("of 64K", 1, 65536), dtype)
        found += [_last_rows(long, 64), _last_rows(long, 1), _last_rows(_pooled(long), 64)]
        blocks = _in(workloads.candidate_pool("of 64K", 1, 65536), dtype)
        found += [_in(workloads.candidate_pool("", 1, 512), dtype), _last_rows(blocks, 64)]
    return found


def _losses() -> list[Case]:
    found = []
    for dtype in ALL:
        dense, long = workloads.indexer_kl("dense", 1, 512), workloads.indexer_kl("dense, of 4K", 1, 4096)
        selected = workloads.indexer_kl("selected", 1, 512, dense=False)
        found += [_in(case, dtype) for case in (dense, _pooled(dense), _last_rows(long, 64), selected)]
    small = {
        "nano": {"heads": 4, "channels": 32, "index_heads": 2},
        "tiny": {"heads": 8, "channels": 64, "index_heads": 4},
    }
    for name, sizes in small.items():
        dense, selected = (
            workloads.indexer_kl(f"{how}, {name}", 1, 256, **sizes, index_width=32, dense=how == "dense")
            for how in ("dense", "selected")
        )
        found += [_in(case, dtype) for case in (dense, selected) for dtype in SMALL]
    wide = workloads.indexer_kl("dense, 64 heads", 1, 512, heads=64)
    return [*found, wide, workloads.indexer_kl("selected, 64 heads", 1, 512, heads=64, dense=False)]


def _pooling() -> list[Case]:
    wide, single = workloads.pool_groups("", 512), workloads.pool_groups("ratio 1", 512, ratio=1)
    nano = _in(workloads.pool_groups("nano", 512, channels=32), FULL)
    return [*(_in(case, dtype) for case in (wide, single) for dtype in ALL), nano]


def _streams() -> list[Case]:
    """As many streams as the kernels take, and the mixed precision of training."""
    cases = [
        workloads.mhc_boundary(f"{count} streams" if count > 1 else "1 stream", 64, streams=count)
        for count in (1, 2, 4, 8)
    ]
    mixed = workloads.mhc_boundary("4 streams, mixed precision", 64, mixed=True)
    nano = _in(workloads.mhc_boundary("4 streams, nano", 64, width=128), FULL)
    return [*(_in(case, dtype) for case in cases for dtype in ALL), mixed, nano]


def _rows_alone() -> list[Case]:
    """What goes row by row: norms as wide as models, queries and entries are, the gate, and the loss."""
    norms = [workloads.rms_norm(f"of {width}", 64, width=width) for width in (64, 128, 512, 1024, 2048)]
    narrow = workloads.linear_cross_entropy("nano", 16, width=128, vocabulary=4096)
    cases = [*norms, workloads.swiglu("", 64), workloads.linear_cross_entropy("", 16), narrow]
    return [_in(case, dtype) for case in cases for dtype in ALL]


def _in(case: Case, dtype: torch.dtype) -> Case:
    """The case in a dtype, and with a name that says so if it is not the usual one."""
    name = ", ".join(filter(None, (case.name, "" if dtype == USUAL else str(dtype).removeprefix("torch."))))
    return replace(case, name=name, make=lambda device, _: case.make(device, dtype))


def _biased(case: Case) -> Case:
    """With a bias on the logits of what is picked, through which an indexer learns."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        call = case.make(device, dtype)
        return {**call, "bias_BRK": torch.zeros(call["index_BRK"].shape, device=device, dtype=call["query_BRHC"].dtype)}

    return replace(case, name=f"{case.name}, biased", make=make)


def _pooled(case: Case) -> Case:
    """Among the slots of 16 blocks a row alone."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        call = case.make(device, dtype)
        return {**call, "pool_BRN": torch.arange(16, device=device).expand(*call["first_BR"].shape, -1).contiguous()}

    return replace(case, name=", ".join(filter(None, (case.name, "pooled"))), make=make)


def _last_rows(case: Case, rows: int) -> Case:
    """The last rows of a case, without a backward of its own. Of one row, as when a token is decoded, other kernels
    take care."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        call = case.make(device, dtype)
        return {name: x[:, -rows:].contiguous() if "_BR" in name else x for name, x in call.items()}

    work = {direction: work for direction, work in case.work.items() if direction != "backward"}
    return replace(case, name=f"{case.name}, {'one row' if rows == 1 else f'{rows} rows'}", make=make, work=work)
