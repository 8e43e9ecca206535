"""Graphs for operators: random ones with everything that is unusual."""

import torch

from gas.nn import Adjacency


def make_adjacency(rows, cols, entries, weighted=False, dtype=torch.float64):
    """With duplicates, and empty rows and columns (the last of each)."""
    row = torch.randint(max(rows - 1, 1), (entries,)).sort().values
    col = torch.randint(max(cols - 1, 1), (entries,))
    rowptr = torch.zeros(rows + 1, dtype=torch.long)
    rowptr[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    value = torch.randn(entries, dtype=dtype) if weighted else None
    return Adjacency(rowptr, col, value, cols)


SHAPES = {
    "square": (12, 12, 60),
    "bipartite": (7, 19, 40),
    "hub": (2, 30, 900),
    "one node": (1, 1, 3),
    "no edges": (4, 6, 0),
    "no rows": (0, 5, 0),
}

HUBS = {"rows of pieces": (6, 300, 30000), "columns of pieces": (300, 6, 30000)}
WITH_HUBS = SHAPES | HUBS


def is_close(found, exact, tolerance):
    """To rounding: of the largest number, or of the terms of a sum that cancel."""
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    return torch.allclose(found.double(), exact, rtol=0, atol=tolerance * max(40.0, largest))
