"""Reads of histories are the same in every store and precision."""

import pytest
import torch
from conftest import clustered_graph
from test_store import DictStore

import gas

STORES = {"host": "host", "disk": "disk", "user": DictStore}


@pytest.mark.parametrize("computed", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("codec", ["float64", "float32", "bfloat16", "int8"])
@pytest.mark.parametrize("store", STORES)
def test_in_place_or_moved(store, codec, computed):
    """Layers that read the halo where it is stored, and PyG's, which get it whole."""
    data, ptr = clustered_graph(dtype=computed)
    options = {"dtype": codec, "store": STORES[store], "io": "serial"}
    model = gas.models.GraphSAGE(60, 5, 8, 3, 3, **options).to(computed)
    for history in model.histories:
        history.push(torch.randn(60, 8, dtype=computed))
    moved, outs = [], []
    for layout in ("fused", "edge_index"):
        batch, *args = next(iter(gas.SubgraphLoader(data, ptr, 2, layout=layout, log=False)))
        before = gas.scalable.moved_bytes(model)
        x, adj_t, _ = model.inputs_of(batch)
        outs.append(model(x, adj_t, *args, push=False))
        moved.append(gas.scalable.moved_bytes(model) - before)
    tolerance = 1e-5 if computed == torch.float32 else 1e-12
    assert torch.allclose(*outs, rtol=tolerance, atol=tolerance)
    in_place = store == "host" and str(computed) == f"torch.{codec}"
    halo = args[1].numel() - args[0]
    row = {"float64": 64, "float32": 32, "bfloat16": 16, "int8": 12}[codec]
    assert moved == [0 if in_place else 2 * halo * row, 2 * halo * row]


@pytest.mark.parametrize("node", [10, -1])
def test_rows_in_place_are_those_of_the_table(node):
    """They are read by pointers: what is outside is refused before."""
    history = gas.History(10, 4)
    history.push(torch.randn(10, 4))
    assert history.stored_rows(torch.tensor([0, 9]), torch.float32) is not None
    with pytest.raises(IndexError, match=f"'n_id' holds {node}"):
        history.stored_rows(torch.tensor([0, node]), torch.float32)


def test_copies_of_one_history():
    model = gas.models.GraphSAGE(60, 5, 8, 3, 2)
    model.histories[0].push(torch.randn(60, 8))
    (copied,) = model._factory.clone(model.histories, model._engine)
    assert torch.equal(copied.emb, model.histories[0].emb)
    copied.push(torch.zeros(60, 8))
    assert model.histories[0].emb.any()
