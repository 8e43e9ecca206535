"""What the compiler of PyTorch, ``torch.compile``, is kept out of."""

from __future__ import annotations

import torch

apart = torch.compiler.disable(reason="gas reads and writes histories between graphs")
"""Makes a function one that the compiler calls, with all that it calls, and doesn't look into."""

between = torch._dynamo.decorators.skip
"""Makes a function run as it is, while what it calls may be compiled: ``apart`` or not."""


@between
def is_compiling() -> bool:
    """Whether what is called from here is compiled, outside of what is being compiled."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)
