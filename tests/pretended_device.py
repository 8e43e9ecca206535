"""A CUDA device that isn't there: what makes the host wait for it, and what streams wait for.

Its tensors say that they are on ``cuda:0`` and hold others on the host, by which operators compute:
results are those of the CPU. Everything that reads a number of them, or whose size depends on one,
is noted as a wait of the host, and so are copies that block. An operator is refused that takes
tensors of both sides, as on a device.

It can't show what else PyTorch's kernels for CUDA wait for, nor anything of ours.
"""

import contextlib
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from gas.history import History
from gas.history.transfer import HostLink

DEVICE = torch.device("cuda", 0)
# What waits on CUDA: it needs a number of the device, to return it or to allocate its result.
WAITS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
}


class There(Tensor):
    """A tensor that says it is on the device."""

    @staticmethod
    def __new__(cls, inner, pretended):
        how = {}
        if inner.layout == torch.strided:
            how = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        kind = {"dtype": inner.dtype, "device": "cpu"}
        return Tensor._make_wrapper_subclass(cls, inner.size(), **how, **kind)

    def __init__(self, inner, pretended):
        self.on_host, self.pretended = inner, pretended

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)
    layout = property(lambda self: self.on_host.layout)
    is_sparse_csr = property(lambda self: self.layout == torch.sparse_csr)
    is_cuda, is_cpu = True, False

    def data_ptr(self):
        return self.on_host.data_ptr()

    def record_stream(self, stream):
        self.pretended.log.append(("use", stream.name, self))

    def __repr__(self):
        return f"There({self.on_host})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        pretended = next(leaf.pretended for leaf in leaves if isinstance(leaf, cls))
        if any(not isinstance(leaf, cls) and leaf.dim() > 0 for leaf in leaves):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        if _waits(func, args, kwargs):
            pretended.wait(str(func))
        inner = tree_map(lambda x: x.on_host if isinstance(x, cls) else x, (args, kwargs))
        out = func(*inner[0], **inner[1])
        out = tree_map(lambda x: cls(x, pretended) if isinstance(x, Tensor) else x, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


def _waits(func, args, kwargs):
    name = func._schema.name.split("::")[1]
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in WAITS


def _pinned(tensor):
    tensor.is_pretended = True
    return tensor


class Stream:
    """A stream that notes what it is told to do."""

    def __init__(self, pretended, name):
        self.pretended, self.name = pretended, name

    def record_event(self):
        event = object()
        self.pretended.log.append(("record", self.name, event))
        return event

    def wait_event(self, event):
        self.pretended.log.append(("wait", self.name, event))


class Pretended(TorchFunctionMode):
    """In its context, and in that of threads of :attr:`pool`, there is the device.

    * ``waits``: what made the host wait, and where.
    * ``pinned``: what was copied to pinned memory.
    * ``log``: copies to the device, ``("copy", stream, "pinned" or "pageable", its tensor)``; what
      streams record and wait for, ``("record", stream, event)``, ``("wait", stream, event)``; and
      whose use of memory is noted, ``("use", stream, tensor)``.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.waits, self.log, self.pinned = [], [], []
        self.computes, self.copies = Stream(self, "computes"), Stream(self, "copies")
        self._local = threading.local()
        pretended = self

        class Pool(ThreadPoolExecutor):
            def submit(self, function, *args):
                def there(*args):
                    with pretended:
                        return function(*args)

                return super().submit(there, *args)

        monkeypatch.setattr("gas.scalable.prefetch.ThreadPoolExecutor", Pool)
        monkeypatch.setattr("gas.loader.transfer._copy_stream", lambda device: self.copies)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    @property
    def current(self):
        return getattr(self._local, "stream", self.computes)

    @contextlib.contextmanager
    def _on(self, stream):
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def wait(self, what):
        frames = traceback.extract_stack()
        ours = [frame for frame in frames if "/gas/" in frame.filename]
        where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in ours]
        self.waits.append((what, *where[-2:]))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, Tensor) and name == "to":
            return self._to(func, *args, **kwargs)
        if isinstance(first, Tensor) and name == "pin_memory":
            if hasattr(first, "is_pretended"):
                return first
            self.pinned.append(first)
            return _pinned(
                torch.empty_strided(first.shape, first.stride(), dtype=first.dtype).copy_(first)
            )
        if kwargs.pop("pin_memory", False):
            return _pinned(func(*args, **kwargs))
        if isinstance(first, There) and name in ("cpu", "tolist", "numpy"):
            self.wait(name)
            return func(first.on_host.clone(), *args[1:], **kwargs)
        if name == "new_tensor" and isinstance(first, There):
            self.wait(name)
        if name == "sparse_csr_tensor" and not isinstance(first, There):
            out = func(*args, **kwargs)
            return _pinned(out) if all(hasattr(x, "is_pretended") for x in args) else out
        # Which look at the layout where a pretended tensor can't say it.
        if name == "to_dense" and isinstance(first, There):
            return There(first.on_host.to_dense(), self)
        if name == "_sparse_mm" and isinstance(first, There):
            return torch.mm(*args)
        if name == "_parse_to":
            return func(*args, **kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            if name in ("tensor", "as_tensor"):
                self.wait(name)  # It is made on the host, and copied.
            out = func(*args, **{**kwargs, "device": "cpu"})
            return out if isinstance(out, There) else There(out, self)
        return func(*args, **kwargs)

    def _to(self, func, x, *args, **kwargs):
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            device, kind, non_blocking = args[0].device, args[0].dtype, False
        else:
            kwargs.pop("memory_format", None)
            device, kind, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device = x.device if device is None else device
        if isinstance(x, There) and device.type == "cpu":
            self.wait("to the host")
            return func(x.on_host.clone(), kind or x.dtype)
        if isinstance(x, There) or device.type == "cpu":
            return func(x, kind or x.dtype, copy=copy)
        if not non_blocking:
            self.wait("to the device")
        made = There(x.detach().to(kind or x.dtype, copy=True), self)
        how = "pinned" if hasattr(x, "is_pretended") else "pageable"
        self.log.append(("copy", self.current.name, how, made))
        return made

    def move(self, model):
        """Move a model to the device, in place; rows of its histories arrive there."""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = Parameter(There(parameter.data, self))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = There(buffer, self)
            if isinstance(module, History):
                module._device = DEVICE
                module._link = _Link(module._link, self)
        return model


class _Link(HostLink):
    """Moves rows between a store and the device, which isn't tested here."""

    def __init__(self, link, pretended):
        self.__dict__.update(link.__dict__)
        self.pretended = pretended

    def pull(self, *args, **kwargs):
        return _Pull(super().pull(*args, **kwargs), self.pretended)

    def push(self, x, where):
        super().push(x.on_host, where)

    def table_and_index(self, *args):
        where = super().table_and_index(*args)
        return where and tuple(There(tensor, self.pretended) for tensor in where)


class _Pull:
    def __init__(self, pull, pretended):
        self.pull, self.pretended = pull, pretended

    def wait(self):
        return There(self.pull.wait(), self.pretended)

    def cancel(self):
        self.pull.cancel()
