"""Errors of ``gas.compat``: what is there no more, and what it needs."""

from gas import compat
from gas.compat import data


def without_torch_sparse(t):
    t.patch.setattr("gas.compat.data.WITH_TORCH_SPARSE", False)
    data.get_ppi(t.path)


CASES = {
    "gas.compat.get_data, without torch-sparse": without_torch_sparse,
    "gas.compat.AsyncIOPool": lambda t: compat.AsyncIOPool(2, 500, 16),
}
