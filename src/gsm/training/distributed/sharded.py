"""FSDP2: weights, gradients and the optimiser's state are divided among ranks, block by block."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from lightning import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from gsm.errors import within
from gsm.files import save_whole
from gsm.layers.block import Block
from gsm.layers.experts import Experts
from gsm.models.aggregation import Stage
from gsm.models.base import LanguageModel
from gsm.training.distributed import ranks, shards

if TYPE_CHECKING:
    from gsm.context import Context

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Sharded(ModelParallelStrategy):
    """Divide a model among all ranks, and save it in parts.

    A block's weights are gathered when its forward or backward begins, and given back when it ends; gradients are
    averaged and divided at once. Experts lie in their block and are divided like everything else: every rank computes
    all of them, on its own rows. With ``experts`` N, each of N neighbouring ranks has an N-th of the experts, and rows
    travel to them. Ranks with the same experts divide the weights of these among themselves.

    With ``context`` N, N neighbouring ranks divide every sequence among themselves, too: each has some pieces of it,
    and layers exchange the entries that they need (``gsm.context``). The model is divided among all ranks as before.

    Every rank builds the whole model in its host's memory first (the weights follow from the seed alone).

    Args:
        gathered: dtype in which the weights of blocks travel and are used. None: as they are stored, float32, with the
            arithmetic of one device. ``bfloat16`` halves the traffic; then norms, routers and mixing coefficients of
            the streams, which compute in float32, have rounded weights too.
        reduced: dtype in which gradients are averaged; None: their own.
        reshard_after_forward: give a block's weights back between its forward and its backward. If false, they are
            gathered once instead of twice, and all stay in memory during the step.
        process_group_backend: None: Lightning chooses it for the device.
        context: ranks that divide the same sequences.
        experts: ranks that divide the experts of a layer.
    """

    def __init__(
        self,
        gathered: Literal["float32", "bfloat16"] | None = None,
        reduced: Literal["float32", "bfloat16"] | None = None,
        reshard_after_forward: bool = True,
        process_group_backend: str | None = None,
        context: int = 1,
        experts: int = 1,
    ) -> None:
        within(1, experts=experts, context=context)
        for name, value in (("gathered", gathered), ("reduced", reduced)):
            if value not in (None, *DTYPES):
                raise ValueError(f"{name}={value} is not allowed because it is unknown. Use null, float32 or bfloat16.")
        super().__init__(process_group_backend=process_group_backend)
        self.policy = MixedPrecisionPolicy(
            param_dtype=gathered and DTYPES[gathered], reduce_dtype=reduced and DTYPES[reduced]
        )
        self.reshard_after_forward, self.context = reshard_after_forward, context
        self.experts = experts
        self._context: Context | None = None
        self._group: Any = None  # of the hosts: no GPU is waited for
        self._names: list[str] = []  # names of the optimiser's parameters, in its order

    def setup_environment(self) -> None:
        """All ranks share the model, and groups of neighbours sequences: to Lightning these are tensor-parallel ones,
        which have the same data."""
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
        fully_shard(model, **options)

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

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Note the names of the optimiser's parameters, while the model still has these parameters."""
        super().setup_optimizers(trainer)
        names = {id(parameter): name for name, parameter in self._parameters().items()}
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        self._names = [names[id(parameter)] for group in groups for parameter in group["params"]]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return weights and buffers; this rank's share of divided ones."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimiser; this rank's share of divided tensors."""
        return (optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write this rank's share, then the small file, and remove parts that no file stands for.

        All ranks wait for the small file (launchers kill the rank that writes as soon as another has ended for a
        signal), and all raise its error. Raises OSError.
        """
        path, group = Path(filepath), self._host_group()
        tensors, rest = shards.take_apart(checkpoint, self._names)
        name = self.broadcast(f"{checkpoint['global_step']:08}-{uuid.uuid4().hex[:8]}")
        folder = path.parent / shards.FOLDER / name
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        try:
            dcp.save(shards.separate(tensors), storage_writer=writer, process_group=group)
        except CheckpointException as error:  # a BaseException, not an Exception
            causes = [cause for cause, _ in error.failures.values()]
            refused = next((cause for cause in causes if isinstance(cause, OSError)), None)
            raise refused or RuntimeError(f"a checkpoint could not be written: {causes[0]}") from error
        of_ranks: list[dict[str, list[int]]] = [{}] * self.world_size
        torch.distributed.all_gather_object(of_ranks, shards.described(folder, self.global_rank), group)
        files = {part: description for of_rank in of_ranks for part, description in of_rank.items()}

        def write() -> None:
            save_whole({**rest, shards.FOLDER: {"folder": name, "names": self._names, "files": files}}, path)
            shards.sweep(path.parent)

        ranks.agreed(write, group)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = True) -> dict[str, Any]:
        """Take up weights and the optimiser's state: of parts or of one file, from any number of ranks."""
        path = Path(checkpoint_path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
        owners = {key: value for key, value in self._parameters().items() if isinstance(value, DTensor)}
        if shards.FOLDER in checkpoint:
            kinds = shards.kinds(checkpoint, path).items()
            tensors = {key: _room(size, dtype, _owner(owners, key, size)) for key, (size, dtype) in kinds}
            shards.fill(tensors, checkpoint, path, process_group=self._host_group())
        else:
            tensors, _ = shards.take_apart(checkpoint, self._names)
            tensors = {key: _share(value, _owner(owners, key, value.shape)) for key, value in tensors.items()}
        rest = {"optimizer_states": checkpoint["optimizer_states"]}
        states = shards.put_together(rest, tensors, self._names)
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(states["state_dict"])
        for optimizer, state in zip(self.optimizers, states["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
        return {**checkpoint, "state_dict": {}, "optimizer_states": []}

    def _host_group(self) -> Any:
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        return self._group

    def _parameters(self) -> dict[str, nn.Parameter]:
        assert self.lightning_module is not None
        return dict(self.lightning_module.named_parameters(remove_duplicate=False))


def _owner(parameters: Mapping[str, DTensor], key: str, shape: Sequence[int]) -> DTensor | None:
    """Return the parameter that a tensor of a checkpoint belongs to, if the tensor is divided like it."""
    name = key.removeprefix(shards.WEIGHTS)
    if key.startswith(shards.OPTIMIZER):
        name = key.removeprefix(shards.OPTIMIZER).rpartition("/")[0]
    owner = parameters.get(name)
    return owner if owner is not None and owner.shape == torch.Size(shape) else None


def _room(size: Sequence[int], dtype: torch.dtype, owner: DTensor | None) -> Tensor:
    """Return an empty tensor for this rank's share."""
    return torch.empty(size, dtype=dtype) if owner is None else torch.zeros_like(owner, dtype=dtype).detach()


def _share(value: Tensor, owner: DTensor | None) -> Tensor:
    """Return this rank's share of a tensor that every rank has read."""
    if owner is None:
        return value
    return distribute_tensor(value.to(owner.device), owner.device_mesh, owner.placements, src_data_rank=None)


def undivided(value: Tensor) -> Tensor:
    """Return a tensor that may be divided among ranks as a whole, on each of them."""
    return value.full_tensor() if isinstance(value, DTensor) else value
