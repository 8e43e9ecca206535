"""Files: durable writes, strict JSON, and ``.npy`` arrays that are mapped."""

from gas.io.files import (
    flush_to_disk,
    refuse,
    replace_file,
    sync_folder,
)
from gas.io.json import parse_json, read_json, write_json
from gas.io.npy import (
    Array,
    GrowingArray,
    array_of,
    check_inside,
    map_array,
    map_private,
    tensor_of,
    write_array,
)

__all__ = [
    "Array",
    "GrowingArray",
    "array_of",
    "check_inside",
    "flush_to_disk",
    "map_array",
    "map_private",
    "parse_json",
    "read_json",
    "refuse",
    "replace_file",
    "sync_folder",
    "tensor_of",
    "write_array",
    "write_json",
]
