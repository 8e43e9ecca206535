"""``simulate``: statistics and bytes against counting them, times against what must hold."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from conftest import random_graph
from torch_geometric.data import Data

import gas
from gas.contrib import simulation
from gas.contrib.simulation import Machine, PartitionStatistics, partition_statistics
from gas.contrib.simulation.local_ranks import measure_ranks
from gas.contrib.simulation.machine import _choose_parts as choose_parts
from gas.scalable.distributed.exchange import HEADER_BYTES

LINK = {"bandwidth": 1e9, "latency": 1e-5}
MACHINE = Machine(1e-6, 1e-7, seconds_per_halo_row=2e-7, seconds_per_step=1e-3, **LINK)


def split(num_nodes=60, ranks=4, parts_per_rank=3, seed=0, **options):
    """Return a directed graph with duplicates, self-loops and isolated nodes, in uneven shards."""
    torch.manual_seed(seed)
    data = random_graph(num_nodes, 5 * num_nodes, **options)
    inner = torch.randperm(num_nodes - 1)[: ranks * parts_per_rank - 1].sort().values + 1
    data.parts = torch.cat([torch.tensor([0]), inner, torch.tensor([num_nodes])])
    data.shards = data.parts[::parts_per_rank].clone()
    return data


def by_hand(**changes):
    """Four ranks, of two parts each."""
    numbers = {
        "num_nodes": 4000, "num_edges": 80_000, "num_ranks": 4, "num_parts": 8, "replicas": 6000,
        "cut": 20_000, "pairs": 12, "halo": 9000, "ranges": 24,
    }  # fmt: skip
    return PartitionStatistics(**numbers | changes)


def sage(num_nodes=4000, hidden_channels=16, num_layers=3, **options):
    return gas.models.GraphSAGE(num_nodes, 5, hidden_channels, 3, num_layers, **options)


def simulate(partition=None, machine=MACHINE, **options):
    return simulation.simulate(
        by_hand() if partition is None else partition, sage(), machine, **options
    )


def owner(bounds, node):
    return int((bounds[1:] <= node).sum())


# Statistics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ranks", "parts_per_rank"), [(1, 5), (4, 3), (7, 1)])
def test_statistics_are_those_of_counting(ranks, parts_per_rank, seed):
    data = split(60, ranks, parts_per_rank, seed)
    replicas, halo, ranges, cut, sent = set(), set(), set(), 0, [0] * ranks
    edges, part_edges = [0] * ranks, [0] * (ranks * parts_per_rank)
    for src, dst in data.edge_index.t().tolist():
        of, to = owner(data.shards, src), owner(data.shards, dst)
        part_of, part_to = owner(data.parts, src), owner(data.parts, dst)
        edges[to] += 1
        part_edges[part_to] += 1
        if of != to:
            cut += 1
            replicas.add((to, src))
            ranges.add((part_of, to))
        if part_of != part_to:
            halo.add((part_to, src))
    for _, src in replicas:
        sent[owner(data.shards, src)] += 1
    held = [sum(to == rank for to, _ in replicas) for rank in range(ranks)]
    means = [edges[p // parts_per_rank] / parts_per_rank for p in range(len(part_edges))]
    deviations = [(e - m) ** 2 for e, m in zip(part_edges, means, strict=True)]

    found = partition_statistics(data)
    assert (found.num_nodes, found.num_edges) == (60, data.num_edges)
    assert (found.num_ranks, found.num_parts) == (ranks, ranks * parts_per_rank)
    assert (found.replicas, found.cut, found.halo) == (len(replicas), cut, len(halo))
    assert found.ranges == len(ranges)
    assert found.pairs == len({(owner(data.shards, src), to) for to, src in replicas})
    assert found.rows_balance == pytest.approx(int(data.shards.diff().max()) * ranks / 60)
    for name, counted in (("edges", edges), ("replicas", held), ("sent", sent)):
        balance = max(counted) * ranks / sum(counted) if sum(counted) else 1
        assert getattr(found, f"{name}_balance") == pytest.approx(balance)
    spread = math.sqrt(sum(deviations) / len(deviations)) / (sum(edges) / len(part_edges))
    assert found.part_spread == pytest.approx(spread)
    assert found.feature_bytes == 5 * 4
    assert not found.is_extrapolated


def test_statistics_without_parts_are_of_shards(tmp_path):
    data = split(ranks=5, parts_per_rank=1)
    with_parts = partition_statistics(data)
    del data.parts
    assert partition_statistics(data) == with_parts
    assert with_parts.halo == with_parts.replicas
    assert with_parts.ranges == with_parts.pairs
    assert with_parts.part_spread == 0


def test_statistics_of_an_adjacency_are_those_of_edges():
    data = split()
    expected = partition_statistics(data)
    order = (data.edge_index[1] * 60 + data.edge_index[0]).argsort()
    src, dst = data.edge_index[:, order]
    rowptr = torch.zeros(61, dtype=torch.long)
    rowptr[1:] = torch.bincount(dst, minlength=60).cumsum(0)
    del data.edge_index
    data.adj_t = torch.sparse_csr_tensor(
        rowptr, src, torch.ones(src.numel()), (60, 60), check_invariants=False
    )
    assert partition_statistics(data) == expected


def test_statistics_are_written_and_read():
    found = partition_statistics(split())
    again = PartitionStatistics(**json.loads(json.dumps(dataclasses.asdict(found))))
    assert again == found
    assert str(by_hand()).splitlines()[:3] == [
        "ranks                       4",
        "nodes, edges                4,000, 80,000",
        "edges between ranks         20,000 (25.0 %)",
    ]


# Extrapolation ------------------------------------------------------------------------------------


def power_law(ranks, nodes=100_000, **changes):
    """Return replicas per edge: root of the number of ranks times a tenth power of nodes."""
    edges = 20 * nodes
    cut = round(0.01 * edges * ranks**0.5 * (nodes / 1e5) ** 0.1)
    return PartitionStatistics(
        **{
            "num_nodes": nodes, "num_edges": edges, "num_ranks": ranks, "num_parts": ranks,
            "replicas": cut // 2, "cut": cut, "pairs": ranks * (ranks - 1), "halo": cut // 2,
            "ranges": ranks * (ranks - 1), "edges_balance": ranks**0.1,
        }
        | changes
    )  # fmt: skip


def test_a_power_law_is_found_again():
    counted = [power_law(ranks) for ranks in (4, 8, 16)]
    far = counted[0].extrapolate(ranks=64, others=counted[1:])
    expected = power_law(64)
    assert far.replicas == pytest.approx(expected.replicas, rel=1e-3)
    assert far.cut == pytest.approx(expected.cut, rel=1e-3)
    assert far.edges_balance == pytest.approx(64**0.1)
    assert (far.pairs, far.ranges, far.num_parts) == (64 * 63, 64 * 63, 64)
    assert far.is_extrapolated
    assert str(far).endswith("extrapolated: no graph was partitioned this way")
    sizes = [*counted, power_law(4, 400_000)]
    larger = counted[0].extrapolate(nodes=1_000_000, ranks=32, others=sizes)
    assert larger.replicas == pytest.approx(power_law(32, 1_000_000).replicas, rel=1e-3)


def test_ranges_are_extrapolated_by_the_share_of_parts_that_a_rank_reads():
    one, *others = (power_law(ranks, ranges=ranks * (ranks - 1) // 2) for ranks in (4, 8, 16))
    assert one.extrapolate(ranks=64, others=others).ranges == 64 * 63 // 2


def test_a_larger_graph_of_as_many_ranks_is_as_much_cut_per_edge():
    one = power_law(8, num_parts=80)
    larger = one.extrapolate(nodes=200_000, edges=6_000_000)
    assert larger.replicas == pytest.approx(3 * one.replicas, rel=1e-6)
    assert larger.cut == pytest.approx(3 * one.cut, rel=1e-6)
    assert larger.halo == pytest.approx(3 * one.halo, rel=1e-6)
    assert (larger.num_parts, larger.num_ranks) == (160, 8)
    assert larger.is_extrapolated


def test_no_number_is_larger_than_it_can_be():
    counted = [power_law(ranks) for ranks in (4, 16)]
    for ranks in (2, 100, 1024, 90_000):
        far = counted[0].extrapolate(ranks=ranks, others=counted[1:])  # Which would refuse it.
        assert far.replicas <= far.cut <= far.num_edges
        assert far.pairs <= ranks * (ranks - 1)


def test_what_is_known_is_not_extrapolated():
    one = by_hand(edges_balance=1.5)
    assert one.extrapolate() is one
    assert one.extrapolate(ranks=4, nodes=4000) is one
    alone = one.extrapolate(ranks=1)
    assert (alone.replicas, alone.cut, alone.pairs, alone.ranges) == (0, 0, 0, 0)
    assert (alone.halo, alone.num_parts, alone.edges_balance) == (one.halo, 8, 1)
    assert not alone.is_extrapolated
    assert power_law(8).extrapolate(ranks=16, others=[power_law(4)], parts=4096).num_parts == 4096


# Bytes and seconds --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("seed", range(2))
def test_bytes_are_those_of_every_message(dtype, seed):
    data = split(80, 4, 3, seed)
    model = sage(80, [16, 32], dtype=dtype)
    row = sum(h.codec.row_bytes(h.embedding_dim) for h in model.histories)
    replicas = {
        (owner(data.shards, dst), src)
        for src, dst in data.edge_index.t().tolist()
        if owner(data.shards, src) != owner(data.shards, dst)
    }
    rows, others, filled = [0] * 4, 0, 0
    for step in range(3):
        for rank in range(4):
            begin, end = data.parts[3 * rank + step : 3 * rank + step + 2].tolist()
            for subscriber in set(range(4)) - {rank}:
                others += HEADER_BYTES
                sent = sum(begin <= src < end for to, src in replicas if to == subscriber)
                if sent:
                    rows[rank] += sent * row
                    others += 16
                    filled += -sent * row % 16
    found = simulation.simulate(data, model, MACHINE)
    assert found.history_bytes == max(rows)
    assert found.total_history_bytes == sum(rows) == len(replicas) * row
    parameters = sum(p.nbytes for p in model.parameters())
    ring = 3 * 4 * 2 * 3 * parameters / 4  # Steps, ranks, and blocks of a quarter.
    assert found.total_bytes == sum(rows) + others + ring
    assert filled <= 15 * partition_statistics(data).ranges
    assert found.start_bytes == len(replicas) * 20
    assert found.steps == 3


def test_one_rank_sends_nothing():
    alone = simulate(by_hand().extrapolate(ranks=1))
    assert alone.total_bytes == alone.start_bytes == 0
    assert alone.communication_seconds == alone.waiting_seconds == alone.copy_seconds == 0
    assert alone.epoch_seconds == alone.one_rank_seconds == alone.compute_seconds
    assert alone.epoch_seconds == pytest.approx(8 * 1e-3 + 4e-3 + 9000 * 2e-7 + 8e-3)
    assert alone.speed_up == 1
    assert alone.limit == "compute"


def test_free_messages_and_even_work_give_every_rank_its_share():
    free = dataclasses.replace(MACHINE, bandwidth=math.inf, latency=0, copy_bandwidth=math.inf)
    found = simulate(machine=free)
    assert found.epoch_seconds == found.compute_seconds
    assert found.speed_up == pytest.approx(4)
    assert found.limit == "compute"


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"bandwidth": 1e6}, "bandwidth"),
        ({"copy_bandwidth": 1e6}, "bandwidth"),
        ({"latency": 0.1}, "latency"),
        ({"seconds_per_edge": 1e-3}, "compute"),
    ],
)
def test_what_limits(changes, limit):
    slow = simulate(machine=dataclasses.replace(MACHINE, **changes))
    assert slow.limit == limit
    assert slow.epoch_seconds > simulate().epoch_seconds
    assert sum(slow.parts_of_time.values()) == pytest.approx(slow.epoch_seconds)


def test_uneven_work():
    uneven = simulate(by_hand(edges_balance=9.0))
    assert uneven.limit == "imbalance"
    assert uneven.compute_seconds > uneven.mean_compute_seconds
    waiting = simulate(by_hand(part_spread=0.2))
    assert waiting.waiting_seconds == pytest.approx(
        (20_000 * 1e-7 + 9000 / 4 * 2e-7) * 0.2 * math.sqrt(2 * math.log(4))
    )
    assert simulate(by_hand(part_spread=0.2), batch_size=2).waiting_seconds == 0  # One step.


def test_messages_travel_beside_computing():
    plain, overlapped = simulate(), simulate(overlap=True)
    assert plain.hidden_seconds == plain.history_seconds == overlapped.hidden_seconds
    none = simulate(machine=dataclasses.replace(MACHINE, backward_share=0))
    assert none.hidden_seconds == 0
    assert none.epoch_seconds == pytest.approx(plain.epoch_seconds + plain.history_seconds)
    assert plain.parts_of_time["bandwidth"] < none.parts_of_time["bandwidth"]
    slow = dataclasses.replace(MACHINE, bandwidth=1e6)
    assert simulate(machine=slow).hidden_seconds == plain.compute_seconds / 2
    assert simulate(machine=slow, overlap=True).hidden_seconds == plain.compute_seconds


def test_more_of_anything_takes_longer_or_more():
    base = simulate()
    assert simulate(by_hand(replicas=12_000)).history_seconds > base.history_seconds
    assert simulate(by_hand(replicas=12_000)).memory_bytes > base.memory_bytes
    assert simulate(by_hand(replicas_balance=2.0)).history_seconds > base.history_seconds
    assert simulate(by_hand(sent_balance=2.0)).history_bytes == 2 * base.history_bytes
    assert simulate(by_hand(num_parts=16)).gradient_bytes == 2 * base.gradient_bytes
    assert simulate(batch_size=2).steps == 1
    assert simulate(batch_size=2).header_bytes < base.header_bytes
    shared = simulate(machine=dataclasses.replace(MACHINE, ranks_per_host=2))
    assert shared.history_seconds > base.history_seconds  # Two ranks on a link.
    local = simulate(machine=dataclasses.replace(MACHINE, ranks_per_host=4))
    assert local.history_seconds < base.history_seconds
    counted = [power_law(ranks) for ranks in (4, 16, 64)]
    several = [
        simulation.simulate(
            counted[0].extrapolate(ranks=ranks, others=counted[1:]), sage(), MACHINE
        )
        for ranks in (1, 4, 16, 64, 256, 1024)
    ]
    for fewer, more in itertools.pairwise(several):
        assert fewer.compute_seconds > more.compute_seconds
        assert fewer.total_history_bytes < more.total_history_bytes


def test_memory_of_a_rank():
    machine = dataclasses.replace(MACHINE, bytes_per_row=100, bytes_per_halo_row=10)
    model = sage()
    found = simulation.simulate(by_hand(feature_bytes=512), model, machine).memory
    assert found["features"] == 2500 * 512
    assert found["histories"] == 2500 * 2 * (16 * 4 + 4)
    assert found["edges"] == 20_000 * 12 + 1000 * 8
    assert found["parameters and optimizer"] == 4 * sum(p.nbytes for p in model.parameters())
    assert found["batch"] == 500 * 100 + 9000 / 8 * 10
    uneven = by_hand(num_parts=80, part_spread=0.5)  # Its largest batch is 0.2 * 1.75 of a rank.
    found = simulation.simulate(uneven, model, machine, batch_size=4).memory
    assert found["batch"] == round(0.35 * (1000 * 100 + 9000 / 4 * 10))


def test_what_is_printed():
    text = str(simulate())
    assert text.startswith("ranks                         4, 2 steps each\nepoch ")
    assert text.endswith(
        "Predicted, not measured.\nMeasured: nothing; the rest is given.\n"
        "What a mini-batch holds is not known, and not part of the memory."
    )
    counted = [power_law(ranks) for ranks in (4, 8)]
    far = simulate(counted[0].extrapolate(ranks=64, others=counted[1:]))
    assert "The partition is extrapolated" in str(far)


# The machine --------------------------------------------------------------------------------------


def test_a_machine_is_measured():
    torch.manual_seed(0)
    data = random_graph(num_nodes=1600, num_edges=9600, directed=False)
    graph = gas.cluster(data, 8, cache=False, log=False)
    model = sage(1600)
    before = [p.clone() for p in model.parameters()]
    loader = gas.SubgraphLoader(graph, log=False)
    machine = Machine.measure(model, loader, **LINK)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not model.histories[0].written.any()
    assert machine.widths == (16, 16)
    assert machine.bandwidth == 1e9
    assert machine.copy_bandwidth > 1e6
    assert "bandwidth" not in machine.measured_fields
    assert machine.step(200, 400, 2400) > 0
    assert machine.batch_bytes(200, 400, 2400) > 200 * 16 * 4
    assert machine.fit_error is not None
    graph.shards = graph.parts[::2]
    text = str(simulation.simulate(graph, model, machine))
    assert "Measured: seconds_per_step, seconds_per_row" in text
    assert "%" in text
    with pytest.raises(ValueError, match="'machine' was measured with histories of widths"):
        simulation.simulate(graph, sage(1600, 8), machine)


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_ranks": 4001}, "'num_ranks' is 4001, expected an integer between 1 and 4000"),
        ({"num_parts": 3}, "'num_parts' is 3"),
        ({"replicas": 20_001}, "'replicas' is 20001"),
        ({"cut": 80_001}, "'cut' is 80001"),
        ({"pairs": 13}, "'pairs' is 13"),
        ({"sent_balance": 0.5}, "'sent_balance' is 0.5"),
        ({"part_spread": math.nan}, "'part_spread' is nan"),
    ],
)
def test_statistics_that_cannot_be(changes, told):
    with pytest.raises(ValueError, match=told):
        by_hand(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bandwidth", 0),
        ("bandwidth", math.nan),
        ("local_bandwidth", -1),
        ("copy_bandwidth", 0),
        ("latency", -1e-6),
        ("seconds_per_edge", math.inf),
        ("backward_share", 2),
        ("ranks_per_host", 0),
    ],
)
def test_machines_that_cannot_be(name, value):
    with pytest.raises(ValueError, match=f"'{name}' is {value}"):
        dataclasses.replace(MACHINE, **{name: value})


def test_a_machine_in_json():
    machine = dataclasses.replace(MACHINE, widths=(8, 8))
    assert Machine(**json.loads(json.dumps(dataclasses.asdict(machine)))) == machine


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("bandwidth", (0.5, math.inf)),
        ("copy_bandwidth", (0.5, math.inf)),
        ("local_bandwidth", (None, 0.5, math.inf)),
        ("latency", (0,)),
        ("backward_share", (0, 1)),
        ("ranks_per_host", (1,)),
    ],
)
def test_machines_that_just_can_be(name, values):
    for value in values:
        assert getattr(dataclasses.replace(MACHINE, **{name: value}), name) == value


def test_what_cannot_be_simulated():
    graph = split()
    with pytest.raises(ValueError, match="'model' is a Linear, expected a gas.ScalableGNN"):
        simulation.simulate(graph, torch.nn.Linear(2, 2), MACHINE)
    with pytest.raises(ValueError, match="'machine' is a float"):
        simulation.simulate(graph, sage(60), 1e9)
    with pytest.raises(ValueError, match="'batch_size' is 0"):
        simulation.simulate(graph, sage(60), MACHINE, batch_size=0)
    with pytest.raises(ValueError, match="'ranks' is 64, but a power law"):
        by_hand().extrapolate(ranks=64)
    with pytest.raises(ValueError, match="'ranks' is 4001, expected an integer between 1 and 4000"):
        by_hand().extrapolate(ranks=4001)
    for shards in ([0, 30, 30, 60], [0, 30], [0, 30, 61], [1, 60], [0.0, 60.0]):
        graph.shards = torch.tensor(shards)
        with pytest.raises(ValueError, match="'shards' "):
            simulation.simulate(graph, sage(60), MACHINE)
    graph.shards = torch.tensor([0, 1, 60]) if 1 not in graph.parts else torch.tensor([0, 2, 60])
    with pytest.raises(ValueError, match="a part that lies in several shards"):
        partition_statistics(graph)
    with pytest.raises(ValueError, match="'graph' has no 'shards'"):
        partition_statistics(Data(edge_index=graph.edge_index, num_nodes=60))


def test_batches_of_every_power_of_two_parts_are_measured():
    sizes = [len(parts) for parts in choose_parts(6)]
    assert sorted(set(sizes)) == [1, 2, 4]
    assert sizes == sorted(sizes)


@pytest.mark.slow  # Processes for every rank.
def test_what_ranks_take_of_a_core_is_measured():
    cost = measure_ranks(2, [64, 32], [64 * 32, 32])
    assert 1e-4 < cost.seconds_per_exchange < 1
    assert 1e7 < cost.bandwidth < 1e12


def test_an_exchange_takes_a_time_in_every_step():
    slow = dataclasses.replace(MACHINE, seconds_per_exchange=1.0)
    found, before = simulate(machine=slow), simulate()
    assert found.copy_seconds - before.copy_seconds == pytest.approx(found.steps)
