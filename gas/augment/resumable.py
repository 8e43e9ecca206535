"""Objects with a random generator, which resume exactly from a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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
