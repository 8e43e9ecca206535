"""Checkpoints of many ranks: all have completed one, or it doesn't count; others can go on."""

import contextlib
import errno
import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import FORKS
from processes import run_on
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gas
from gas.checkpoint import CheckpointError
from gas.checkpoint.files import read_newest

pytestmark = pytest.mark.slow  # Processes for every rank.

NODES, CLASSES, PARTS = 60, 3, 8
CASES = [(overlap, dtype) for overlap in (False, True) for dtype in ("float32", "int8")]
# Every rank has the whole graph; and batches are prepared ahead.
OTHERS = [(True, "whole"), (False, "prefetch")]
STEPS, STOP = 10, 6  # Of 4 an epoch: in the middle of the second.


def graph_data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.rand(NODES, 5, generator=generator) - 0.5,
        edge_index=torch.randint(NODES, (2, 4 * NODES), generator=generator),
        y=torch.randint(CLASSES, (NODES,), generator=generator),
        train_mask=torch.rand(NODES, generator=generator) < 0.7,
    )


def training(num_ranks, overlap=False, dtype="float32", data=None, seed=0):
    """Return a model, its optimizer and its loader, as a program makes them whenever it starts."""
    data = graph_data() if data is None else data
    torch.manual_seed(seed)
    net = GraphSAGE(data.num_features, 6, 3, CLASSES, dropout=0.3)
    known = dtype not in ("whole", "prefetch")
    model = gas.to_scalable(net, data, dtype=dtype if known else "float32")
    options = {"method": "random", "log": False, "cache": False}
    if num_ranks > 1 and dtype != "whole":
        options["shards"] = num_ranks
    graph = gas.cluster(data, PARTS, model=model, **options)
    if dist.is_initialized():
        model = gas.distribute(model, overlap=overlap)
        torch.manual_seed(dist.get_rank())
    options = {"shuffle": True}
    if dtype == "whole":
        options = {"sampler": DistributedSampler(range(PARTS), shuffle=False)}
    loader = gas.SubgraphLoader(graph, batch_size=1, log=False, **options)
    if dtype == "prefetch":
        loader = gas.PrefetchLoader(loader, model.module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return model, optimizer, loader


def train(model, optimizer, loader, steps, then=lambda: None):
    """Return the losses of some steps, and what is called in the loop after the last of them."""
    found = []
    while True:
        for batch in loader:
            own = batch.own
            loss = F.cross_entropy(model(batch)[own.train_mask], own.y[own.train_mask])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
            if len(found) == steps:
                then()
                return found


def rows_by_node(model, loader, of_replicas=False):
    """Return values and ages of every history, by the original nodes of its rows."""
    model = getattr(model, "module", model)
    perm, shard = loader.data.perm, loader.shard
    own = len(perm) if shard is None else shard.num_own
    some = slice(own, None) if of_replicas else slice(0, own)
    return perm[some], [(h.emb[some].clone(), h.age[some].clone()) for h in model.histories]


def of_all(found):
    """Gather :func:`rows_by_node` of all ranks, in the order of the nodes."""
    node = torch.cat([perm for perm, _ in found])
    order = node.argsort()
    assert torch.equal(node[order], torch.arange(NODES))
    of_each = zip(*(histories for _, histories in found), strict=True)
    return [tuple(torch.cat(parts)[order] for parts in zip(*h, strict=True)) for h in of_each]


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, getattr(error, "errno", None), str(error)
    return None


# In the middle of an epoch ------------------------------------------------------------------------


def begun(rank, folder):
    """Uninterrupted curves; and the same trainings until they are saved."""
    found = {}
    for case in CASES + OTHERS:
        place = folder / "-".join(map(str, case))
        whole = train(*training(2, *case), STEPS)
        parts = training(2, *case)
        model, _, loader = parts
        paths = []

        def save(place=place, parts=parts, paths=paths):
            paths.append(gas.save(place, *parts, histories=True, epoch=1, generator=None))

        first = train(*parts, STOP, save)
        assert first == whole[:STOP]
        on_its_way = len(model.module.ranks.exchange._arriving)
        found[case] = {"whole": whole, "path": paths[0], "on_its_way": on_its_way}
        if case in CASES:
            found[case]["rows"] = rows_by_node(model, loader)
            found[case]["pred"] = model.predict(loader.data)
    return found


def gone_on(rank, folder):
    """Return the rest of the curves, in other processes."""
    found = {}
    for case in CASES + OTHERS:
        place = folder / "-".join(map(str, case))
        parts = training(2, *case, seed=5)  # Which the checkpoint replaces.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state = gas.load(place, *parts)
        assert state == {"epoch": 1, "generator": None}
        rest = train(*parts, STEPS - STOP)
        again = gas.load(place, *parts) and train(*parts, STEPS - STOP)  # Others are on their way.
        found[case] = {"rest": rest, "again": again}
    found["refusals"] = refusals(rank, folder / "-".join(map(str, CASES[0])))
    found["failures"] = failures(rank, folder / "failures")
    return found


def refusals(rank, place):
    """Return the refusals of both ranks, before anything is changed."""
    parts = training(2, seed=5)
    before = [p.clone() for p in parts[0].parameters()]
    found = {
        "background": error_of(gas.save, place, *parts, background=True),
        "no loader": error_of(gas.load, place, *parts[:2]),
        "nothing to save from": error_of(gas.save, place, *parts[:2]),
        "an empty folder": error_of(gas.load, place / "x", *parts),
        "another rank's object": error_of(gas.save, place, *parts, a=object() if rank else 1),
    }
    copied = place.with_name("copied")
    if rank == 0:
        shutil.copytree(place, copied)
    dist.barrier()
    file = copied / "ranks_2" / "1" / "checkpoint_000001" / "history_0.safetensors"
    if rank == 0:
        file.write_bytes(file.read_bytes()[:-1] + b"\0\0")
    dist.barrier()
    found["damaged"] = error_of(gas.load, copied, *parts)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(file.parent)
    dist.barrier()
    found["missing"] = error_of(gas.load, copied, *parts)
    small = graph_data().subgraph(torch.arange(NODES - 8))
    found["fewer nodes"] = error_of(gas.load, place, *training(2, data=small, seed=5))
    found["another graph"] = error_of(gas.load, place, *training(2, data=graph_data(1), seed=5))
    assert all(torch.equal(p, b) for p, b in zip(parts[0].parameters(), before, strict=True))
    assert not any(h.written.any() for h in parts[0].module.histories)
    gas.load(place, *parts)
    assert any(not torch.equal(p, b) for p, b in zip(parts[0].parameters(), before, strict=True))
    return found


def failures(rank, place):
    """Return a disk is full on one rank."""
    parts = training(2)
    model = parts[0].module

    def save(number, **options):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        return gas.save(place, *parts, number=number, **options)

    def listing():
        dist.barrier()
        found = sorted(path.relative_to(place).as_posix() for path in place.rglob("*check*"))
        dist.barrier()
        return found

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    train(*parts, 2)
    found = {}
    save(1, keep=1)
    for name, patched, on in (
        ("in a file", "gas.checkpoint.writer.write_tensors", 1),
        ("in the name", "gas.native.files.os.replace", 0),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == on:
                patch.setattr(patched, full)
            error = error_of(save, 2, keep=1)
        state = gas.load(place, *parts)
        found[name] = error, state, float(next(model.parameters()).mean()), listing()
    save(3, keep=1)
    found["in the end"] = gas.load(place, *parts), listing()
    for number in (4, 5):
        save(number, keep=2)
    dist.barrier()
    if rank == 0:
        (place / "ranks_2" / "1" / "checkpoint_000005" / "model.safetensors").unlink()
    dist.barrier()
    found["advice"] = error_of(gas.load, place, *parts)
    older = place / "ranks_2" / str(rank) / "checkpoint_000004"
    found["older"] = gas.load(older, *parts)["number"], listing()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def first(folder):
    return run_on(2, begun, folder / "begun", folder)


@pytest.fixture(scope="module")
def second(first, folder):
    return run_on(2, gone_on, folder / "gone", folder)


@pytest.mark.parametrize("case", CASES + OTHERS, ids=str)
def test_what_goes_on_is_what_was_not_interrupted(case, first, second):
    for rank in range(2):
        whole = first[rank][case]["whole"]
        assert second[rank][case]["rest"] == whole[STOP:]
        assert second[rank][case]["again"] == whole[STOP:]
        assert first[rank][case]["on_its_way"] == int(case[0])
    assert first[0][case]["whole"] != first[1][case]["whole"]


def test_every_rank_refuses_what_one_does(second):
    found = second[0]["refusals"]
    for name, (kind, _, text) in found.items():
        other = second[1]["refusals"][name]
        assert other == (kind, None, text), name
    texts = {
        "background": "ValueError: 'background' is True",
        "no loader": "ValueError: rank 0: 'loader' isn't given",
        "nothing to save from": "ValueError: rank 0: 'loader' isn't given",
        "an empty folder": "CheckpointError: rank 0: 'folder' is",
        "another rank's object": "ValueError: rank 1: 'a' is of the type object",
        "damaged": "CheckpointError: rank 1: ",
        "missing": "CheckpointError: rank 1: ",
        "fewer nodes": "ValueError: rank 0: 'loader' has a graph of 52 nodes",
        "another graph": "ValueError: 'loader' has another graph",
    }
    for name, text in texts.items():
        assert f"{found[name][0]}: {found[name][2]}".startswith(text), name
    for name in ("damaged", "missing"):
        assert "ranks_2/1/checkpoint_000001" in found[name][2]
        assert "what rank 1 of 2 has saved" in found[name][2]


def test_a_disk_that_is_full_on_one_rank(second):
    for rank_folder in second:
        found = rank_folder["failures"]
        error, state, weight, files = found["in a file"]
        assert error[:2] == ("OSError", errno.ENOSPC)
        assert "rank 1: the disk has no room" in error[2]
        assert (state["number"], weight) == (1, 1)
        assert files == [f"ranks_2/{rank}/checkpoint_000001" for rank in range(2)]
        error, state, weight, files = found["in the name"]
        assert error[:2] == ("OSError", errno.ENOSPC)
        assert "rank 0: " in error[2]
        assert (state["number"], weight) == (1, 1)
        state, files = found["in the end"]
        assert state["number"] == 3
        assert len(files) == 2
        kind, _, text = found["advice"]
        assert kind == "CheckpointError"
        assert "lacks its file model.safetensors" in text
        assert "All ranks have one before it" in text
        assert found["older"][0] == 4


# Another number of ranks --------------------------------------------------------------------------


def moved(rank, num_ranks, places, target=None):
    """Load each checkpoint on another number of ranks."""
    found = {}
    for case, place in places.items():
        model, optimizer, loader = training(num_ranks, *case, seed=5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = gas.load(place, model, optimizer, loader)
        found[case] = {
            "state": state,
            "warned": [str(each.message) for each in caught],
            "rows": rows_by_node(model, loader),
            "replicas": rows_by_node(model, loader, of_replicas=True),
            "moment": optimizer.state_dict()["state"][0]["exp_avg"].clone(),
        }
        if target is not None:
            gas.save(target / place.name, model, optimizer, loader, epoch=1)
        found[case]["pred"] = model.predict(loader.data)
        assert len(train(model, optimizer, loader, 3)) == 3
    return found


@pytest.fixture(scope="module")
def places(folder):
    return {case: folder / "-".join(map(str, case)) for case in CASES}


@pytest.fixture(scope="module")
def four(first, folder, places):
    return run_on(4, moved, folder / "four", 4, places, folder / "of_four")


def check_moved(found, first, case):
    """Return rows, ages and predictions are those of before."""
    want = of_all([rank_folder[case]["rows"] for rank_folder in first])
    have = of_all([rank_folder[case]["rows"] for rank_folder in found])
    for (rows, ages), (rows_then, ages_then) in zip(have, want, strict=True):
        assert torch.equal(rows, rows_then)
        assert torch.equal(ages, ages_then)
        assert (ages_then >= 0).any()
        assert len(ages_then.unique()) > 2
    for rank_folder in found:
        node, histories = rank_folder[case]["replicas"]
        for (rows, ages), (rows_then, ages_then) in zip(histories, want, strict=True):
            assert torch.equal(rows, rows_then[node])
            assert torch.equal(ages, ages_then[node])
        assert rank_folder[case]["state"] == {"epoch": 1} | (
            {"generator": None} if "generator" in rank_folder[case]["state"] else {}
        )
        torch.testing.assert_close(rank_folder[case]["pred"], first[0][case]["pred"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_from_two_to_four_ranks(case, first, four):
    check_moved(four, first, case)
    warned = [rank_folder[case]["warned"] for rank_folder in four]
    assert warned[1:] == [[], [], []]
    assert any("the checkpoint was written by 2 processes" in text for text in warned[0])
    moments = [rank_folder[case]["moment"] for rank_folder in four]
    assert all(torch.equal(each, moments[0]) for each in moments)
    assert any(len(rank_folder[case]["replicas"][0]) for rank_folder in four)


def test_from_four_to_one_and_two_ranks(first, four, folder, places):
    of_four = {case: folder / "of_four" / place.name for case, place in places.items()}
    alone = [moved(0, 1, of_four, folder / "of_one")]
    of_one = {case: folder / "of_one" / place.name for case, place in places.items()}
    two = run_on(2, both, folder / "two", of_four, of_one)
    for case in CASES:
        check_moved(alone, first, case)
        check_moved([rank_folder[0] for rank_folder in two], first, case)
        check_moved([rank_folder[1] for rank_folder in two], first, case)
    plain = GraphSAGE(5, 6, 3, CLASSES)
    assert gas.load(of_four[CASES[0]], plain) == {"epoch": 1}
    assert gas.load(of_four[CASES[0]]) == {"epoch": 1}
    assert gas.checkpoint.peek(of_four[CASES[0]], "epoch") == {"epoch": 1}
    with pytest.raises(ValueError, match="'loader' isn't given"):
        gas.load(of_four[CASES[0]], *training(1)[:2])


def both(rank, *of):
    return [moved(rank, 2, places) for places in of]


def test_one_process_goes_on_in_the_folder_of_many(first, folder, places, tmp_path):
    place = tmp_path / "folder"
    shutil.copytree(places[CASES[0]], place)
    model, optimizer, loader = training(1)
    with pytest.warns(UserWarning, match="written by 2 processes"):
        gas.load(place, model, optimizer, loader)
    path = gas.save(place, model, optimizer, loader, epoch=7)
    assert path.name == "checkpoint_000002"  # Newer than theirs.
    assert gas.load(place, model, optimizer, loader) == {"epoch": 7}
    (place / "newest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="newest.json doesn't say"):
        gas.load(place, model)


def test_what_other_numbers_of_ranks_have_left(first, places, tmp_path):
    """It stays until there are as many new ones as are to be kept; the newest is loaded."""
    place = tmp_path / "folder"
    shutil.copytree(places[CASES[0]], place)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parts = training(1)
        with pytest.warns(UserWarning, match="written by 2 processes"):
            gas.load(place, *parts)
        gas.save(place, *parts, keep=2)
        assert read_newest(place) == (1, 2)
        assert (place / "ranks_2" / "0" / "checkpoint_000001").exists()
        gas.save(place, *parts, keep=2)
        assert not (place / "ranks_2").exists()
        path = gas.save(place, *parts, keep=1, number=4)
        assert path == place / "ranks_1" / "0" / "checkpoint_000004"
        assert [found.name for found in path.parent.iterdir()] == [path.name]
    finally:
        dist.destroy_process_group()
    alone = training(1)
    assert gas.load(place, *alone) == {"number": 4}  # One process of one: as it was.
    gas.save(place, *alone, number=5)
    assert gas.load(place, *alone) == {"number": 5}


# A rank is killed ---------------------------------------------------------------------------------


def filled(model, number):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    for history in model.histories:
        history.push(torch.full((history.num_embeddings, history.embedding_dim), float(number)))


def check_filled(model, number):
    assert all(bool((parameter == number).all()) for parameter in model.parameters())
    assert all(bool((history.emb == number).all()) for history in model.histories)


def killed_at(call, patch):
    """This process is killed before or after it changes the disk: of all such moments, the n-th."""
    left = [call]

    def moment():
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counting(function):
        def counted(*args, **kwargs):
            moment()
            result = function(*args, **kwargs)
            moment()
            return result

        return counted

    for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir"):
        patch.setattr(os, name, counting(getattr(os, name)))


def save_on(rank, store, folder, steps, call=None):
    """Save checkpoints in a process that is killed at any moment."""
    torch.set_num_threads(1)
    if call is not None:
        killed_at(call, pytest.MonkeyPatch())
    store = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, _, loader = training(2)
    number = 0
    if read_newest(folder) is not None:
        number = gas.load(folder, model, None, loader)["number"]
        check_filled(model.module, number)
    else:
        model.module.ranks.bind(model.module, loader.shard)
    for _ in range(1000):
        number += 1
        filled(model.module, number)
        gas.save(folder, model, None, loader, keep=1, number=number)
        steps.put((rank, number))


@pytest.mark.skipif(os.name == "nt", reason="needs the calls of POSIX")
def test_a_rank_is_killed_at_any_moment(tmp_path):
    draw = random.Random(0)
    folder, numbers = Path(tmp_path / "run"), [0]
    alone, _, loader = training(1)
    for attempt in range(20):
        steps = FORKS.Queue()
        args = (str(tmp_path / f"store{attempt}"), folder, steps)
        victim, by_call = attempt % 2, attempt > 5
        calls = {victim: draw.randrange(80)} if by_call else {}
        processes = [
            FORKS.Process(target=save_on, args=(rank, *args, calls.get(rank))) for rank in range(2)
        ]
        with contextlib.ExitStack() as stack:
            for process in processes:
                process.start()
                stack.callback(process.join)
                stack.callback(process.kill)
            told = 0
            if by_call:
                processes[victim].join(60)
            else:
                told = steps.get(timeout=60)[1]
                time.sleep(draw.uniform(0, 0.1))  # Anywhere in what follows that step.
                processes[victim].kill()
            time.sleep(draw.uniform(0, 0.05))  # The other one may get further.
        assert processes[victim].exitcode == -signal.SIGKILL
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = gas.load(folder, alone, None, loader)
        check_filled(alone, state["number"])
        assert state["number"] >= max(told - 1, numbers[-1])
        numbers.append(state["number"])
    assert numbers[-1] > 20
    left = [path for path in folder.rglob("checkpoint_*") if path.is_dir()]
    assert 2 <= len(left) <= 4
