"""The arguments of `attend` and `attend_band` as its Triton kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

INPUTS = (
    "Tensor query_BRHC, Tensor window_BEC, Tensor sink_H, Tensor? bank_BFC, Tensor? bias_BRK, Tensor? index_BRK, "
    "Tensor position_BR, Tensor cos_BRP, Tensor sin_BRP, int width"
)
LOG2_E = 1.4426950408889634


class Inputs(NamedTuple):
    """The operation's arguments; those with a gradient come first."""

    query_BRHC: Tensor
    window_BEC: Tensor
    sink_H: Tensor
    bank_BFC: Tensor | None
    bias_BRK: Tensor | None
    index_BRK: Tensor | None
    position_BR: Tensor
    cos_BRP: Tensor
    sin_BRP: Tensor
    width: int

    @property
    def slots(self) -> int:
        """F, if there is anything to pick."""
        return 0 if self.bank_BFC is None or self.picks == 0 else self.bank_BFC.shape[1]

    @property
    def picks(self) -> int:
        """K; 0 where nothing is picked."""
        return 0 if self.index_BRK is None else self.index_BRK.shape[2]

    def contiguous(self) -> Inputs:
        """The same, each tensor without gaps, as the kernels read it."""
        given = {name: x.contiguous() for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**given)

    def constants(self) -> dict[str, int | bool]:
        """What the kernels of rows are compiled for."""
        heads, channels = self.query_BRHC.shape[2:]
        sizes = {"H": heads, "C": channels, "PAIRS": self.cos_BRP.shape[2]}
        return sizes | {"PICKS": self.slots > 0, "BIASED": self.slots > 0 and self.bias_BRK is not None}

    def in_one_dtype(self) -> Inputs:
        """Window and bank in the dtype of the queries, as backward wants them; forward converts what it loads."""
        dtype = self.query_BRHC.dtype
        bank = None if self.bank_BFC is None else self.bank_BFC.to(dtype)
        return self._replace(window_BEC=self.window_BEC.to(dtype), bank_BFC=bank)

    def first_rows(self, rows: int) -> Inputs:
        """The call of these rows of the first sequence: what is compiled for it serves the whole, since its tensors
        begin at the same addresses."""
        each = ("query_BRHC", "bias_BRK", "index_BRK", "position_BR", "cos_BRP", "sin_BRP")
        fewer = {name: x[:1, :rows] for name, x in self._asdict().items() if name in each and x is not None}
        whole = {
            name: x[:1] for name, x in self._asdict().items() if name in ("window_BEC", "bank_BFC") and x is not None
        }
        return self._replace(**fewer, **whole)

    def read(self) -> tuple:
        """What the kernels of rows read, in their order."""
        far = (self.bank_BFC, self.index_BRK, self.bias_BRK)
        return self.query_BRHC, self.window_BEC, *far, self.position_BR, self.cos_BRP, self.sin_BRP

    def sizes(self) -> tuple[float | int, ...]:
        """scale of a logit to base 2, width, R, E, F, K."""
        rows, _, channels = self.query_BRHC.shape[1:]
        return channels**-0.5 * LOG2_E, self.width, rows, self.window_BEC.shape[1], self.slots, self.picks
