"""Histories: tables with the last known embedding of every node, and input features."""

from gas.history.codec import CODEC_NAMES, Codec
from gas.history.disk import DiskStore
from gas.history.encoded import Encoded, dequantize, is_encoded
from gas.history.factory import HistoryFactory, copy_written_rows
from gas.history.features import Features, quantize
from gas.history.history import History
from gas.history.packed import PackedRows
from gas.history.packing import Packing
from gas.history.rows import ROWS_HINT, BatchPulls, Rows, cache_row_starts, first_rows
from gas.history.staleness import (
    Correction,
    DriftCorrection,
    Staleness,
    measure_staleness,
    relative_error,
)
from gas.history.store import MemoryStore, Store, StoreFactory, TableStore
from gas.history.tiers import TIERS, pick_tier
from gas.history.transfer import IO_MODES, Pull, TransferEngine, check_io

__all__ = [
    "BatchPulls",
    "Codec",
    "Correction",
    "DiskStore",
    "DriftCorrection",
    "Encoded",
    "Features",
    "History",
    "HistoryFactory",
    "copy_written_rows",
    "IO_MODES",
    "MemoryStore",
    "CODEC_NAMES",
    "PackedRows",
    "Packing",
    "Pull",
    "Rows",
    "Staleness",
    "Store",
    "StoreFactory",
    "ROWS_HINT",
    "TIERS",
    "TableStore",
    "TransferEngine",
    "cache_row_starts",
    "check_io",
    "dequantize",
    "first_rows",
    "is_encoded",
    "measure_staleness",
    "pick_tier",
    "quantize",
    "relative_error",
]
