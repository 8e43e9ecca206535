"""Matrices whose rows are encoded, such as features on disk: tensors to PyTorch and to PyG.

What an encoding is, and where rows lie, is for a subclass to say. Here is what makes it a tensor.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten
Self = TypeVar("Self", bound="EncodedRows")


def is_encoded(x: Any) -> bool:
    """Whether features are :class:`EncodedRows`."""
    return isinstance(x, EncodedRows)


def decoded(x: Any) -> Any:
    """The values of encoded rows, all of them; anything else as it is."""
    return x.decoded() if isinstance(x, EncodedRows) else x


class EncodedRows(Tensor):
    """A matrix whose rows are decoded when they are read, of shape ``[rows, width]``.

    Rows of it, by ``x[index]``, ``x[a:b]``, ``x[mask]`` or ``index_select``, are decoded alone;
    whatever else is done with it, all are. Either way comes an ordinary tensor, a copy. Only
    ``clone`` and copies of Python's are encoded. It is never written to.

    A subclass has :meth:`read` and :meth:`rearranged`; what it notes in ``__dict__`` is shared by
    its aliases.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def make(cls: type[Self], num_rows: int, width: int, dtype: torch.dtype) -> Self:
        """A matrix of this shape, of values of a type."""
        with torch.inference_mode(False):  # Whose tensors would be of no use to training.
            return Tensor._make_wrapper_subclass(
                cls, (num_rows, width), dtype=dtype, device=torch.device("cpu")
            )

    def read(self, index: Tensor, p: float = 0.0, seed: int = 0) -> Tensor:
        """Decodes rows, and drops elements of them on the way.

        Args:
            index: The rows, of shape ``[n]``, int64.
            p: The probability of dropping an element; see :func:`gas.native.dropout.dropout`.
                (default: ``0.0``)
            seed: See there. (default: ``0``)

        Returns:
            A new tensor of shape ``[n, width]``.

        Raises:
            IndexError: If a row doesn't exist.
        """
        raise NotImplementedError

    def expect(self, index: Tensor) -> None:
        """Has the system read ahead rows that will be read, where that is of use.

        Args:
            index: The rows, of shape ``[n]``, int64.
        """

    def rearranged(self: Self, index: Tensor) -> Self:
        """Copies rows as they are encoded, to a place of the same kind.

        Args:
            index: The rows, of shape ``[n]``, int64.

        Raises:
            IndexError: If a row doesn't exist.
        """
        raise NotImplementedError

    @property
    def plain(self) -> Tensor | None:
        """A tensor in which the values lie as they are; ``None`` where each has to be decoded."""
        return None

    @property
    def in_memory(self) -> list[Tensor]:
        """What of it takes memory of the process."""
        return []

    def decoded(self) -> Tensor:
        """All values, in a new tensor of shape ``[rows, width]``."""
        return self.read(torch.arange(self.size(0), device="cpu"))

    # Being a tensor -------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _check_reads_only(func, args, kwargs)
        x = args[0] if args else None
        if isinstance(x, EncodedRows):
            if func in (aten.detach.default, aten.alias.default):
                return x._alias()
            if func is aten.clone.default:
                return x.rearranged(torch.arange(x.size(0), device="cpu"))
            if func is aten.index_select.default and args[1] in (0, -2):
                return x.read(args[2].view(-1).long())
            if func is aten.slice.Tensor and (len(args) < 2 or args[1] in (0, -2)):
                return x[slice(*args[2:])]
        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs))

    def __getitem__(self, index: Any) -> Any:
        rows = self._rows(index)
        if rows is None:
            return self.decoded()[index]
        return self.read(rows.view(-1)).view(*rows.shape, self.size(1))

    def _rows(self, index: Any) -> Tensor | None:
        """The rows that an index names, of any shape; ``None`` if it names something else."""
        size = self.size(0)
        if isinstance(index, slice) and (index.step or 1) > 0:
            return torch.arange(*index.indices(size), device="cpu")
        if isinstance(index, int) and not isinstance(index, bool):
            index = torch.tensor(index, device="cpu")
        if not isinstance(index, Tensor):
            return None
        index = index.cpu()
        if index.dtype == torch.bool:
            return index.nonzero().view(-1) if index.shape == (size,) else None
        if index.dtype not in (torch.int64, torch.int32):
            return None
        index = index.long()
        return torch.where(index < 0, index + size, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse("x[...] = ...")

    @property
    def _version(self) -> int:  # type: ignore[override]
        return 0  # PyTorch takes copies of rows for views, and counts what is done to them.

    def _alias(self: Self) -> Self:
        other = type(self).make(self.size(0), self.size(1), self.dtype)
        other.__dict__.update(self.__dict__)
        return other

    def __copy__(self: Self) -> Self:
        return self._alias()

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return memo.setdefault(id(self), self.clone())

    def data_ptr(self) -> int:
        """Nothing: whoever computes with addresses has to be given values."""
        raise RuntimeError(
            "these rows are encoded, and have no memory of values: pass rows of them, such as "
            "x[index], or all, x.decoded()"
        )

    def numpy(self, *, force: bool = False) -> Any:
        """All values; see :meth:`torch.Tensor.numpy`."""
        return self.decoded().numpy()

    def tolist(self) -> list[Any]:
        """All values; see :meth:`torch.Tensor.tolist`."""
        return self.decoded().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, dtype={self.dtype})"


def _check_reads_only(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ``TypeError`` if an operator would write to encoded rows."""
    if not func._schema.is_mutable:
        return
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        if any(map(is_encoded, given if isinstance(given, list | tuple) else [given])):
            _refuse(func._schema.name.split("::")[-1])


def _refuse(what: str) -> NoReturn:
    raise TypeError(
        f"{what} can't write to encoded rows: change the values, x.decoded() or those that were "
        "encoded, and encode them anew"
    )
