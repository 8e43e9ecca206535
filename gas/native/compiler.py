"""Functions that ``torch.compile`` calls instead of compiling them."""

from __future__ import annotations

import torch

disable_compile = torch.compiler.disable(reason="gas reads and writes histories between graphs")
"""Exclude a function, and all that it calls, from compilation."""

skip_frame = torch._dynamo.decorators.skip
"""Run a function uncompiled; functions that it calls may be compiled."""


@skip_frame
def is_compiling() -> bool:
    """Return whether functions called from here are compiled, outside of a compiled function."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)
