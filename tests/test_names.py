"""Public names: every one can be imported from where it always was, old names still run."""

import importlib
import subprocess
import sys

import pytest
import torch
from conftest import clustered_graph

import gas

NAMES = {
    "gas": """EvalSubgraphLoader History MHAug PartitionReport PrefetchLoader ScalableGNN SubData
        SubgraphLoader augment cluster compute_micro_f1 distribute drop_edges dropout encode fuse
        gen_masks get_data load metis models open_graph partition_report permute plan save simulate
        to_scalable verify __version__""",
    "gas.augment": """Augmentation DropEdge MHAug MaskFeatures PUBLISHED Rule RuleOversampling
        Statistics Views entropy mh_aug_loss""",
    "gas.datasets": """FolderStore dataset_key dataset_names gen_masks get_data import_graph
        index2mask open_mapped planted_to_disk""",
    "gas.graph_file": "load_graph",
    "gas.history": """Codec DiskStore Encoded History MemoryStore Pull Store TableStore
        TransferEngine encode pick_tier""",
    "gas.growing": "GrowingGraph",
    "gas.hetero": "HeteroModel to_typed",
    "gas.loader": """EvalSubgraphLoader HeteroLoader LinkLoader PartSampler SubData
        SubgraphLoader""",
    "gas.models": "APPNP GAT GCN GCN2 GIN PNA PNA_JK GraphSAGE",
    "gas.nn": """Adjacency Dropout EdgeConv GATConv GATv2Conv GCN2Conv GCNConv GINConv GMMConv
        GraphConv Linear SAGEConv SimpleConv dropout edge_conv fuse gat_attention gatv2_attention
        gaussian_mixture linear relations spmm""",
    "gas.partition": "PartitionReport metis partition_report permute",
    "gas.planted": "planted_partition",
    "gas.prefetch": "PrefetchLoader",
    "gas.scalable": "ScalableGNN",
    "gas.subgraph": "CSR LAYOUTS Edges drop_edges read_edges read_graph to_csr",
    "gas.training": """Candidate Experiment FullBatch METRICS MODELS Machine PartitionStatistics
        Plan Run Settings Simulation activation_bytes compute_hits compute_micro_f1 compute_mrr
        compute_r2 compute_roc_auc fit link_loss loss_of mean_age metric_of partition_statistics
        plan plan_micro_batches rank_links report score simulate split_mask train_epoch""",
}


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name(module):
    there = importlib.import_module(module)
    for name in NAMES[module].split():
        assert hasattr(there, name), f"{module}.{name}"
    public = set(getattr(there, "__all__", ())) - {"graph"}
    assert module != "gas" or public == set(NAMES["gas"].split())


def test_old_modules_are_imported_as_such():
    program = "import gas.partition, gas.subgraph as s; print(gas.partition.metis is gas.metis)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_old_names_do_the_same():
    data, ptr = clustered_graph()
    (batch, *_) = next(iter(gas.SubgraphLoader(data, ptr, batch_size=2, log=False)))
    dropped = []
    for drop in (gas.dropout, gas.drop_edges, gas.subgraph.drop_edges):
        torch.manual_seed(0)
        dropped.append(drop(batch.adj_t, 0.5).to_dense())
    assert torch.equal(dropped[0], dropped[1])
    assert torch.equal(dropped[0], dropped[2])
    assert not torch.equal(dropped[0], batch.adj_t.to_dense())
    assert gas.subgraph.LAYOUTS == ("csr", "edge_index", "sparse_tensor", "fused")
