"""Base class of augmentations: masks of the edges and nodes of a graph, and their application."""

from __future__ import annotations

import copy
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from gas.augment.loss import mh_aug_loss
from gas.augment.units import GraphState, Units, check_mask, mask_node_features
from gas.augment.views import Views
from gas.graph import is_row_per_edge
from gas.native import check_flags, check_integer


class Resumable(ABC):
    """Base class of objects with a random generator and a ``state_dict`` of tensors.

    Args:
        generator: A generator of the CPU. (default: a new one, seeded from PyTorch's)

    Raises:
        ValueError: If the generator is of another device.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        device = getattr(generator, "device", None)
        if generator is not None and (device is None or device.type != "cpu"):
            found = repr(generator) if device is None else f"on {device}"
            raise ValueError(
                f"'generator' is {found}, expected one of the CPU, which serves graphs on every "
                "device: torch.Generator()"
            )
        if generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_())
            generator = torch.Generator().manual_seed(seed)
        self.generator = generator

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the state from which the object continues with the same random numbers."""

    @abstractmethod
    def _load(self, state: dict[str, Tensor]) -> None:
        """Restore a state that was checked."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state.

        Raises:
            ValueError: If it is the state of another graph or class; nothing has changed then.
        """
        self.check_state(state)
        mine = self.state_dict()
        self._load({key: value.to(mine[key].device) for key, value in state.items()})

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse the state of another graph or class."""
        mine = self.state_dict()
        if state.keys() != mine.keys():
            raise ValueError(
                f"'state' has the entries {sorted(state)}, expected {sorted(mine)}: it was saved "
                "from another class"
            )
        for key, tensor in mine.items():
            fits = state[key].dtype == tensor.dtype
            if key not in self._any_length:
                fits = fits and state[key].shape == tensor.shape
            if not fits:
                raise ValueError(
                    f"'state' has '{key}' of {state[key].dtype} and shape "
                    f"{list(state[key].shape)}, expected {tensor.dtype} of shape "
                    f"{list(tensor.shape)}: it was saved for another graph"
                )

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch's generators can't be pickled.
        return {**self.__dict__, "generator": self.generator.get_state().numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = torch.Generator()
        generator.set_state(torch.from_numpy(state["generator"]))
        self.__dict__.update(state, generator=generator)

    _any_length: tuple[str, ...] = ()  # Entries of the state that grow.


class Augmentation(Resumable, BaseTransform):
    """Base class of augmentations of one graph by masks; the graph itself is never modified.

    Calling it draws new masks and returns an augmented copy of the graph: edges are dropped, and
    the features of masked nodes are zero, those of the others multiplied by ``n / kept``. Degrees
    change with the edges: normalise the copy (``T.GCNNorm()``, or layers that do it themselves),
    not the graph before.

    Args:
        data: The graph, with ``edge_index``.
        undirected: Drop an edge and its reverse together. (default: ``False``)
        num_steps: Steps of each call. (default: ``1``)
        generator: A generator of the CPU, whatever device the graph is on.
            (default: one of its own, seeded from PyTorch's)

    Raises:
        ValueError: If the graph or an option is unusable, naming the argument.
    """

    view_loss = staticmethod(mh_aug_loss)
    """The loss of batches with views, unless :func:`gas.train_epoch` is given another."""

    @check_flags
    def __init__(
        self,
        data: Data,
        *,
        undirected: bool = False,
        num_steps: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(data, Data):
            raise ValueError(
                f"'data' is a {type(data).__name__}, expected the graph, a torch_geometric Data"
            )
        check_integer("num_steps", num_steps, 0)
        self.units = Units(data, undirected)
        self.undirected = undirected
        self.num_steps = num_steps
        super().__init__(generator)
        self._current = self._previous = self._keep_all()

    # Masks --------------------------------------------------------------------------------------

    @property
    def edge_mask(self) -> Tensor:
        """Return a mask of the kept columns of ``data.edge_index``, of shape ``[E]``."""
        return self._current.edge_mask.clone()

    @property
    def node_mask(self) -> Tensor:
        """Return a mask of the nodes that keep their features, of shape ``[N]``."""
        return self._current.node_mask.clone()

    @property
    def previous_edge_mask(self) -> Tensor:
        """Return :attr:`edge_mask` before the last call, :meth:`run` or :meth:`step`."""
        return self._previous.edge_mask.clone()

    @property
    def previous_node_mask(self) -> Tensor:
        """Return :attr:`node_mask` before the last call, :meth:`run` or :meth:`step`."""
        return self._previous.node_mask.clone()

    @property
    def states(self) -> tuple[GraphState, GraphState]:
        """Return the previous state and the current one."""
        return self._previous, self._current

    @property
    def previous_is_milder(self) -> Tensor:
        """Return whether the previous state drops less, by fractions, of shape ``[]``.

        The result is a tensor, so that a GPU isn't synchronised.
        """
        return self._previous.drop_fractions.sum() < self._current.drop_fractions.sum()

    def reset(self, edge_mask: Tensor | None = None, node_mask: Tensor | None = None) -> None:
        """Set a state, which becomes the previous one, too.

        Args:
            edge_mask: Of shape ``[E]``, bool. (default: every edge is kept)
            node_mask: Of shape ``[N]``, bool. (default: every node is kept)

        Raises:
            ValueError: If a mask is that of another graph, or drops every node.
        """
        self._set_state(self._state_of_masks(edge_mask, node_mask))
        self._previous = self._current

    def _keep_all(self) -> GraphState:
        """Return the state that drops nothing."""
        size, device = self.units.size, self.units.device
        edges = torch.ones(size, dtype=torch.bool, device=device)
        nodes = torch.ones(self.units.num_nodes, dtype=torch.bool, device=device)
        return GraphState(self.units, edges, nodes)

    def _state_of_masks(self, edge_mask: Tensor | None, node_mask: Tensor | None) -> GraphState:
        """Return the state that the user's masks keep, after they were checked."""
        view = self._keep_all()
        edges = view.edges if edge_mask is None else self.units.gather(edge_mask)
        nodes = view.node_mask
        if node_mask is not None:
            size, device = self.units.num_nodes, self.units.device
            check_mask("node_mask", node_mask, size, "nodes", device)
            if not bool(node_mask.any()):
                raise ValueError(
                    f"'node_mask' drops all {size} nodes, a state of probability zero: keep at "
                    "least one"
                )
            nodes = node_mask.clone()
        return GraphState(self.units, edges, nodes)

    def _set_state(self, view: GraphState) -> None:
        """Set the current state."""
        self._current = view

    # Steps --------------------------------------------------------------------------------------

    def _step(self) -> Tensor:
        """Draw new masks; return whether they were accepted, of shape ``[]``, bool."""
        raise NotImplementedError

    def step(self) -> bool:
        """Take one step, synchronise, and return whether its masks were accepted."""
        self._previous = self._current
        return bool(self._step())

    def run(self, num_steps: int | None = None) -> None:
        """Take several steps; on a GPU the host doesn't synchronise with any of them.

        Args:
            num_steps: How many. (default: ``self.num_steps``)
        """
        num_steps = self.num_steps if num_steps is None else num_steps
        check_integer("num_steps", num_steps, 0)
        self._previous = self._current
        for _ in range(num_steps):
            self._step()

    def _seeds(self, count: int) -> list[int]:
        """Draw seeds of kernels."""
        return torch.empty(count, dtype=torch.int64).random_(generator=self.generator).tolist()

    def rng_fingerprint(self) -> int:
        """Return a fingerprint of the random state: equal after equal draws from equal seeds."""
        return zlib.crc32(self.generator.get_state().numpy().data)

    # Graphs -------------------------------------------------------------------------------------

    def forward(self, data: Data) -> Data:
        """Take ``num_steps`` steps and return the augmented copy of ``data``."""
        self._check(data)
        self.run()
        return self.apply(data)

    def apply(self, data: Data, previous: bool = False) -> Data:
        """Return an augmented copy of the graph, without taking a step.

        Args:
            data: The graph that the augmentation was built on; its features may differ.
            previous: Apply the previous masks. (default: the current ones)

        Raises:
            ValueError: If it is another graph, or has no features to mask.
        """
        self._check(data)
        view = self._previous if previous else self._current
        out = copy.copy(data)
        for key in data.keys():  # noqa: SIM118  # Data is no dictionary.
            if is_row_per_edge(data, key):
                out[key] = data[key][view.edge_mask]
        out.edge_index = data.edge_index[:, view.edge_mask]
        out.x = mask_node_features(data.x, view.node_mask, view.scale)
        return out

    def views(self, data: Data, transform: Callable[[Data], Data] | None = None) -> Views:
        """Return a :class:`Views`, which cuts views of both states out of mini-batches."""
        return Views(self, data, transform)

    def check(self, data: Data) -> None:
        """Refuse another graph, and one without features to mask.

        Raises:
            ValueError: If the edges aren't those that the augmentation was built on, or were
                changed since; or if ``x`` isn't one floating-point row for each node.
        """
        self.units.check(data)
        x = data.get("x")
        if x is None or not x.is_floating_point() or x.size(0) != self.units.num_nodes:
            found = None if x is None else f"{x.dtype} of shape {list(x.shape)}"
            raise ValueError(
                f"'x' is {found}, expected floating-point features with one row for each of the "
                f"{self.units.num_nodes} nodes"
            )

    def _check(self, data: Data) -> None:
        self.check(data)
        found, wanted = data.x.device, self.units.device
        if found != wanted:
            raise ValueError(
                f"'x' is on {found}, but the augmentation was built on {wanted}: move the graph "
                "first, then build it"
            )

    # Checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to continue from, with the same masks and random numbers."""
        return {
            "edges": self._current.edges,
            "nodes": self._current.node_mask,
            "previous_edges": self._previous.edges,
            "previous_nodes": self._previous.node_mask,
            "generator": self.generator.get_state(),
        }

    def _load(self, state: dict[str, Tensor]) -> None:
        self._set_state(GraphState(self.units, state["edges"].clone(), state["nodes"].clone()))
        before = state["previous_edges"].clone(), state["previous_nodes"].clone()
        self._previous = GraphState(self.units, *before)
        self.generator.set_state(state["generator"])

    def __repr__(self) -> str:
        unit = "pairs" if self.undirected else "edges"
        name = self.__class__.__name__
        return f"{name}(num_nodes={self.units.num_nodes}, num_{unit}={self.units.size})"
