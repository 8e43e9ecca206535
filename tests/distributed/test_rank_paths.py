"""A ``path`` that all ranks are given: each has its files in a folder of its own."""

from pathlib import Path

import pytest
import torch
from processes import run_on
from test_ranks import NODES, clustered, graph_data, net_of

import gas

RANKS = 2


def model_at(path):
    data = graph_data()
    return gas.to_scalable(net_of("GCN", data), data, store="disk", path=path)


def rows_of(model):
    return [history.pull(torch.arange(history.num_embeddings)) for history in model.histories]


def files_in(path):
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def on_one_rank(rank, path):
    """Whole graphs, then a shard; each model twice, which goes on with its rows."""
    found = []
    for number, shards in enumerate([1, RANKS]):
        folder = Path(path) / str(number)
        for _ in range(2):
            model = model_at(folder)
            graph = clustered(graph_data(), model, shards)
            resumed = [history.store.resumed for history in model.histories]
            model = gas.distribute(model, graph, wrap=False)
            before = rows_of(model)
            if not any(history.written.any() for history in model.histories):
                model.predict(graph)
            torch.distributed.barrier()
            found.append((resumed, before, rows_of(model), files_in(folder)))
            torch.distributed.barrier()
            model.close()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return run_on(RANKS, on_one_rank, folder, str(folder / "path"))


def names(folder):
    return [
        f"rank_{r}/{folder}history_{n}{end}" for r in (0, 1) for n in (0, 1) for end in ("", ".age")
    ]


@pytest.mark.slow  # Processes for every rank.
def test_ranks_share_a_path(ranks):
    """A rank goes on with its own rows; of a whole graph, all ranks have them all."""
    for first, again, *_ in ranks:
        assert first[0] == [False, False]
        assert again[0] == [True, True]
        assert first[3] == again[3] == names("")
        for before, after in zip(first[2], again[1], strict=True):
            assert before.shape == (NODES, 4)
            assert torch.equal(before, after)
            assert before.any()


@pytest.mark.slow
def test_shards_have_files_of_their_own_size(ranks):
    """Those of the whole graph, which the model was made for, are gone."""
    for *_, first, again in ranks:
        assert first[3] == again[3] == names("shard_of_2/")
        for before, after in zip(first[2], again[1], strict=True):
            assert NODES / RANKS <= before.size(0) < NODES + 1
            assert torch.equal(before, after)
            assert before.any()


def test_one_process_has_its_files_in_the_path_itself(tmp_path):
    model = model_at(tmp_path)
    assert files_in(tmp_path) == sorted(f"history_{n}{end}" for n in (0, 1) for end in ("", ".age"))
    message = "is in use: .* share a path if torch.distributed.init_process_group is called before"
    with pytest.raises(ValueError, match=message):
        model_at(tmp_path)
    model.close()
