"""Old names of public functions, classes and modules: each use warns and names the new one.

A name stays in these tables until version 0.3.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from warnings import warn

_NAMES = {
    "gas.compute_micro_f1": "gas.training.compute_micro_f1",
    "gas.dropout": "gas.drop_edges",
    "gas.encode": "gas.quantize",
    "gas.gen_masks": "gas.datasets.gen_masks",
    "gas.simulate": "gas.contrib.simulation.simulate",
    "gas.augment.Rule": "gas.contrib.rules.Rule",
    "gas.augment.RuleOversampling": "gas.contrib.rules.RuleOversampling",
    "gas.datasets.planted_to_disk": "gas.datasets.write_planted_partition",
    "gas.graph.as_one": "gas.graph.to_homogeneous_edges",
    "gas.graph.by_row": "gas.graph.sort_by_row",
    "gas.graph.changed_rows": "gas.graph.find_changed_rows",
    "gas.graph.cluster_typed": "gas.graph.cluster_heterogeneous",
    "gas.graph.copy_of": "gas.graph.clone_unless_learnable",
    "gas.graph.every_entry": "gas.graph.find_entries",
    "gas.graph.graph_before": "gas.graph.find_original_graph",
    "gas.graph.in_first_order": "gas.graph.to_original_order",
    "gas.graph.is_edge_row": "gas.graph.is_row",
    "gas.graph.is_node_row": "gas.graph.is_row",
    "gas.graph.is_one_of": "gas.graph.has_row_per_node",
    "gas.graph.joined": "gas.graph.are_linked",
    "gas.graph.name_of": "gas.graph.edge_type_name",
    "gas.graph.no_values": "gas.graph.implicit_ones",
    "gas.graph.only_writer": "gas.graph.lock_folder",
    "gas.graph.opened": "gas.graph.open_if_path",
    "gas.graph.read_rows": "gas.graph.read_csr",
    "gas.graph.rearranged": "gas.graph.select_rows",
    "gas.graph.rows_of": "gas.graph.entry_rows",
    "gas.graph.utf8": "gas.graph.encode_utf8",
    "gas.graph.with_entries": "gas.graph.insert_entries",
    "gas.graph.without_entries": "gas.graph.remove_entries",
    "gas.graph.check_entering": "gas.graph.check_data_features",
    "gas.graph.checked_adjacency": "gas.graph.adjacency_from_csr",
    "gas.graph.dense": "gas.graph.to_dense",
    "gas.graph.mapped_rows": "gas.graph.get_mapped_rows",
    "gas.graph.nodes_and_edges": "gas.graph.count_nodes_and_edges",
    "gas.graph.without_edges": "gas.graph.remove_edges",
    "gas.graph.without_links": "gas.graph.remove_links",
    "gas.growing.GrowingGraph": "gas.contrib.dynamic.DynamicGraph",
    "gas.history.MODES": "gas.history.IO_MODES",
    "gas.history.NAMES": "gas.history.CODEC_NAMES",
    "gas.history.TAKERS": "gas.history.ROWS_HINT",
    "gas.history.begin_alike": "gas.history.cache_row_starts",
    "gas.history.decoded": "gas.history.dequantize",
    "gas.history.encode": "gas.history.quantize",
    "gas.history.has_idle_cores": "gas.native.has_idle_cores",
    "gas.history.measure": "gas.history.measure_staleness",
    "gas.history.share_cores": "gas.native.share_cores",
    "gas.io.DISK_FULL": "gas.native.memory.DISK_FULL",
    "gas.io.explain_full_disk": "gas.native.explain_full_disk",
    "gas.io.free_disk": "gas.native.free_disk",
    "gas.io.Array": "gas.graph.folder.npy.Array",
    "gas.io.GrowingArray": "gas.graph.folder.npy.GrowingArray",
    "gas.io.array_of": "gas.graph.folder.npy.array_of",
    "gas.io.check_inside": "gas.graph.folder.npy.check_inside",
    "gas.io.map_array": "gas.graph.folder.npy.map_array",
    "gas.io.map_private": "gas.graph.folder.npy.map_private",
    "gas.io.tensor_of": "gas.graph.folder.npy.tensor_of",
    "gas.io.write_array": "gas.graph.folder.npy.write_array",
    "gas.io.replacing": "gas.native.replace_file",
    "gas.loader.loaded_tensors": "gas.loader.tensors_in_memory",
    "gas.loader.stored_attributes": "gas.loader.raw_attributes",
    "gas.native.Mixture": "gas.native.mixture.Mixture",
    "gas.native.decode_torch": "gas.native.transfer.decode_torch",
    "gas.native.encode_torch": "gas.native.transfer.encode_torch",
    "gas.native.kept_entries": "gas.native.find_kept_entries",
    "gas.native.padded": "gas.native.padded_sizes",
    "gas.native.pinned_zeros": "gas.native.allocate_pinned",
    "gas.native.rises": "gas.native.is_valid_rowptr",
    "gas.native.sorted_rows": "gas.native.has_sorted_rows",
    "gas.native.undirected": "gas.native.symmetrize_edges",
    "gas.nn.Masks": "gas.scalable.one_batch.Masks",
    "gas.nn.forget_masks": "gas.scalable.one_batch.forget_masks",
    "gas.nn.prepare_layers": "gas.scalable.one_batch.prepare_layers",
    "gas.nn.show_embeddings": "gas.scalable.one_batch.show_embeddings",
    "gas.training.Machine": "gas.contrib.simulation.Machine",
    "gas.training.PartitionStatistics": "gas.contrib.simulation.PartitionStatistics",
    "gas.training.Simulation": "gas.contrib.simulation.Simulation",
    "gas.training.partition_statistics": "gas.contrib.simulation.partition_statistics",
    "gas.scalable.ChosenNodes": "gas.scalable.NodePredictor",
    "gas.scalable.expect": "gas.scalable.read_ahead",
    "gas.scalable.left_alone": "gas.scalable.preserve_state",
    "gas.scalable.made_exact": "gas.scalable.mark_exact",
    "gas.scalable.named_arguments": "gas.scalable.collect_kwargs",
    "gas.scalable.state_of": "gas.scalable.state_fingerprint",
    "gas.scalable.to_typed": "gas.scalable.to_hetero_model",
    "gas.scalable.hetero.to_typed": "gas.scalable.hetero.to_hetero_model",
    "gas.chosen.ChosenNodes": "gas.scalable.NodePredictor",
    "gas.hetero.to_typed": "gas.scalable.hetero.to_hetero_model",
    "gas.training.Predicted": "gas.training.Predictions",
    "gas.training.diverged": "gas.training.divergence_error",
    "gas.training.give_back_freed": "gas.training.release_freed_memory",
    "gas.training.keep_little_freed": "gas.training.limit_freed_memory",
    "gas.training.known_targets": "gas.training.known_target_mask",
    "gas.training.name_not_finite": "gas.training.find_nonfinite_tensor",
    "gas.training.twin_with_histories": "gas.training.clone_with_histories",
    "gas.training.freed.give_back_freed": "gas.training.release_freed_memory",
    "gas.training.freed.keep_little_freed": "gas.training.limit_freed_memory",
    "gas.training.simulate": "gas.contrib.simulation.simulate",
    "gas.training.Checkpoints": "gas.cli.Checkpoints",
    "gas.training.Experiment": "gas.cli.Experiment",
    "gas.training.MODELS": "gas.cli.MODELS",
    "gas.training.Settings": "gas.cli.Settings",
}
_MODULES = {
    "gas.growing": "gas.contrib.dynamic",
    "gas.chosen": "gas.scalable.node_predictor",
    "gas.hetero": "gas.scalable.hetero",
    "gas.distributed": "gas.scalable.distributed",
    "gas.io": "gas.native",
    "gas.augment.rules": "gas.contrib.rules",
    "gas.history.rocks": "gas.contrib.rocks",
    "gas.training.simulator": "gas.contrib.simulation",
    "gas.training.checkpoints": "gas.cli.checkpoints",
    "gas.training.experiment": "gas.cli.experiment",
    "gas.training.freed": "gas.training.measure",
    "gas.training.hetero": "gas.cli.hetero",
    "gas.training.options": "gas.cli.options",
    "gas.training.report": "gas.cli.report",
    "gas.training.results": "gas.cli.results",
    "gas.training.settings": "gas.cli.settings",
    # Files whose classes pickled models and settings name.
    "gas.augment.published": "gas.augment.loss",
    "gas.nn.attention_v2": "gas.nn.attention",
    "gas.nn.gcn": "gas.nn.sum_convs",
    "gas.scalable.hetero.semantic": "gas.scalable.hetero.layers",
}


# Names whose rooms are imported when they are first used.
_LATE = {
    "gas.load_run": "gas.cli.load_run",
    "gas.report": "gas.cli.html.report",
    "gas.lightning.PartitionData": "gas.contrib.lightning.PartitionData",  # Needs Lightning.
}


def redirect_moved_names() -> None:
    """Register old names, and those of the command; what they name is imported at first use."""
    for name, new in {**_MODULES, "gas.lightning": "gas.contrib.lightning"}.items():
        module = sys.modules[name] = ModuleType(name, f"The names of ``{new}``.")
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
    for name in {*_MODULES, *(name.rpartition(".")[0] for name in (*_NAMES, *_LATE))}:
        vars(sys.modules[name])["__getattr__"] = _getter(name)


def _getter(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module with names that moved."""

    def get(name: str) -> Any:
        old = f"{module}.{name}"
        if old in _LATE:
            place, _, attribute = _LATE[old].rpartition(".")
            return getattr(importlib.import_module(place), attribute)
        new = _NAMES.get(old)
        if new is None and module in _MODULES and not name.startswith("__"):
            new = f"{_MODULES[module]}.{name}"
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        place, _, attribute = new.rpartition(".")
        found = getattr(importlib.import_module(place), attribute)
        warn(
            f"{old} is now {new}; the old name works until version 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return found

    return get
