"""Modules that share their parameters with others, and nothing else."""

from __future__ import annotations

from torch.nn import Module


def twin(module: Module, memo: dict[Module, Module] | None = None) -> Module:
    """The same module, and all below it, with the same parameters, buffers and hooks.

    Parameters, buffers and hooks aren't copied, they are those of ``module``, and stay so when they
    are replaced, moved or added. Options (``normalize``, ``training``, ...), classes and children
    are the twin's own.
    """
    memo = {} if memo is None else memo
    if module in memo:
        return memo[module]
    made = memo[module] = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    children = {
        name: None if child is None else twin(child, memo)
        for name, child in module._modules.items()
    }
    object.__setattr__(made, "_modules", children)
    return made
