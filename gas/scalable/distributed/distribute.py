"""``distribute``: train one model on many ranks."""

# No ``from __future__ import annotations``: DistributedDataParallel checks those of a hook.
import importlib
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data

from gas.graph import SHARD, local_graph
from gas.history import Codec
from gas.loader import SubData
from gas.native import check_flags
from gas.scalable.distributed import Group
from gas.scalable.distributed.ranks import ModelRanks, Traffic, Weight
from gas.scalable.model import ScalableGNN


class Distributed(DistributedDataParallel):
    """A model on one of many ranks; made by :func:`gas.distribute`.

    It is PyTorch's ``DistributedDataParallel``. Other attributes, such as ``predict``, are those of
    the model itself, ``module``.
    """

    module: ScalableGNN

    def __init__(self, model: ScalableGNN, **kwargs: Any) -> None:
        assert model.ranks is not None
        if model.device.type == "cpu":  # This group has the time-out of gas.
            kwargs.setdefault("process_group", model.ranks.group.gradients)
        super().__init__(model, **kwargs)
        self.register_comm_hook(model.ranks, average_gradients)
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes of the model, such as ``io``, on the model."""
        model = self.__dict__.get("_modules", {}).get("module")
        if (
            "_is_made" in self.__dict__
            and name not in self.__dict__
            and (name in model.__dict__ or isinstance(getattr(type(model), name, None), property))
        ):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a distributed model can't be copied or pickled, because its connections can't: copy "
            "model.module, and distribute the copy"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; layer-wise inference isn't wrapped. See :class:`gas.ScalableGNN`."""
        if kwargs.get("loader") is not None:
            return self.module(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def views(self, batch: SubData, bank: str = "original") -> tuple[Tensor, ...]:
        """See :meth:`gas.ScalableGNN.views`."""
        return super().__call__(batch, views=bank)

    @property
    def traffic(self) -> Traffic:
        """Return the rows sent by this rank so far, and its waiting time."""
        assert self.module.ranks is not None
        return self.module.ranks.traffic(self.module.histories)


def average_gradients(ranks: ModelRanks, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average the ranks' gradients: a communication hook of ``DistributedDataParallel``.

    If a rank doesn't take part in time, the error names it.
    """
    gradient = bucket.buffer().div_(ranks.group.size)
    return ranks.group.start_sum(gradient, "averaging the gradients", bucket.is_last())


@check_flags
def distribute(
    model: Module,
    graph: Data | None = None,
    *,
    overlap: bool = False,
    dtype: Codec | torch.dtype | str | None = None,
    weight: Weight = "train_mask",
    timeout: float | None = None,
    wrap: bool = True,
    **kwargs: Any,
) -> Any:
    """Train a model on many processes, each with a shard of the graph and its histories.

    The processes are those of ``torch.distributed``, which ``torchrun`` starts; the training loop
    is that of one process::

        torch.distributed.init_process_group("gloo")
        graph = gas.cluster(data, num_parts=40, shards=torch.distributed.get_world_size())
        model = gas.distribute(gas.to_scalable(net, data))
        for batch in gas.SubgraphLoader(graph, batch_size=5, shuffle=True):
            loss = ...  # Of model(batch).
            loss.backward()  # Averages the gradients of all processes.
            optimizer.step()
        pred = model.predict(graph)  # Of all nodes, on every process.

    A rank owns the rows of its shard, and has replicas of other ranks' rows that its own nodes
    read. After each step the rows of its batch are sent to the ranks with replicas of them. A step
    of W ranks equals one step of one process that computes W batches, which all see the histories
    as they were when the step began, and takes the mean of their gradients, weighted by labelled
    nodes.

    If the graph has no ``shards``, such as under a ``DistributedSampler`` of parts, every rank has
    all rows, and those of every batch are sent to all ranks. Parts that the sampler repeats, to
    give all ranks equally many, may be in batches of two ranks in one step, which both push them:
    ranks then have the rows of one or of the other.

    Args:
        model: The model, a :class:`gas.ScalableGNN`, of the whole graph or of a shard; all ranks
            begin with the weights of rank 0.
        graph: The graph of the loaders, which the ranks then compare at once.
            (default: they compare it with the first mini-batch)
        overlap: Allow the transfer of rows to take until the end of the next step: they become
            visible one step later. (default: ``False``, it overlaps with the backward pass)
        dtype: The precision in which rows are sent; see :class:`gas.History`.
            (default: that of the histories)
        weight: The weight of a batch in the mean of the gradients: the name of a mask, whose
            in-batch nodes are counted; a function of a batch; or ``None``, the same for all. A loss
            is a mean over these nodes; the loss of a batch without any is ignored, even if it is
            NaN. All in-batch nodes count if the graph has no ``train_mask``, or if a batch is
            passed in pieces, ``model(batch.x, batch.adj_t, *args)``. The gradient of a batch is
            multiplied at the model's outputs, so that several batches may be added up before a
            step; outputs with ``push=False``, and of a full batch, have the same weight on all
            ranks. (default: ``"train_mask"``)
        timeout: The seconds after which a rank that doesn't respond raises an error that names it.
            (default: that of ``init_process_group``)
        wrap: Return the model in ``DistributedDataParallel``; ``False`` only connects it, for
            libraries that wrap it themselves, such as Lightning. (default: ``True``)
        **kwargs: Further arguments of ``DistributedDataParallel``.

    Returns:
        The model in :class:`torch.nn.parallel.DistributedDataParallel`, which also has the model's
        attributes, such as ``predict``; or the model.

    Raises:
        RankError: A ``RuntimeError``: if ranks differ in the program, packages or graph, or one
            doesn't respond; on every rank, naming it. In a backward pass it is a plain
            ``RuntimeError`` that quotes it.
        RuntimeError: If ``torch.distributed`` hasn't been initialised.
        ValueError: If the model is none, or is distributed already.
    """
    if not isinstance(model, ScalableGNN) or model.ranks is not None:
        what = "distributed already" if hasattr(model, "ranks") else f"a {type(model).__name__}"
        raise ValueError(
            f"'model' is {what}, expected a gas.ScalableGNN: make one with "
            "gas.to_scalable(model, data), and distribute it once"
        )
    if timeout is not None and not timeout > 0:
        raise ValueError(f"'timeout' is {timeout}, expected seconds above 0")
    codec = None if dtype is None else Codec.of(dtype)
    group = Group(timeout)
    group.check_equal_on_ranks(_describe_settings(model, overlap, codec, weight))
    model.ranks = ModelRanks(group, overlap, codec, weight)
    try:
        if graph is not None:
            model.ranks.bind(model, local_graph(graph).get(SHARD))
        return Distributed(model, **kwargs) if wrap else model
    except BaseException:  # It isn't distributed then, and may be again.
        model.ranks = None
        group.close()
        raise


def _describe_settings(
    model: ScalableGNN, overlap: bool, codec: Codec | None, weight: Weight
) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks."""
    return {
        "gas": importlib.import_module("gas").__version__,  # It imports this module.
        "PyTorch": torch.__version__,
        "a model of class": type(model).__name__,
        "parameters": str([list(p.shape) for p in model.parameters()]),
        "overlap": overlap,
        "dtype": str(codec),
        "weight": "a function" if callable(weight) else str(weight),
    }
