"""Weights of batches in the gradient, in unusual loops, and state that is dropped."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from processes import run_on
from test_ranks_stores import OPTIONS, float_data, float_net
from torch.nn.parallel import DistributedDataParallel

import gas

pytestmark = pytest.mark.slow  # Processes for every rank.

RANKS, PARTS = 2, 4
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def parts_of(data, **options):
    """Return a model, its batches on this rank, and labels on few nodes."""
    model = gas.to_scalable(float_net(data), data)
    graph = gas.cluster(data, PARTS, RANKS, model=model, **OPTIONS)
    wrapped = gas.distribute(model, **options)
    loader = gas.SubgraphLoader(graph, log=False)
    wrapped.predict(graph)
    return wrapped, loader, graph


def loss_of(out, batch):
    own = batch.own
    return F.cross_entropy(out[own.train_mask], own.y[own.train_mask])


def gradient(model):
    return torch.cat([p.grad.view(-1).clone() for p in model.parameters()])


def accumulated(rank, way):
    """Return the gradient of all batches, added up before a step."""
    wrapped, loader, _ = parts_of(float_data())
    batches = list(loader)
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        if way == "no_sync" and not last:
            with wrapped.no_sync():
                loss_of(wrapped(batch), batch).backward()
        else:
            loss_of(wrapped(batch), batch).backward()
    return gradient(wrapped)


def without_labels_at_last(rank):
    """Accumulated gradients stay when the last batch has no labels on any rank."""
    wrapped, loader, _ = parts_of(float_data())
    first, last = loader
    loss_of(wrapped(first), first).backward()
    before = gradient(wrapped)
    last.data.train_mask[:] = False
    loss_of(wrapped(last), last).backward()
    return before, gradient(wrapped)


def read_only(rank):
    """Return gradients of what isn't weighed are the plain mean of the ranks'."""
    wrapped, loader, _ = parts_of(float_data())
    found = {}
    first = next(iter(loader))
    for name, model in (("push=False", wrapped), ("own", wrapped.module)):
        model.zero_grad()
        model(first, push=False).sum().backward()
        found[name] = gradient(wrapped)
    wrapped.eval()
    wrapped(first)  # A validation that forgot no_grad changes nothing of what follows.
    wrapped.train()
    wrapped.zero_grad()
    loss_of(wrapped(first), first).backward()
    found["after"] = gradient(wrapped)
    wrapped.zero_grad()
    loss_of(wrapped(first), first).backward()
    found["alone"] = gradient(wrapped)
    return found


def weights(rank):
    """By a function of fractions, and by plain DDP around a connected model."""
    found = []
    for weight in (lambda batch: 0.001 * int(batch.own.train_mask.sum()), "train_mask"):
        wrapped, loader, _ = parts_of(float_data(), weight=weight)
        first = next(iter(loader))
        loss_of(wrapped(first), first).backward()
        found.append(gradient(wrapped))
    model, loader, _ = parts_of(float_data(), wrap=False)
    plain = DistributedDataParallel(model)
    first = next(iter(loader))
    loss_of(plain(first), first).backward()
    return [*found, gradient(plain)]


def forgotten(rank):
    """Return rows of the past, after a reset and after inference."""
    wrapped, loader, graph = parts_of(float_data())
    model = wrapped.module
    first, second = loader
    wrapped(first)
    model.reset_parameters()
    wrapped(second)
    model.ranks.receive_pending()
    written = [int(history.written[: loader.num_own].sum()) for history in model.histories]
    wrapped(first)
    stale = wrapped.staleness(loader)
    del graph.shards
    whole = gas.distribute(gas.to_scalable(float_net(float_data()), float_data()))
    every = gas.SubgraphLoader(graph, batch_size=PARTS // 2, log=False)
    whole.eval()
    with torch.no_grad():
        whole(every.cut([2 * rank, 2 * rank + 1]))
        whole.predict(graph)
        before = [history.pull() for history in whole.histories]
        whole.module.ranks.receive_pending()
    same = all(map(torch.equal, before, [history.pull() for history in whole.histories]))
    return {"written": written, "of": second.batch_size, "stale": len(stale), "same": same}


def wrapper(rank):
    """Attributes set on the wrapper are the model's; copies are refused; connections close."""
    wrapped, _, _ = parts_of(float_data())
    wrapped.io = "serial"
    said = []
    for act in (copy.deepcopy, pickle.dumps):
        try:
            act(wrapped)
        except TypeError as error:
            said.append(str(error))
    wrapped.module.close()
    return wrapped.module.io, said


def everything(rank):
    cases = [("added up", accumulated, "sync"), ("no_sync", accumulated, "no_sync")]
    found = {name: act(rank, way) for name, act, way in cases}
    for act in (without_labels_at_last, read_only, weights, forgotten, wrapper):
        found[act.__name__] = act(rank)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on(RANKS, everything, tmp_path_factory.mktemp("ranks"))


def reference():
    """Return the gradient of the mean of every step, added up, of one process."""
    data = float_data()
    model = gas.to_scalable(float_net(data), data)
    graph = gas.cluster(data, PARTS, RANKS, model=model, **OPTIONS)
    model.predict(graph)
    loader = gas.SubgraphLoader(graph, log=False)
    steps = PARTS // RANKS
    total = 0
    for step in range(steps):
        outs = []
        for rank in range(RANKS):
            batch = loader.cut([rank * steps + step])
            own = batch.own
            out = model(batch, push=False)
            loss = F.cross_entropy(out[own.train_mask], own.y[own.train_mask], reduction="sum")
            outs.append((loss, int(own.train_mask.sum())))
        for rank in range(RANKS):  # They all have seen the histories as they were.
            model(loader.cut([rank * steps + step]))
        total = total + sum(loss for loss, _ in outs) / sum(count for _, count in outs)
    total.backward()
    return gradient(model)


@pytest.mark.parametrize("way", ["added up", "no_sync"])
def test_gradients_that_are_added_up(way, ranks):
    want = reference()
    assert float(want.abs().max()) > 1e-3
    for of_rank in ranks:
        torch.testing.assert_close(of_rank[way], want, **CLOSE)


def test_a_batch_without_labels_leaves_what_was_added_up(ranks):
    for before, after in (of_rank["without_labels_at_last"] for of_rank in ranks):
        assert float(before.abs().max()) > 0
        assert torch.equal(before, after)


def test_what_only_reads_counts_alike(ranks):
    found = [of_rank["read_only"] for of_rank in ranks]
    mean = torch.stack([each["own"] for each in found]).mean(dim=0)
    for each in found:
        torch.testing.assert_close(each["push=False"], mean, **CLOSE)
        torch.testing.assert_close(each["after"], each["alone"], **CLOSE)


def test_weights_may_be_fractions_and_ddp_plain(ranks):
    for of_rank in ranks:
        fractions, mask, plain = of_rank["weights"]
        assert float(mask.abs().max()) > 0
        torch.testing.assert_close(fractions, mask, **CLOSE)
        torch.testing.assert_close(plain, mask, **CLOSE)


def test_what_is_on_its_way_is_forgotten_too(ranks):
    for found in (of_rank["forgotten"] for of_rank in ranks):
        assert found["written"] == [found["of"]] * 2
        assert found["stale"] == 2
        assert found["same"]


def test_the_wrapper_is_no_copy(ranks):
    for io, said in (of_rank["wrapper"] for of_rank in ranks):
        assert io == "serial"
        assert len(said) == 2
        assert all("distribute the copy" in text for text in said)
