"""Histories: where embeddings wait for the batches that need them."""

from gas.history.codec import Codec
from gas.history.disk import DiskStore
from gas.history.encoded import Encoded, encode
from gas.history.engine import TransferEngine
from gas.history.history import History
from gas.history.host import Pull
from gas.history.rows import Rows
from gas.history.store import MemoryStore, Store, TableStore
from gas.history.tiers import pick_tier

__all__ = [
    "Codec",
    "DiskStore",
    "Encoded",
    "History",
    "MemoryStore",
    "Pull",
    "Rows",
    "Store",
    "TableStore",
    "TransferEngine",
    "encode",
    "pick_tier",
]
