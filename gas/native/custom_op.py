"""Custom operators with little overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_PLAIN = frozenset((Tensor, Parameter))

disable_compile = torch.compiler.disable(reason="gas reads and writes histories between graphs")
"""Exclude a function, and all that it calls, from compilation."""

skip_frame = torch._dynamo.decorators.skip
"""Run a function uncompiled; functions that it calls may be compiled."""


@skip_frame
def is_compiling() -> bool:
    """Return whether functions called from here are compiled, outside of a compiled function."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)


class CustomOp:
    """An operator as :func:`torch.library.custom_op` makes them, which is called faster.

    The compiler, modes and tensor subclasses see the registered operator. All other calls run the
    kernel itself or, if a gradient is required, an autograd function of it: 20 instead of 60
    microseconds, about the time of a small batch's product.

    :func:`torch.vmap` calls it for one sample after the other. Second derivatives and forward mode
    raise an error.

    Args:
        name: ``"namespace::name"``.
        kernel: The function that computes it. Arguments that aren't tensors or numbers are
            sequences of tensors without gradient.
        public: The name in errors. (default: that of the operator)
    """

    def __init__(self, name: str, kernel: Callable[..., Any], public: str = "") -> None:
        self._kernel, self.__name__ = kernel, kernel.__name__
        self._name = public or name
        self._op = torch.library.custom_op(name, kernel, mutates_args=())
        self._make_functions(None, self._refuse_backward)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """See :func:`torch.library.register_fake`."""
        return self._op.register_fake(fake)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """See :func:`torch.library.register_autograd`."""
        self._op.register_autograd(backward, setup_context=setup_context)
        self._make_functions(setup_context, backward)

    def _make_functions(
        self, setup: Callable[..., None] | None, differentiate: Callable[..., Any]
    ) -> None:
        kernel, call, name = self._kernel, self.__call__, self._name

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
                inputs = list(differentiate(ctx, *grads))
                for position, grad in enumerate(inputs):
                    if isinstance(grad, list):  # Towards a sequence, whose tensors take none.
                        inputs[position] = None
                return tuple(inputs)

            @staticmethod
            def jvp(ctx: Any, *_: Any) -> Any:
                raise _no_forward_mode(name)

        class Function(Differentiable):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                output = kernel(*args)
                if setup is not None:
                    setup(ctx, args, output)
                return output

        class Transformable(Differentiable):  # For torch.func; it binds arguments at every call.
            @staticmethod
            def forward(*args: Any) -> Any:
                return kernel(*args)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                if setup is not None:
                    setup(ctx, inputs, output)

            @staticmethod
            def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
                outs = [
                    call(*(_sample(arg, dim, i) for arg, dim in zip(args, in_dims, strict=True)))
                    for i in range(info.batch_size)
                ]
                if isinstance(outs[0], Tensor):
                    return torch.stack(outs), 0
                stacked = tuple(torch.stack(same) for same in zip(*outs, strict=True))
                return stacked, (0,) * len(stacked)

        # Function.apply without its search for wrappers of transforms, which __call__ has done.
        self._apply = super(torch.autograd.Function, Function).apply
        self._transformable = Transformable

    def _refuse_backward(self, *_: Any) -> Any:
        raise NotImplementedError(
            f"{self._name} has no second derivative, which create_graph=True, a gradient penalty "
            "or a Hessian needs: compute that with PyG's layer on adj.to_edge_index()"
        )

    def __call__(self, *args: Any) -> Any:
        """Compute the operator."""
        if forward_ad._current_level >= 0 and _in_forward_mode(*_tensors_of(args)):
            raise _no_forward_mode(self._name)
        if _is_watched():
            return self._op(*args)
        is_negated = is_wrapped = has_grad = False
        for arg in args:  # One loop: small batches spend their time here.
            if isinstance(arg, Tensor):
                if type(arg) not in _PLAIN:
                    return self._op(*args)
                is_negated |= arg.is_neg()
                is_wrapped |= torch._C._functorch.is_functorch_wrapped_tensor(arg)
                has_grad |= arg.requires_grad
        if is_negated:  # A view that PyTorch negates when it reads.
            args = tuple(arg.resolve_neg() if isinstance(arg, Tensor) else arg for arg in args)
            return self(*args)
        if is_wrapped or (has_grad and torch._C._are_functorch_transforms_active()):
            return self._transformable.apply(*args)
        try:
            if has_grad and torch.is_grad_enabled():
                return self._apply(*args)
            return self._kernel(*args)
        except RuntimeError:
            if any(map(torch._C._functorch.is_legacy_batchedtensor, _tensors_of(args))):
                raise NotImplementedError(
                    f"{self._name} takes no gradients in batches (is_grads_batched=True or "
                    "vectorize=True): use torch.func.jacrev, or leave that out"
                ) from None
            raise


def _tensors_of(args: tuple[Any, ...]) -> list[Tensor]:
    return [arg for arg in args if isinstance(arg, Tensor)]


def learns(*tensors: Tensor) -> bool:
    """Return whether a gradient towards one of the tensors may be required."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # The compiler can't follow map() of an attrgetter.
            if tensor.requires_grad:
                return True
    return is_transformed(*tensors)


def is_transformed(*tensors: Tensor) -> bool:
    """Return whether a tensor is wrapped by a transform such as :func:`torch.func.grad`."""
    if torch.compiler.is_compiling():
        return False  # The compiler sees transforms itself.
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor needs no more than values and gradients, such as forward mode."""
    return not (
        _is_watched()
        or type(tensor) not in (Tensor, Parameter)
        or is_transformed(tensor)
        or _in_forward_mode(tensor)
    )


def _in_forward_mode(*tensors: Tensor) -> bool:
    """Return whether forward-mode derivatives are required other than by a transform."""
    return forward_ad._current_level >= 0 and any(
        not is_transformed(tensor) and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def _no_forward_mode(name: str) -> Exception:
    return NotImplementedError(
        f"{name} has no derivative in forward mode (torch.func.jvp, jacfwd, hessian or "
        "torch.autograd.forward_ad): use torch.func.vjp or jacrev, or torch.autograd.grad"
    )


def _sample(arg: Any, dim: Any, index: int) -> Any:
    """Return a sample of an argument, or of each of a sequence, batched by :func:`torch.vmap`."""
    if isinstance(arg, Tensor):
        return arg if dim is None else arg.select(dim, index)
    if isinstance(arg, Sequence) and not isinstance(arg, str):
        dims = [None] * len(arg) if dim is None else dim
        return [_sample(part, at, index) for part, at in zip(arg, dims, strict=True)]
    return arg


def _find_only_counts() -> Iterator[bool]:
    for mode in _get_current_dispatch_mode_stack():
        yield getattr(mode, "only_counts", False)


def _is_watched() -> bool:
    """Return whether calls are traced or intercepted as operators.

    A mode that has ``only_counts`` takes what kernels allocate, too, and leaves them as they are.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and not all(_find_only_counts()))
        or torch._C._len_torch_function_stack() > 0
    )


def custom_op(name: str, public: str = "") -> Callable[[Callable[..., Any]], CustomOp]:
    """Return a decorator that makes a :class:`CustomOp` of a function."""
    return lambda kernel: CustomOp(name, kernel, public)
