"""Histories: where embeddings wait for the batches that need them."""

from gas.history.batch import BatchPulls
from gas.history.codec import NAMES, Codec
from gas.history.cores import has_idle_cores, share_cores
from gas.history.disk import DiskStore
from gas.history.encoded import quantize
from gas.history.encoded_rows import Encoded, decoded, is_encoded
from gas.history.engine import MODES, TransferEngine, check_io
from gas.history.factory import HistoryFactory
from gas.history.history import History
from gas.history.packed import PackedRows
from gas.history.packing import Packing
from gas.history.rows import TAKERS, Features, Rows, begin_alike, first_rows
from gas.history.staleness import Staleness, measure, relative_error
from gas.history.store import MemoryStore, Store, StoreFactory, TableStore
from gas.history.tiers import TIERS, pick_tier
from gas.history.transfer import Pull

__all__ = [
    "BatchPulls",
    "Codec",
    "DiskStore",
    "Encoded",
    "Features",
    "History",
    "HistoryFactory",
    "MODES",
    "MemoryStore",
    "NAMES",
    "PackedRows",
    "Packing",
    "Pull",
    "Rows",
    "Staleness",
    "Store",
    "StoreFactory",
    "TAKERS",
    "TIERS",
    "TableStore",
    "TransferEngine",
    "begin_alike",
    "check_io",
    "decoded",
    "first_rows",
    "has_idle_cores",
    "is_encoded",
    "measure",
    "pick_tier",
    "quantize",
    "relative_error",
    "share_cores",
]
