"""Stages of an import: nodes, edges, their order, features."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from gas.datasets.arrays import check_classes
from gas.datasets.edges import EdgeStream
from gas.datasets.folder import FeatureSource, read_node_table
from gas.datasets.importing.sorting import Duplicates, EdgeSorter, edge_record
from gas.datasets.masks import with_masks
from gas.datasets.nodes import Nodes, read_nodes
from gas.datasets.roles import leave_out_names
from gas.graph import (
    COL,
    ROWPTR,
    WEIGHT,
    Array,
    Description,
    GrowingArray,
    NewFolder,
    array_of,
    check_finite,
    check_weight,
    describe_array,
    dtype_name,
    write_rows,
)
from gas.history import Codec
from gas.native import MOST_INT32, flush_to_disk

TEMPORARY = re.compile(r"edges(-into|-\d+)?\.part")
EDGES, INTO = "edges.part", "edges-into.part"  # Unsorted edges, and their number by destination.


class GraphImport:
    """An import in stages, each of which writes some files and returns their description."""

    STAGES = ("nodes", "edges", "order", "features")

    def __init__(
        self,
        folder: NewFolder,
        path: Path,
        files: dict[str, Path],
        options: dict[str, Any],
        codec: Codec | None,
        memory: int,
        log: bool,
    ) -> None:
        self.folder, self.path, self.files, self.options = folder, path, files, options
        self.columns, self.codec, self.memory, self.log = options["columns"], codec, memory, log
        self.found: dict[str, dict[str, Any]] = {}
        self.at_once = max(1024, min(1 << 20, memory // 512))  # Edges that are read at a time.

    def run(self) -> None:
        """Run the remaining stages, and complete the folder, which is locked."""
        self.found = self.folder.mark.get("stages", {})
        begun = self.folder.mark.get("source"), self.found
        if not all(isinstance(said, dict) for said in begun):
            self.found = {}
            self.folder.begin([], 0, source=self._describe_source(), stages={})
        self._check_source()
        if self.found and self.log:
            print(f"{self.folder.path}: going on after {', '.join(self.found)}", file=sys.stderr)
        for stage in self.STAGES:
            if stage not in self.found:
                try:
                    self.found[stage] = getattr(self, f"_{stage}")()
                except ValueError:  # Its cure changes the files or the options.
                    self.folder.discard()
                    raise
                self.folder.note(stages=self.found)
        self._check_source()
        self._finish()

    def _describe_source(self) -> dict[str, Any]:
        """Return the options, and sizes and times of the files, to detect changes."""
        about = {file.name: file.stat() for file in self.files.values()}
        files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in sorted(about.items())}
        return {"options": self.options, "files": files}

    def _check_source(self) -> None:
        """Refuse files or options that have changed since the import began."""
        before, source = self.folder.mark["source"], self._describe_source()
        if before != source:
            old = before.get("files", {})
            changed = [name for name, seen in source["files"].items() if old.get(name) != seen]
            what = f"{self.path}: {changed[0]} has" if changed else "the options, or files, have"
            raise ValueError(
                f"{what} changed since the import into {self.folder.path} began: remove that "
                "folder, and import anew"
            )

    def _announce(self, names: Iterable[str]) -> None:
        """Record the names of files before they are created, and remove old files."""
        names = list(names)
        self.folder.note(files=sorted({*self.folder.mark["files"], *names}))
        for name in names:
            (self.folder.path / name).unlink(missing_ok=True)

    def _write(self, key: str, value: Any, found: dict[str, Any]) -> None:
        """Write an array from memory."""
        array = describe_array(key, value, f"{key}.npy")
        files = Description(0, 0, {key: array}, {}).iter_arrays()
        self._announce(part.file for _, part in files)
        write_rows(self.folder, array, value)
        found[key] = array.to_json()

    def _bar(self, what: str, unit: str, total: int | None) -> Any:
        return tqdm(
            desc=what, unit=f" {unit}", total=total, disable=not self.log, unit_scale=True,
            mininterval=0.5,
        )  # fmt: skip

    # Stages ---------------------------------------------------------------------------------------

    def _nodes(self) -> dict[str, Any]:
        """Read the nodes, except for their features."""
        nodes, data, features = read_node_table(self.path, self.files, self.columns, self._edge_ids)
        if nodes.num_nodes == 0:
            raise ValueError(f"{self.path} has no nodes, expected at least one")
        if "y" in data:
            check_classes(data.y)
            with_masks(data, self.options["num_splits"])
        if self.options["check"]:
            check_finite("x", data.get("x"))  # Sparse features; dense ones are read in blocks.
        arrays: dict[str, Any] = {}
        if nodes.ids is not None:
            self._write("node_id", nodes.ids, arrays)
        attributes = {}
        for key, value in data:
            if isinstance(value, Tensor):
                self._write(key, value, arrays)
            elif key != "num_nodes":
                attributes[key] = value
        place = features and {"role": features.role, "names": list(features.names)}
        return {
            "num_nodes": nodes.num_nodes,
            "file": nodes.file,
            "arrays": arrays,
            "attributes": attributes,
            "features": place,
        }

    def _edge_ids(self) -> Iterator[np.ndarray]:
        """Yield the ids of the ends of edges, in blocks."""
        with self._bar("Reading ids", "edges", None) as bar:
            for block in EdgeStream(self.files, self.columns, self.at_once).blocks():
                yield block.source.distinct
                yield block.target.distinct
                bar.update(len(block.source))

    def _load_nodes(self) -> Nodes:
        """Load the nodes that the first stage has written."""
        found = self.found["nodes"]
        said = found["arrays"].get("node_id")
        ids = None if said is None else np.load(self.folder.path / said["file"], mmap_mode="r")
        return Nodes(found["num_nodes"], ids, found["file"])

    def _edges(self) -> dict[str, Any]:
        """Read the edges, and write them to a temporary file."""
        nodes, undirected = self._load_nodes(), self.options["undirected"]
        stream = EdgeStream(self.files, self.columns, self.at_once)
        counts = np.zeros(nodes.num_nodes, np.int64)
        first, width = 0, 0
        self._announce([EDGES, INTO])
        with (
            (self.folder.path / EDGES).open("xb") as file,
            self._bar("Reading edges", "edges", stream.num_edges) as bar,
        ):
            for ids in stream.blocks():
                block = stream.rows(ids, nodes)
                size, width = len(block.src), 0 if block.attr is None else block.attr.shape[1]
                kind = edge_record(
                    nodes.num_nodes, stream.has_weight, width, undirected, stream.has_types
                )
                edges = np.zeros(size, kind)
                edges["src"], edges["dst"] = block.src, block.dst
                if block.weight is not None:
                    check_weight(torch.from_numpy(block.weight), first)
                for field in ("weight", "attr", "types"):
                    if getattr(block, field) is not None:
                        edges[field] = getattr(block, field)
                edges.tofile(file)
                np.add.at(counts, block.dst, 1)
                if undirected:
                    edges["src"], edges["dst"], edges["added"] = block.dst, block.src, True
                    edges.tofile(file)
                    np.add.at(counts, block.src, 1)
                first += size
                bar.update(size)
            flush_to_disk(file)
        with (self.folder.path / INTO).open("xb") as file:
            counts.tofile(file)
            flush_to_disk(file)
        found = {"read": first, "weighted": stream.has_weight, "width": width}
        found["flat"] = stream.attr_is_flat
        if stream.has_types:
            places, names = stream.sort_types()
            return {**found, "types": places.tolist(), "names": names}
        leave_out_names(stream.type_names, "edge_type")
        return found

    def _order(self) -> dict[str, Any]:
        """Sort the edges; write rows, columns, weights and attributes."""
        about, num_nodes = self.found["edges"], self.found["nodes"]["num_nodes"]
        weighted, width = about["weighted"], about["width"]
        types = np.array(about["types"], np.int64) if "types" in about else None
        undirected = self.options["undirected"]
        kind = edge_record(num_nodes, weighted, width, undirected, types is not None)
        counts = np.fromfile(self.folder.path / INTO, np.int64)
        small = max(num_nodes, int(counts.sum())) <= MOST_INT32
        index = np.dtype(np.int32 if small else np.int64)
        shapes: dict[str, tuple[str, np.dtype, tuple[int, ...]]] = {COL: ("src", index, ())}
        if weighted:
            shapes[WEIGHT] = ("weight", np.dtype(np.float32), ())
        if width:
            shapes["edge_attr"] = ("attr", np.dtype(np.float32), () if about["flat"] else (width,))
        if types is not None:
            shapes["edge_type"] = ("types", np.dtype(np.int64), ())
        self._announce([f"{key}.npy" for key in (ROWPTR, *shapes)])
        into = np.zeros(num_nodes, np.int64)
        duplicates, loops = Duplicates(), 0
        growing = {
            key: GrowingArray(self.folder.path / f"{key}.npy", dtype, shape)
            for key, (_, dtype, shape) in shapes.items()
        }
        with self._bar("Sorting edges", "edges", int(counts.sum())) as bar:
            sorter = EdgeSorter(
                self.folder.path, kind, num_nodes, self.memory // 2, bar.update, self._announce
            )
            for edges in sorter.sort(self.folder.path / EDGES, counts):
                for key, (field, _, _) in shapes.items():
                    rows = edges[field]
                    growing[key].append(types[rows] if key == "edge_type" else rows)  # type: ignore[index]
                np.add.at(into, edges["dst"], 1)
                duplicates.add(edges)
                loops += int((edges["src"] == edges["dst"]).sum())
        for array in growing.values():
            array.close()
        num_edges = growing[COL].num_rows
        rowptr = np.zeros(num_nodes + 1, np.int64)
        np.cumsum(into, out=rowptr[1:])
        arrays = {ROWPTR: Array(f"{ROWPTR}.npy", index.name, (num_nodes + 1,))}
        self.folder.write(arrays[ROWPTR], [rowptr.astype(index)])
        for key, (_, dtype, shape) in shapes.items():
            arrays[key] = Array(f"{key}.npy", dtype.name, (num_edges, *shape))
        return {
            "num_edges": num_edges,
            "duplicates": duplicates.count,
            "loops": loops,
            "arrays": {key: array.to_json() for key, array in arrays.items()},
        }

    def _features(self) -> dict[str, Any]:
        """Read the features, and write them in the order of the nodes."""
        place = self.found["nodes"]["features"]
        if place is None:
            return {"arrays": {}}
        nodes, file = self._load_nodes(), self.files[place["role"]]
        ids = read_nodes(file, place["role"], self.columns).ids
        features = FeatureSource(place["role"], tuple(place["names"]), ids)
        first = next(features.blocks(self.files, self.columns, 1), None)
        width = 0 if first is None else first.shape[1]
        array = Array("x.npy", "float32", (nodes.num_nodes, width))
        if self.codec is not None:
            shape = (nodes.num_nodes, self.codec.columns(width))
            array = Array("x.npy", dtype_name(self.codec.dtype), shape, self.codec.name, width)
        self._announce([array.file])
        with self._bar("Features", "nodes", nodes.num_nodes) as bar:
            at_once = max(1, self.memory // 16 // max(1, 0 if first is None else first.nbytes))
            blocks = features.blocks(self.files, self.columns, at_once)
            stored = self._encode_blocks(blocks, file.name, bar)
            rows = features.rows(nodes, file.name)
            if rows is None:
                self.folder.write(array, stored)
            else:
                _write_at(self.folder.path / array.file, array, rows, stored)
        return {"arrays": {"x": array.to_json()}}

    def _encode_blocks(
        self, blocks: Iterable[np.ndarray], file: str, bar: Any
    ) -> Iterator[np.ndarray]:
        """Yield checked and encoded blocks of features."""
        codec, first = self.codec or Codec("float32"), 0
        for block in blocks:
            x = torch.from_numpy(block)
            if self.options["check"]:
                check_finite("x", x, first)
            yield array_of(codec.encode(codec.cast(x, first, f"'x' of {file}")))
            first += len(block)
            bar.update(len(block))

    def _finish(self) -> None:
        """Remove temporary files, and write ``graph.json``."""
        nodes, order = self.found["nodes"], self.found["order"]
        num_nodes, num_edges = nodes["num_nodes"], order["num_edges"]
        arrays = {**order["arrays"], **nodes["arrays"], **self.found["features"]["arrays"]}
        self._write("perm", torch.arange(num_nodes), arrays)
        self._write("parts", torch.tensor([0, num_nodes]), arrays)
        counted = {key: order[key] for key in ("duplicates", "loops")}
        imported = {"edges": self.found["edges"]["read"], **counted}
        if self.log:
            print(
                f"{self.path}: {num_nodes:,} nodes, {imported['edges']:,} edges read, "
                f"{num_edges:,} written, of which {counted['duplicates']:,} are duplicates and "
                f"{counted['loops']:,} loops",
                file=sys.stderr,
            )
        for file in self.folder.path.iterdir():
            if TEMPORARY.fullmatch(file.name):
                file.unlink()
        attributes = {**nodes["attributes"], "imported": imported}
        if "names" in self.found["edges"]:
            attributes["edge_type_names"] = self.found["edges"]["names"]
        said = Description(num_nodes, num_edges, {}, attributes)
        self.folder.finish(said, arrays)


def _write_at(path: Path, array: Array, rows: np.ndarray, blocks: Iterable[np.ndarray]) -> None:
    """Write blocks of rows to given positions in a file, durably."""
    mapped = np.lib.format.open_memmap(path, "w+", array.numpy_dtype, array.shape)
    first = 0
    for block in blocks:
        mapped[rows[first : first + len(block)]] = block
        first += len(block)
    mapped.flush()
    with path.open("rb") as file:
        flush_to_disk(file)
