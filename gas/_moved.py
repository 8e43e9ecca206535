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

# Names by their old and their new place: old=new, or one that only moved.
_BY_PLACE = {
    ("gas", "gas.training"): "compute_micro_f1",
    ("gas", "gas"): "dropout=drop_edges encode=quantize",
    ("gas", "gas.datasets"): "gen_masks",
    ("gas", "gas.contrib.simulation"): "simulate",
    ("gas.augment", "gas.contrib.rules"): "Rule RuleOversampling",
    ("gas.convert.rewriting.layers", "gas.convert.rewriting.layers"): "OnSomeEdges=MaskedEdgeLayer",
    ("gas.convert.rewriting.messages", "gas.convert.rewriting.messages"): "Messages=MessageLayer",
    ("gas.datasets", "gas.datasets"): "planted_to_disk=write_planted_partition",
    ("gas.graph", "gas.graph"): (
        "as_one=to_homogeneous_edges by_row=sort_by_row changed_rows=find_changed_rows "
        "cluster_typed=cluster_heterogeneous copy_of=clone_unless_learnable "
        "every_entry=find_entries graph_before=find_original_graph "
        "in_first_order=to_original_order invert=invert_permutation is_edge_row=is_row "
        "is_node_row=is_row is_one_of=has_row_per_node joined=are_linked name_of=edge_type_name "
        "no_values=implicit_ones only_writer=lock_folder opened=open_if_path read_rows=read_csr "
        "rearranged=select_rows rows_of=entry_rows utf8=encode_utf8 with_entries=insert_entries "
        "without_entries=remove_entries check_entering=check_data_features "
        "checked_adjacency=adjacency_from_csr dense=to_dense mapped_rows=get_mapped_rows "
        "nodes_and_edges=count_nodes_and_edges without_edges=remove_edges "
        "without_links=remove_links"
    ),
    ("gas.growing", "gas.contrib.dynamic"): "GrowingGraph=DynamicGraph",
    ("gas.history", "gas.history"): (
        "MODES=IO_MODES NAMES=CODEC_NAMES TAKERS=ROWS_HINT begin_alike=cache_row_starts "
        "decoded=dequantize encode=quantize measure=measure_staleness"
    ),
    ("gas.history", "gas.native"): "has_idle_cores share_cores",
    ("gas.io", "gas.native.memory"): "DISK_FULL",
    ("gas.io", "gas.native"): "explain_full_disk free_disk replacing=replace_file",
    ("gas.io", "gas.graph.folder.npy"): (
        "Array GrowingArray array_of check_inside map_array map_private tensor_of write_array"
    ),
    ("gas.loader", "gas.loader"): (
        "loaded_tensors=tensors_in_memory stored_attributes=raw_attributes tensors=iter_tensors"
    ),
    ("gas.native", "gas.native.mixture"): "Mixture",
    ("gas.native", "gas.native.transfer"): "decode_torch encode_torch",
    ("gas.native", "gas.native"): (
        "kept_entries=find_kept_entries padded=padded_sizes pinned_zeros=allocate_pinned "
        "rises=is_valid_rowptr sorted_rows=has_sorted_rows undirected=symmetrize_edges"
    ),
    ("gas.nn", "gas.scalable.one_batch"): "Masks forget_masks prepare_layers show_embeddings",
    ("gas.training", "gas.contrib.simulation"): (
        "Machine PartitionStatistics Simulation partition_statistics simulate"
    ),
    ("gas.scalable", "gas.scalable"): (
        "ChosenNodes=NodePredictor expect=read_ahead left_alone=preserve_state "
        "made_exact=mark_exact named_arguments=collect_kwargs state_of=state_fingerprint "
        "to_typed=to_hetero_model"
    ),
    ("gas.scalable.hetero.plan", "gas.scalable.hetero.plan"): "Place=HistorySpec",
    ("gas.scalable.hetero", "gas.scalable.hetero"): "to_typed=to_hetero_model",
    ("gas.chosen", "gas.scalable"): "ChosenNodes=NodePredictor",
    ("gas.hetero", "gas.scalable.hetero"): "to_typed=to_hetero_model",
    ("gas.training", "gas.training"): (
        "Predicted=Predictions diverged=divergence_error give_back_freed=release_freed_memory "
        "keep_little_freed=limit_freed_memory known_targets=known_target_mask "
        "name_not_finite=find_nonfinite_tensor Shape=BatchShape "
        "twin_with_histories=clone_with_histories"
    ),
    ("gas.training.freed", "gas.training"): (
        "give_back_freed=release_freed_memory keep_little_freed=limit_freed_memory"
    ),
    ("gas.training", "gas.cli"): "Checkpoints Experiment MODELS Settings",
}
_NAMES = {
    f"{old_place}.{old}": f"{new_place}.{new or old}"
    for (old_place, new_place), names in _BY_PLACE.items()
    for old, _, new in (name.partition("=") for name in names.split())
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
    "gas.training.choice": "gas.training.candidates",
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
    "gas.convert.layers": "gas.convert.rewriting.layers",
    "gas.convert.lists_and_tables": "gas.convert.module.lists_and_tables",
    "gas.convert.matrices": "gas.convert.values.matrices",
    "gas.convert.outputs": "gas.convert.tracing.outputs",
    "gas.convert.preparation": "gas.convert.module.preparation",
    "gas.convert.scope": "gas.convert.tracing.scope",
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
