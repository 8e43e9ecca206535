"""W ranks are one process that computes W mini-batches a step; inference over ranks is exact."""

import errno
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run_on
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

import gas
from gas.scalable.distributed import Exchange
from gas.scalable.distributed.group import Group, _describe_error, _make_error

PARTS, NODES, CLASSES = 8, 60, 3
NETS = {"GCN": GCN, "GraphSAGE": GraphSAGE, "GAT": GAT}
CASES = [(name, overlap) for name in NETS for overlap in (False, True)]
EPOCHS = 3
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def graph_data(seed=0):
    """Return a directed graph with duplicates and self-loops, of which few nodes have a label."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*size):
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    data = Data(
        x=rand(NODES, 5) - 0.5,
        edge_index=torch.randint(NODES, (2, 4 * NODES), generator=generator),
        y=torch.randint(CLASSES, (NODES,), generator=generator),
        train_mask=rand(NODES) < 0.3,
    )
    return data


def net_of(name, data):
    torch.manual_seed(1)
    return NETS[name](data.num_features, 4, 3, CLASSES).double()


def clustered(data, model, num_ranks):
    options = {"method": "random", "log": False, "cache": False}
    return gas.cluster(data, PARTS, model=model, shards=num_ranks, **options)


def distributed_curve(rank, name, num_ranks, overlap, epochs):
    """Return the weights after every step, and what is inferred and stored in the end."""
    data = graph_data()
    net = net_of(name, data)
    model = gas.to_scalable(net, data, dtype=torch.float64)
    graph = clustered(data, model, num_ranks)
    if rank:  # Weights are those of rank 0.
        torch.nn.init.zeros_(next(model.parameters()).data)
    wrapped = gas.distribute(model, overlap=overlap)
    loader = gas.SubgraphLoader(graph, batch_size=1, log=False)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.02)
    curve = []
    for _ in range(epochs):
        for batch in loader:
            own = batch.own
            optimizer.zero_grad()
            out = wrapped(batch)
            F.cross_entropy(out[own.train_mask], own.y[own.train_mask]).backward()
            optimizer.step()
            curve.append(torch.cat([p.detach().view(-1).clone() for p in model.parameters()]))
    traffic = wrapped.traffic
    pred = wrapped.predict(graph)
    net.eval()
    with torch.no_grad():
        exact = net(data.x, data.edge_index)
    return {"curve": torch.stack(curve), "pred": pred, "exact": exact, "traffic": traffic}


def reference_curve(name, num_ranks, overlap, epochs):
    """Return the same in one process, with a set of all histories for each rank."""
    data = graph_data()
    model = gas.to_scalable(net_of(name, data), data, dtype=torch.float64)
    graph = clustered(data, model, num_ranks)
    del graph.shards
    loader = gas.SubgraphLoader(graph, batch_size=1, log=False)
    twins = [model.for_graph(NODES) for _ in range(num_ranks)]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    curve, under_way = [], []
    steps = PARTS // num_ranks
    for _ in range(epochs):
        for step in range(steps):
            while len(under_way) > overlap:
                for sender, rows, values in under_way.pop(0):
                    for twin in twins:
                        if twin is not sender:
                            for history, value in zip(twin.histories, values, strict=True):
                                history.push(value, rows)
            optimizer.zero_grad()
            total, labelled, sent = 0.0, 0, []
            for rank, twin in enumerate(twins):
                batch = loader.cut([rank * steps + step])
                own = batch.own
                out = twin(batch)
                total = total + F.cross_entropy(
                    out[own.train_mask], own.y[own.train_mask], reduction="sum"
                )
                labelled += int(own.train_mask.sum())
                rows = batch.n_id[: batch.batch_size]
                sent.append((twin, rows, [h.pull(rows) for h in twin.histories]))
            under_way.append(sent)
            if labelled:
                (total / labelled).backward()
            else:
                (total * 0).backward()
            optimizer.step()
            curve.append(torch.cat([p.detach().view(-1).clone() for p in model.parameters()]))
    return torch.stack(curve)


def every_curve(rank, num_ranks):
    return {case: distributed_curve(rank, case[0], num_ranks, case[1], EPOCHS) for case in CASES}


@pytest.fixture(scope="module", params=[1, 2, 4])
def curves(request, tmp_path_factory):
    """Return the results of every rank and case; starting processes is slow."""
    folder = tmp_path_factory.mktemp("ranks")
    return request.param, run_on(request.param, every_curve, folder, request.param)


@pytest.mark.slow(fast=1)
@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_are_one_process_with_as_many_batches(case, curves):
    num_ranks, found = curves
    want = reference_curve(case[0], num_ranks, case[1], EPOCHS)
    for each in (of_rank[case] for of_rank in found):
        torch.testing.assert_close(each["curve"], want, **CLOSE)
        assert torch.equal(each["curve"], found[0][case]["curve"])
    assert not torch.allclose(want[0], want[-1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inference_over_ranks_is_the_full_batch(case, curves):
    _, found = curves
    for each in (of_rank[case] for of_rank in found):
        torch.testing.assert_close(each["pred"], each["exact"], **CLOSE)
        assert torch.equal(each["pred"], found[0][case]["pred"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_sent_is_little_more_than_has_to_be(case, curves):
    num_ranks, found = curves
    for traffic in (of_rank[case]["traffic"] for of_rank in found):
        steps = PARTS // num_ranks
        assert traffic.steps == EPOCHS * steps
        # A header of six numbers for each rank, and in each message at most 2 numbers and padding.
        extra = traffic.steps * (num_ranks - 1) * (6 * 8 + 16 + 16)
        assert 0 <= traffic.sent_bytes - EPOCHS * traffic.bound_bytes <= extra
        assert (traffic.bound_bytes > 0) == (num_ranks > 1)


def evaluated(rank):
    data = graph_data()
    data.test_mask = ~data.train_mask
    net = net_of("GraphSAGE", data)
    model = gas.to_scalable(net, data, dtype=torch.float64)
    graph = clustered(data, model, 2)
    loader = gas.SubgraphLoader(graph, batch_size=1, log=False)
    model = gas.distribute(model)
    scores = gas.evaluate(model, graph)
    out = net.eval()(data.x, data.edge_index).argmax(dim=1) == data.y
    exact = {name: float(out[data[f"{name}_mask"]].float().mean()) for name in ("train", "test")}

    def loss_fn(out, y):
        return F.cross_entropy(out, y) * (float("nan") if rank == 1 else 1.0)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(FloatingPointError, match="the loss is nan in batch") as found:
        gas.training.train_epoch(model, loader, optimizer, loss_fn=loss_fn)
    return scores, exact, str(found.value)


@pytest.mark.slow
def test_scores_and_a_loss_that_is_not_finite(tmp_path):
    """On every rank; one of them alone has the NaN, and none waits for it."""
    for scores, exact, _ in run_on(2, evaluated, tmp_path):
        assert scores == pytest.approx(exact)


def test_an_error_of_the_system_keeps_its_number_and_file_on_other_ranks():
    error = OSError(errno.ENOSPC, "No space left on device", "rows")
    found = _make_error(1, {}, *_describe_error(error, {}))
    assert (found.errno, found.filename) == (errno.ENOSPC, "rows")
    assert found.strerror == "rank 1: No space left on device"
    assert str(_make_error(1, {}, *_describe_error(OSError("gone"), {}))) == "rank 1: gone"


def test_replicas_follow_own_rows_by_the_rank_that_sends_them():
    exchange = Exchange.__new__(Exchange)
    exchange.shard = SimpleNamespace(num_own=4, replica_ptr=torch.tensor([0, 0, 3, 5]))
    assert [exchange._replicas_of(rank, 9) for rank in range(3)] == [(4, 0), (4, 3), (7, 2)]
    exchange.shard = None  # Each rank has every row.
    assert exchange._replicas_of(1, 9) == (0, 9)


def test_gradients_on_the_cpu_have_a_group_of_their_own(monkeypatch):
    """Those on a device are summed in the program's group, whose backend is the device's."""
    groups = []
    work = SimpleNamespace(get_future=lambda: SimpleNamespace(then=lambda done: None))

    def all_reduce(x, group, async_op):
        groups.append(group)
        return work

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    group = Group.__new__(Group)
    group.gradients = "of the CPU"
    for device in ("cpu", "meta"):
        group.start_sum(torch.ones(2, device=device), "averaging", False)
    assert groups == ["of the CPU", None]


def test_a_model_that_could_not_be_distributed_may_be_again(tmp_path):
    """An option that DistributedDataParallel doesn't have is found after ranks were compared."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = gas.models.GraphSAGE(NODES, 5, 8, CLASSES, 2)
        with pytest.raises(TypeError, match="unknown"):
            gas.distribute(model, unknown=1)
        assert model.ranks is None
        assert gas.distribute(model).module is model
    finally:
        dist.destroy_process_group()
