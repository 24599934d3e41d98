"""FSDP2: weights, gradients and the optimiser's state are divided among ranks, block by block."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from gsm import checkpoint as checkpoints
from gsm.errors import within
from gsm.files import write_json
from gsm.layers.block import Block
from gsm.layers.experts import Experts
from gsm.models.aggregation import Stage
from gsm.models.base import LanguageModel
from gsm.training.distributed import ranks

if TYPE_CHECKING:
    from gsm.context import Context

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Sharded(ModelParallelStrategy):
    """Divide a model among all ranks, and save it together.

    A block's weights are gathered when its forward or backward begins, and given back when it ends. Gradients are
    averaged and divided in the last backward of a step; until then each rank keeps whole ones.

    Experts lie in their block and are divided like everything else: every rank computes all of them, on its own rows.
    With ``experts`` N, each of N neighbouring ranks has an N-th of the experts, and rows travel to them. Ranks with the
    same experts divide the weights of these among themselves.

    With ``context`` N, N neighbouring ranks divide every sequence among themselves, too: each has some pieces of it,
    and layers exchange the entries that they need (``gsm.context``). The model is divided among all ranks as before.

    Every rank builds the whole model in its host's memory first (the weights follow from the seed alone).

    Args:
        gathered: dtype in which the weights of blocks travel and are used. None: as they are stored, float32, with the
            arithmetic of one device. ``bfloat16`` halves the traffic; then norms, routers and mixing coefficients of
            the streams, which compute in float32, have rounded weights too. ``auto``: bfloat16 with
            trainer.precision=bf16-mixed, else None.
        reduced: dtype in which gradients are summed over a step's batches and averaged; None: their own; ``auto``:
            float32 where weights travel in bfloat16 by ``auto``, else None.
        reshard_after_forward: give a block's weights back between its forward and its backward. If false, they are
            gathered once instead of twice, and all stay in memory during the step.
        average_each_batch: average gradients after each of a step's batches: with several of them more traffic, and
            no whole gradients in memory.
        process_group_backend: None: Lightning chooses it for the device.
        context: ranks that divide the same sequences.
        experts: ranks that divide the experts of a layer.
    """

    def __init__(
        self,
        gathered: Literal["auto", "float32", "bfloat16"] | None = None,
        reduced: Literal["auto", "float32", "bfloat16"] | None = None,
        reshard_after_forward: bool = True,
        average_each_batch: bool = False,
        process_group_backend: str | None = None,
        context: int = 1,
        experts: int = 1,
    ) -> None:
        within(1, experts=experts, context=context)
        for name, value in (("gathered", gathered), ("reduced", reduced)):
            if value not in (None, "auto", *DTYPES):
                raise ValueError(f"{name} must be auto, null, float32 or bfloat16, got {value}")
        super().__init__(process_group_backend=process_group_backend)
        self.gathered, self.reduced = gathered, reduced
        self.reshard_after_forward, self.context = reshard_after_forward, context
        self.average_each_batch = average_each_batch
        self.experts = experts
        self._divided: FSDPModule | None = None
        self._context: Context | None = None
        self._group: Any = None  # of the hosts: no GPU is waited for

    def setup_environment(self) -> None:
        """Divide the model among all ranks, and each sequence among ``context`` neighbouring ones.

        Lightning treats such a group as tensor-parallel: its ranks get the same data.
        """
        self._data_parallel_size, self._tensor_parallel_size = self.world_size // self.context, self.context
        super().setup_environment()

    @property
    def sequences(self) -> Context | None:
        """The ranks that divide the sequences of this rank (None: it has whole ones)."""
        if self.context == 1:
            return None
        if self._context is None:
            from gsm.context import Context

            self._context = Context(self.device_mesh["tensor_parallel"].get_group())
        return self._context

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The dtypes of weights and gradients on their way."""
        mixed = self.precision_plugin.precision == "bf16-mixed"
        gathered = self.gathered if self.gathered != "auto" else "bfloat16" if mixed else None
        reduced = self.reduced if self.reduced != "auto" else "float32" if mixed else None
        return MixedPrecisionPolicy(DTYPES.get(gathered or ""), DTYPES.get(reduced or ""))

    def shard(self, model: LanguageModel) -> None:
        """Divide the parameters of every block and stage, and all others together; a second call does nothing."""
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return
        # A block may return a view. Nothing is changed in place, so this is harmless.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        mesh = init_device_mesh(self.root_device.type, (self.world_size,), mesh_dim_names=("ranks",))
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": self.policy}
        if self.experts > 1:
            self._share_experts(model)
        for part in model.modules():
            if isinstance(part, Block | Stage):
                fully_shard(part, reshard_after_forward=self.reshard_after_forward, **options)
        self._divided = fully_shard(model, **options)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Average no gradients inside the block: Lightning's, for all batches of a step but the last."""
        assert self._divided is not None, "`shard` has divided the model"
        self._divided.set_requires_gradient_sync(self.average_each_batch)
        try:
            yield
        finally:
            self._divided.set_requires_gradient_sync(True)

    def _share_experts(self, model: LanguageModel) -> None:
        """Give each rank its share of the experts of every layer. Ranks with the same experts divide them further.
        Their gradients already are means over the ranks that share them."""
        copies = self.world_size // self.experts
        mesh = init_device_mesh(self.root_device.type, (copies, self.experts), mesh_dim_names=("copies", "experts"))
        parts = [part for part in model.modules() if isinstance(part, Experts)]
        for part in parts:
            for name, weight in list(part.named_parameters()):
                share = distribute_tensor(weight.detach(), mesh["experts"], [Shard(0)], src_data_rank=None)
                setattr(part, name, nn.Parameter(share))
            part.group = mesh["experts"].get_group()
            # Their second dimension, for an expert may be all that a rank has of the first.
            fully_shard(
                part,
                mesh=mesh["copies"],
                mp_policy=self.policy,
                reshard_after_forward=self.reshard_after_forward,
                shard_placement_fn=lambda _: Shard(1),
            )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return weights and buffers; this rank's share of divided ones."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimiser; this rank's share of divided tensors."""
        return (optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write the folder of a checkpoint together: every rank writes whole tensors, and about as many bytes.

        All ranks wait for the whole of it (launchers kill the rank that writes as soon as another has ended for a
        signal), and all raise the error of any. Raises OSError.
        """
        folder, group = Path(filepath), self._host_group()
        weights, others, rest = checkpoints.split(checkpoint)
        ranks.agreed(lambda: checkpoints.prepare(folder), group)
        written: Any = {}
        index: dict[str, str] = {}  # file by the name of a weight
        for first, tensors in ((checkpoints.WEIGHTS, weights), (checkpoints.OTHERS, others)):
            stem, owners = first.partition(".")[0], shared_out(tensors, self.world_size)
            files = [f"{stem}-{rank + 1:05}-of-{self.world_size:05}.safetensors" for rank in range(self.world_size)]
            if first == checkpoints.WEIGHTS:
                index = {name: files[owners[name]] for name in tensors}
            mine = {}
            for name, value in tensors.items():  # in the same order on all ranks, which gather it together
                whole = undivided(value)
                if owners[name] == self.global_rank:
                    mine[name] = whole.cpu()
            try:
                if isinstance(written, dict):
                    written[files[self.global_rank]] = checkpoints.write_tensors(folder / files[self.global_rank], mine)
            except Exception as error:  # the others are on their way to gather the next tensors
                written = ranks.portable(error)
        of_ranks: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(of_ranks, written, group)
        for of_rank in of_ranks:
            if isinstance(of_rank, Exception):
                raise of_rank

        def write() -> None:
            write_json(folder / checkpoints.INDEX, {"metadata": {}, "weight_map": index})
            known = {name: facts for of_rank in of_ranks for name, facts in of_rank.items()}
            known[checkpoints.INDEX] = checkpoints.checksum(folder / checkpoints.INDEX)
            checkpoints.complete(folder, rest, known)

        ranks.agreed(write, group)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = True) -> dict[str, Any]:
        """Load weights and optimiser state, whatever the number of ranks that saved them.

        Every rank reads all tensors, one at a time, and keeps its share of each.
        """
        folder = Path(checkpoint_path)
        assert self.lightning_module is not None
        named = self.lightning_module.named_parameters(remove_duplicate=False)
        owners = {key: value for key, value in named if isinstance(value, DTensor)}
        content = checkpoints.read(folder, lambda name, value: _share(value, _owner(owners, name, value.shape)))
        self.lightning_module.load_state_dict(content["state_dict"])
        for optimizer, state in zip(self.optimizers, content["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
        return {**content, "state_dict": {}, "optimizer_states": []}

    def _host_group(self) -> Any:
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        return self._group


def shared_out(tensors: Mapping[str, Tensor], world: int) -> dict[str, int]:
    """Return the rank that writes each tensor: the largest first, to the rank with the fewest bytes so far."""
    bytes_R, owners = [0] * world, {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].numel() * tensors[name].element_size(), name)):
        owners[name] = rank = bytes_R.index(min(bytes_R))
        bytes_R[rank] += tensors[name].numel() * tensors[name].element_size()
    return owners


def _owner(parameters: Mapping[str, DTensor], name: str, shape: Sequence[int]) -> DTensor | None:
    """Return the parameter that a tensor of a checkpoint belongs to, if the tensor is divided like it."""
    if name.startswith(checkpoints.ENTRY):
        name = name.removeprefix(checkpoints.ENTRY).rpartition(".")[0]
    owner = parameters.get(name)
    return owner if owner is not None and owner.shape == torch.Size(shape) else None


def _share(value: Tensor, owner: DTensor | None) -> Tensor:
    """Return this rank's share of a tensor that every rank has read."""
    if owner is None:
        return value
    return distribute_tensor(value.to(owner.device), owner.device_mesh, owner.placements, src_data_rank=None)


def undivided(value: Tensor) -> Tensor:
    """Return a tensor that may be divided among ranks as a whole, on each of them."""
    return value.full_tensor() if isinstance(value, DTensor) else value
