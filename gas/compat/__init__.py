"""The exports of ``torch_geometric_autoscale``, by the same names: only the import line changes.

Modules are named as they are there. What differs from ``gas`` itself, because scripts rely on it:

* :func:`get_data` yields graphs with ``adj_t``, a ``torch_sparse.SparseTensor``.
* ``model(x, adj_t)`` on the whole graph writes the histories; see :class:`ScalableGNN`.
* :func:`metis` calls its first argument ``adj_t``.
* :func:`dropout` of a ``SparseTensor`` with values sets dropped ones to zero, and keeps the edges.

Everything else is that of ``gas``; see ``docs/migration.md``.
"""

from gas import __version__
from gas.compat import models
from gas.compat.data import get_data
from gas.compat.history import History
from gas.compat.loader import EvalSubgraphLoader, SubgraphLoader
from gas.compat.metis import metis, permute
from gas.compat.models import ScalableGNN
from gas.compat.pool import AsyncIOPool
from gas.compat.utils import compute_micro_f1, dropout, gen_masks

__all__ = [
    "AsyncIOPool",
    "EvalSubgraphLoader",
    "History",
    "ScalableGNN",
    "SubgraphLoader",
    "__version__",
    "compute_micro_f1",
    "dropout",
    "gen_masks",
    "get_data",
    "metis",
    "models",
    "permute",
]
