"""FSDP2: weights, gradients and the optimiser's state are divided among ranks, block by block."""

from __future__ import annotations

import copy
import uuid
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

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

from gsm.cache.pieces import Context
from gsm.files import save_whole
from gsm.layers.block import Block
from gsm.layers.experts import Experts
from gsm.models.aggregation import Stage
from gsm.models.base import LanguageModel
from gsm.training.distributed import ranks, shards

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Sharded(ModelParallelStrategy):
    """Divides a model among all ranks, and saves it in parts while training goes on.

    A block's weights are gathered when its forward or backward begins, and given back when it ends; gradients are
    averaged and divided at once. Experts lie in their block and are divided like everything else: every rank computes
    all of them, on its own rows. With ``experts`` N, each of N neighbouring ranks has an N-th of the experts, and rows
    travel to them; the other ranks that have the same ones divide their weights.

    With ``context`` N, that many neighbouring ranks divide every sequence among themselves, too: each has its pieces of
    it, and layers exchange what they need of the others' (``gsm.cache.pieces``). The model is divided among all ranks
    as before.

    Every rank builds the whole model in its host's memory first (the weights follow from the seed alone).

    Args:
        gathered: in what blocks' weights travel and are used. None: as they are stored, float32, so that arithmetic is
            that of one device. ``bfloat16`` halves the traffic; then also what asks for float32 (norms, routers, mixing
            coefficients of the streams) computes with rounded weights.
        reduced: in what gradients are averaged; None: as they are.
        reshard_after_forward: give a block's weights back between its forward and its backward. Without, they are
            gathered once instead of twice, and all stay in memory during the step.
        process_group_backend: None: what Lightning chooses for the device.
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
        if experts < 1:
            raise ValueError(f"trainer.strategy.experts is {experts}, but at least 1 rank has to have the experts")
        if context < 1:
            raise ValueError(f"trainer.context is {context}, but at least 1 rank has to have a sequence")
        for name, value in (("gathered", gathered), ("reduced", reduced)):
            if value not in (None, *DTYPES):
                raise ValueError(f"trainer.strategy.{name} is {value!r}, but has to be null, float32 or bfloat16")
        super().__init__(process_group_backend=process_group_backend)
        self.policy = MixedPrecisionPolicy(
            param_dtype=gathered and DTYPES[gathered], reduce_dtype=reduced and DTYPES[reduced]
        )
        self.reshard_after_forward, self.context = reshard_after_forward, context
        self.experts = experts
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: list[Future[None]] = []
        self._context: Context | None = None
        self._group: Any = None  # of its own: collectives of two threads must not meet in one
        self._upload: tuple[tuple[int, Path], str, Future[Any]] | None = None  # the last parts: of what, name, future
        self._names: list[str] = []  # of the optimiser's parameters, in its order

    def setup_environment(self) -> None:
        """All ranks share the model, and groups of neighbours sequences: to Lightning these are tensor-parallel ones,
        which have the same data."""
        self._data_parallel_size, self._tensor_parallel_size = self.world_size // self.context, self.context
        super().setup_environment()

    @property
    def sequences(self) -> Context | None:
        """The ranks that have the pieces of this rank's sequences (None: it has whole ones)."""
        if self.context == 1:
            return None
        if self._context is None:
            self._context = Context(self.device_mesh["tensor_parallel"].get_group())
        return self._context

    def shard(self, model: LanguageModel) -> None:
        """Divides the parameters of every block and stage, and together what is in none; a second time does nothing."""
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return
        # What a block returns may be a view: that is harmless as long as nothing is changed in place, and nothing is.
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
        """Gives each rank its share of the experts of every layer, and divides these among those that have the same.
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
        """Notes what the optimiser's parameters are called, while those are in place that it has got."""
        super().setup_optimizers(trainer)
        names = {id(parameter): name for name, parameter in self._parameters().items()}
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        self._names = [names[id(parameter)] for group in groups for parameter in group["params"]]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights and buffers; of what is divided, this rank's share."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As the optimiser has it; of what is divided, this rank's share."""
        return (optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Copies this rank's share to the host and writes it in a thread of its own; ``finish`` waits for that.

        A second one of the same step, beside it, shares the parts of the first. Raises OSError, of an earlier one too.
        """
        path, step = Path(filepath), checkpoint["global_step"]
        parts = step, path.parent
        tensors, rest = shards.take_apart(checkpoint, self._names)
        if self._upload is None or self._upload[0] != parts:
            self.finish()
            self._upload = parts, *self._begin(tensors, path.parent / shards.FOLDER, step)
        _, name, upload = self._upload
        rest = copy.deepcopy(rest)  # now: training changes what it holds
        self._pending.append(self._writer.submit(self._commit, upload, path, rest, name))

    def finish(self) -> None:
        """Waits until all that was begun is on the disk. Raises OSError."""
        pending, self._pending = self._pending, []
        for one in pending:
            try:
                one.result()
            except CheckpointException as error:  # which is no Exception
                causes = [cause for cause, _ in error.failures.values()]
                refused = next((cause for cause in causes if isinstance(cause, OSError)), None)
                raise refused or RuntimeError(f"a checkpoint could not be written: {causes[0]}") from error

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = True) -> dict[str, Any]:
        """Takes up weights and the optimiser's state: of parts or of one file, from any number of ranks."""
        path = Path(checkpoint_path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
        owners = {key: value for key, value in self._parameters().items() if isinstance(value, DTensor)}
        if shards.FOLDER in checkpoint:
            kinds = shards.kinds(checkpoint).items()
            tensors = {key: _room(size, dtype, _owner(owners, key, size)) for key, (size, dtype) in kinds}
            shards.fill(tensors, checkpoint, path, process_group=self._host_group())
        else:
            tensors, _ = shards.take_apart(checkpoint, self._names)
            tensors = {key: _share(value, _owner(owners, key, value.shape)) for key, value in tensors.items()}
        rest = {"optimizer_states": checkpoint["optimizer_states"]}
        found = shards.put_together(rest, tensors, self._names)
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(found["state_dict"])
        for optimizer, state in zip(self.optimizers, found["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
        return {**checkpoint, "state_dict": {}, "optimizer_states": []}

    def teardown(self) -> None:
        """Nothing that was saved is left half written."""
        try:
            self.finish()
        finally:
            super().teardown()

    def _begin(self, tensors: shards.Tensors, folder: Path, step: int) -> tuple[str, Future[Any]]:
        """Starts to write the parts; where, and when they are all there."""
        name = self.broadcast(f"{step:08}-{uuid.uuid4().hex[:8]}")
        writer = shards.Writer(folder / name)
        upload = dcp.async_save(tensors, storage_writer=writer, process_group=self._host_group())
        assert isinstance(upload, Future)
        return name, upload

    def _commit(self, upload: Future[Any], path: Path, rest: dict[str, Any], name: str) -> None:
        """The small file, once the parts of all ranks are there; what it stood for before may go.

        All ranks wait for it (launchers kill the one that writes as soon as another has ended for a signal), and all
        raise what has kept it from being written.
        """
        metadata = upload.result()

        def write() -> None:
            parts = shards.described(metadata, path.parent / shards.FOLDER / name, self._names)
            save_whole({**rest, shards.FOLDER: parts}, path)
            shards.sweep(path.parent, keep=name)

        ranks.agreed(write, self._host_group())

    def _host_group(self) -> Any:
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        return self._group

    def _parameters(self) -> dict[str, nn.Parameter]:
        assert self.lightning_module is not None
        return dict(self.lightning_module.named_parameters(remove_duplicate=False))


def _owner(parameters: Mapping[str, DTensor], key: str, shape: Sequence[int]) -> DTensor | None:
    """The parameter that a tensor of a checkpoint belongs to, if it is divided like it."""
    name = key.removeprefix(shards.WEIGHTS)
    if key.startswith(shards.OPTIMIZER):
        name = key.removeprefix(shards.OPTIMIZER).rpartition("/")[0]
    owner = parameters.get(name)
    return owner if owner is not None and owner.shape == torch.Size(shape) else None


def _room(size: Sequence[int], dtype: torch.dtype, owner: DTensor | None) -> Tensor:
    """Where this rank's share is read to."""
    return torch.empty(size, dtype=dtype) if owner is None else torch.zeros_like(owner, dtype=dtype).detach()


def _share(value: Tensor, owner: DTensor | None) -> Tensor:
    """This rank's share of a tensor that every rank has read."""
    if owner is None:
        return value
    return distribute_tensor(value.to(owner.device), owner.device_mesh, owner.placements, src_data_rank=None)


def undivided(value: Tensor) -> Tensor:
    """A tensor that may be divided among ranks, as a whole on each of them."""
    return value.full_tensor() if isinstance(value, DTensor) else value
