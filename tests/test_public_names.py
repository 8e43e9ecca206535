"""Public names: every one can be imported from where it always was, old names still run."""

import importlib
import pickle
import subprocess
import sys

import pytest

import gas
from gas import _moved

NAMES = {
    "gas": """EvalSubgraphLoader History MHAug PartitionReport PrefetchLoader ScalableGNN
        SubData SubgraphLoader LinkLoader PartSampler augment cluster distribute drop_edges
        evaluate fit fuse get_data load load_run metis models open_graph partition_report permute
        plan predictions profile quantize report save to_scalable train_epoch verify __version__""",
    "gas.augment": """Augmentation DropEdge MHAug MaskFeatures PUBLISHED Statistics Views
        entropy mh_aug_loss""",
    "gas.cli": """Checkpoints Experiment MODELS SavedRun Settings load_run machine main
        metrics peak_rss_bytes reset_peak_rss summary train write_results""",
    "gas.datasets": """FolderStore dataset_key dataset_names gen_masks get_data import_graph
        index2mask open_mapped write_planted_partition""",
    "gas.history": """Codec DiskStore Encoded History MemoryStore Pull Store TableStore
        TransferEngine pick_tier quantize""",
    "gas.contrib.dynamic": "DynamicGraph",
    "gas.contrib.lightning": "PartitionData",
    "gas.contrib.rocks": "RocksStore open_rows write_rows",
    "gas.contrib.rules": "Rule RuleOversampling",
    "gas.contrib.simulation": """Machine PartitionStatistics Simulation partition_statistics
        simulate""",
    "gas.scalable.hetero": "HeteroModel to_hetero_model",
    "gas.loader": """EvalSubgraphLoader HeteroLoader LinkLoader PartSampler SubData
        SubgraphLoader""",
    "gas.models": "APPNP GAT GCN GCN2 GIN PNA PNA_JK GraphSAGE",
    "gas.nn": """Adjacency Dropout EdgeConv GATConv GATv2Conv GCN2Conv GCNConv GINConv GMMConv
        GraphConv Linear SAGEConv SimpleConv dropout edge_conv fuse gat_attention gatv2_attention
        gaussian_mixture linear relations spmm""",
    "gas.scalable": "ScalableGNN",
    "gas.training": """Callback Candidate FullBatch MetricLogger METRICS Plan
        Profile Run
        activation_bytes compute_hits compute_micro_f1 compute_mrr compute_r2 compute_roc_auc
        evaluate fit limit_freed_memory
        link_loss loss_of mean_age metric_of plan plan_micro_batches predictions rank_links
        run_epochs score share_cores split_mask train_epoch""",
}


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name(module):
    there = importlib.import_module(module)
    for name in NAMES[module].split():
        assert hasattr(there, name), f"{module}.{name}"
    public = set(getattr(there, "__all__", ())) - {"graph"}
    assert module != "gas" or public == set(NAMES["gas"].split())


@pytest.mark.slow
def test_the_library_alone_loads_no_command_line():
    program = "import gas, sys; print('gas.cli' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("old", _moved._NAMES)
def test_moved_names_warn_of_the_new_one(old):
    module, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{old} is now {_moved._NAMES[old]};") as caught:
        found = getattr(sys.modules[module], name)
    place, _, attribute = _moved._NAMES[old].rpartition(".")
    assert found is getattr(importlib.import_module(place), attribute)
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize(
    "old",
    [
        "gas.augment.published.PublishedSettings",
        "gas.nn.attention_v2.GATv2Conv",
        "gas.convert.layers.LayerCall",
        "gas.convert.lists_and_tables.EdgeLists",
        "gas.convert.matrices.gcn_norm",
        "gas.convert.outputs.Outputs",
        "gas.convert.preparation.Preparation",
        "gas.convert.scope.pull",
        "gas.nn.gcn.GCN2Conv",
        "gas.nn.gcn.GCNConv",
        "gas.nn.gcn.ProjectedConv",
        "gas.scalable.hetero.semantic.HANConv",
    ],
)
def test_pickles_of_version_0_2_find_classes_of_files_that_were_joined(old):
    module, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{old} is now {_moved._MODULES[module]}.{name};"):
        found = pickle.loads(f"c{module}\n{name}\n.".encode())
    assert found is getattr(importlib.import_module(_moved._MODULES[module]), name)


@pytest.mark.slow
def test_moved_modules_are_imported_by_their_old_names():
    lines = [
        "import gas.growing",
        "from gas.growing import DynamicGraph",
        "from gas.hetero import HeteroModel",
        "from gas.augment.rules import Rule",
        "from gas.history.rocks import open_rows",
        "from gas.training.simulator import simulate",
        "from gas.training.report import summary",
        "from gas.training.hetero import HeteroSAGE",
        "from gas.training.freed import keep_little_freed",
    ]
    done = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning:__main__", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for number, line in enumerate(lines[1:], start=2):
        _, old, _, name = line.split()
        warned = f"<string>:{number}: DeprecationWarning: {old}.{name} is now"
        new = _moved._NAMES.get(f"{old}.{name}", f"{_moved._MODULES[old]}.{name}")
        assert f"{warned} {new};" in done.stderr


def test_unknown_names_are_missing():
    with pytest.raises(AttributeError, match="module 'gas' has no attribute 'simulat'"):
        gas.simulat  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("gas.growing.graph")
