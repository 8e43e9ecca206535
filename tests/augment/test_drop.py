import pytest
import torch
from augment_graphs import seeded
from conftest import random_graph
from scipy import stats
from torch_geometric.data import Data

from gas.augment import DropEdge, MaskFeatures


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("undirected", [False, True])
def test_drop_edge(p, undirected):
    data = random_graph(200, 3000, directed=not undirected)
    drop = DropEdge(data, p, undirected=undirected, generator=seeded())
    loops = data.edge_index[0] == data.edge_index[1]
    dropped = 0
    for _ in range(50):
        assert drop.step()
        assert drop.edge_mask[loops].all()
        assert drop.node_mask.all()
        dropped += int((~drop.edge_mask).sum()) // (2 if undirected else 1)
        if undirected:
            kept = data.edge_index[:, drop.edge_mask]
            key = kept[0] * 200 + kept[1], kept[1] * 200 + kept[0]
            assert torch.equal(key[0].sort().values, key[1].sort().values)
    assert stats.binomtest(dropped, 50 * drop.units.size, p).pvalue > 1e-3
    out = drop(data)
    assert torch.equal(out.edge_index, data.edge_index[:, drop.edge_mask])
    assert torch.equal(out.x, data.x)
    assert data.num_edges == (6000 if undirected else 3000)


def test_mask_features():
    data = random_graph(200, 100)
    mask = MaskFeatures(data, 0.4, generator=seeded())
    dropped = 0
    for _ in range(50):
        out = mask(data)
        kept = mask.node_mask
        assert torch.allclose(out.x[kept], data.x[kept] * 200 / int(kept.sum()))
        assert (out.x[~kept] == 0).all()
        assert torch.equal(out.edge_index, data.edge_index)
        dropped += int((~kept).sum())
    assert stats.binomtest(dropped, 50 * 200, 0.4).pvalue > 1e-3
    few = MaskFeatures(Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0], [1]])), 0.999)
    for _ in range(50):
        few.step()
        assert few.node_mask.any()  # Never all.
    alone = Data(x=torch.ones(3, 1), edge_index=torch.empty(2, 0, dtype=torch.long))
    MaskFeatures(alone)(alone)  # Needs no edges.


@pytest.mark.parametrize("cls", [DropEdge, MaskFeatures])
def test_seeds_and_resuming(cls):
    data = random_graph()
    first, second = cls(data, generator=seeded()), cls(data, generator=seeded())
    for _ in range(3):
        first.step()
        second.step()
        assert torch.equal(first.edge_mask, second.edge_mask)
        assert torch.equal(first.node_mask, second.node_mask)
    third = cls(data, generator=seeded(5))
    third.load_state_dict(first.state_dict())
    assert torch.equal(third.previous_edge_mask, first.previous_edge_mask)
    first.step()
    third.step()
    assert torch.equal(third.edge_mask, first.edge_mask)
    assert torch.equal(third.node_mask, first.node_mask)
    assert not (third.edge_mask.all() and third.node_mask.all())
    assert str(first) == f"{cls.__name__}(num_nodes=60, num_edges={first.units.size})"


def test_errors():
    data = random_graph()
    for p in (-0.1, 1.1, float("nan")):
        for cls in (DropEdge, MaskFeatures):
            with pytest.raises(ValueError, match="'p' is .*expected a probability in"):
                cls(data, p)
    with pytest.raises(ValueError, match="'p' is 1.0, which drops every node"):
        MaskFeatures(data, 1.0)
    alone = Data(x=torch.ones(3, 1), edge_index=torch.empty(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="'data' has 0 edges"):
        DropEdge(alone)
