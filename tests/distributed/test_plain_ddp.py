"""A DistributedSampler over the parts of a graph without shards: every rank has every row."""

import copy

import pytest
import torch
import torch.nn.functional as F
from processes import run_on
from test_ranks import graph_data, net_of
from torch.utils.data.distributed import DistributedSampler

import gas

pytestmark = pytest.mark.slow  # Processes for every rank.

NODES, PARTS = 60, 6


def made(num_parts, **options):
    """Return the plain model, it with histories, and the graph in parts."""
    data = graph_data()
    net = net_of("GraphSAGE", data)
    model = gas.to_scalable(net, data, dtype=torch.float64, **options)
    graph = gas.cluster(data, num_parts, model=model, method="random", log=False, cache=False)
    return net, model, graph


def shared_out(graph, batch_size=1, shuffle=False):
    sampler = DistributedSampler(range(graph.parts.numel() - 1), shuffle=shuffle, seed=3)
    return gas.SubgraphLoader(graph, sampler=sampler, batch_size=batch_size, log=False)


def loss_of(model, batch):
    mask = batch.own.train_mask
    return F.cross_entropy(model(batch)[mask], batch.own.y[mask])


def train(rank, num_parts, batch_size, shuffle, epochs):
    """Of one rank: what it pushed last, with the step, and what it has in the end."""
    net, model, graph = made(num_parts)
    wrapped = gas.distribute(model)
    loader = shared_out(graph, batch_size, shuffle)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.02)
    pushed, weights, steps, step = {}, [], [], 0
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(wrapped, batch).backward()
            rows = batch.n_id[: batch.batch_size]
            stored = [history.pull(rows) for history in model.histories]
            for at, row in enumerate(rows.tolist()):
                pushed[row] = step, [values[at] for values in stored]
            optimizer.step()
            weights.append(torch.cat([p.detach().view(-1).clone() for p in model.parameters()]))
            steps.append(batch.offset.tolist())
            step += 1
    model.ranks.exchange.receive_messages()
    found = {
        "pushed": pushed,
        "weights": torch.stack(weights),
        "steps": steps,
        "written": [history.written.clone() for history in model.histories],
        "rows": [history.pull(torch.arange(NODES)) for history in model.histories],
        "traffic": wrapped.traffic,
    }
    found["pred"] = wrapped.predict(graph)
    with torch.no_grad():
        data = graph_data()
        found["exact"] = net.eval()(data.x, data.edge_index)
    found["exact_rows"] = [history.pull(torch.arange(NODES)) for history in model.histories]
    return found


def refusals(rank):
    """Return the refusals of masks with several splits, and whether training continues."""
    _, model, graph = made(PARTS)
    graph.train_mask = torch.stack([graph.train_mask] * 3, 1)
    loader = shared_out(graph)
    batch = next(iter(loader))
    said = []
    for weight in ("train_mask", lambda batch: int(batch.own.train_mask[:, 0].sum())):
        wrapped = gas.distribute(copy.deepcopy(model), weight=weight)
        try:
            wrapped(batch)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


CASES = {
    "even": (PARTS, 1, False, 1),
    "shuffled": (PARTS, 1, True, 3),
    "batches": (12, 2, True, 2),
    "repeated": (5, 1, False, 1),  # Neither 2 nor 3 divide it.
    "repeated at once": (5, 3, False, 1),
}


def everything(rank):
    found = {name: train(rank, *case) for name, case in CASES.items()}
    return found, refusals(rank)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    """Return the results of every rank; starting processes is slow."""
    return run_on(request.param, everything, tmp_path_factory.mktemp("ranks"))


def pushed_last(found, row):
    """By all ranks that pushed a row in the last of its steps: what they pushed."""
    pushed = [each["pushed"][row] for each in found if row in each["pushed"]]
    last = max(step for step, _ in pushed)
    return [values for step, values in pushed if step == last]


@pytest.mark.parametrize("case", CASES)
def test_every_row_is_written_on_every_rank(case, ranks):
    """It is as who pushed it last has computed it.

    If ranks pushed a part in one step, which happens to parts that the sampler repeats, each has
    the rows of one of them.
    """
    found = [each[case] for each, _ in ranks]
    repeats = CASES[case][0] % len(found) > 0
    for each in found:
        assert all(written.all() for written in each["written"])
        for layer, rows in enumerate(each["rows"]):
            for row in range(NODES):
                values = [pushed[layer] for pushed in pushed_last(found, row)]
                assert any(torch.equal(rows[row], value) for value in values)
                assert len(values) == 1 or repeats


@pytest.mark.parametrize("case", CASES)
def test_ranks_stay_equal_and_predict_the_full_batch(case, ranks):
    found = [each[case] for each, _ in ranks]
    for each in found:
        assert torch.equal(each["weights"], found[0]["weights"])
        torch.testing.assert_close(each["pred"], each["exact"], rtol=1e-9, atol=1e-11)
        for rows, want in zip(each["exact_rows"], found[0]["exact_rows"], strict=True):
            assert torch.equal(rows, want)
    assert found[0]["weights"].unique(dim=0).size(0) == found[0]["weights"].size(0)


def test_each_part_is_somebodys(ranks):
    for case in ("even", "shuffled", "batches"):
        num_parts, batch_size, _, epochs = CASES[case]
        found = [each[case] for each, _ in ranks]
        seen = [part for each in found for parts in each["steps"] for part in parts]
        assert len(seen) == num_parts * epochs
        assert len(set(seen)) == num_parts
        for each in found:
            assert len(each["steps"]) == epochs * num_parts // (batch_size * len(found))
            traffic = each["traffic"]
            # Each of its rows goes to all others.
            extra = traffic.steps * (len(found) - 1) * (5 * 8 + 16 * batch_size + 16)
            if epochs == 1:
                sent = (len(found) - 1) * len(each["pushed"]) * 2 * 4 * 8
                assert 0 <= traffic.sent_bytes - sent <= extra


def test_a_mask_of_several_splits_is_refused_by_name(ranks):
    for _, (said, otherwise) in ranks:
        assert said.startswith("'weight' is 'train_mask', which has shape [")
        assert said.endswith(
            ", 3]: expected one value per node; pass a function, such as "
            "weight=lambda batch: int(batch.own.train_mask[:, 0].sum())"
        )
        assert otherwise == "nothing"
