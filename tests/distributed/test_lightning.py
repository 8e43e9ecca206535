"""Lightning's DDP strategy, which makes loaders anew with a DistributedSampler; the example."""

import copy
import os
import runpy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from processes import run_on
from test_ranks import NODES, PARTS, clustered, graph_data, net_of
from torch.utils.data.distributed import DistributedSampler

import gas

pytestmark = [pytest.mark.requires("lightning"), pytest.mark.slow]  # Processes for every rank.
SCRIPT = ROOT / "examples" / "lightning_ddp.py"
RANKS, EPOCHS = 2, 2


def run(*options):
    command = [sys.executable, str(SCRIPT), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy_in(out):
    return float(out.split("test accuracy")[1].split("%")[0])


@pytest.mark.parametrize("options", [(), ("--devices", 1, "--shards")], ids=str)
def test_example(options):
    out = run("--epochs", 4, "--dataset", "planted:600", "--lr", 0.05, *options)
    assert out.startswith(f"processes      {1 if options else 2}\ntest accuracy")
    assert out.count("test accuracy") == 1
    assert accuracy_in(out) > 50  # Of 16 classes.


# Its module, on ranks that are there already ------------------------------------------------------


def fitted(example, model, graph, loader=None, epochs=EPOCHS, **options):
    """Return weights and rows after training by Lightning; histories are empty in the beginning."""
    import lightning

    class Module(example["Classifier"]):
        def on_fit_start(self):
            refresh, self.model.refresh = self.model.refresh, lambda graph: None
            super().on_fit_start()
            self.model.refresh = refresh

        def on_train_batch_start(self, batch, batch_idx):
            seen.append(batch.offset.tolist())

    seen = []
    trainer = lightning.Trainer(
        strategy="ddp", accelerator="cpu", devices=RANKS, max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    trainer.fit(Module(model, graph, 1, 0.01), loader)
    model.ranks.exchange.receive_messages()
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "written": [history.written.clone() for history in model.histories],
        "rows": [h.pull(torch.arange(h.num_embeddings)) for h in model.histories],
        "seen": seen,
        "pred": model.predict(graph),
    }


def by_hand(model, graph):
    """Return the same without Lightning."""
    wrapped = gas.distribute(model)
    sampler = DistributedSampler(range(PARTS), seed=0)
    loader = gas.SubgraphLoader(graph, sampler=sampler, log=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            mask = batch.own.train_mask
            F.cross_entropy(wrapped(batch)[mask], batch.own.y[mask]).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def on_one_rank(rank):
    names = {"LOCAL_RANK": rank, "RANK": rank, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "test"}
    sizes = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in {**names, **sizes}.items()})
    example = runpy.run_path(str(SCRIPT))
    data = graph_data()
    model = gas.to_scalable(net_of("GraphSAGE", data), data, dtype=torch.float64)
    graph = clustered(data, model, 1)
    found = {}
    found["hook"] = fitted(example, copy.deepcopy(model), graph)
    loader = gas.SubgraphLoader(graph, shuffle=True, log=False)
    found["loader"] = fitted(example, copy.deepcopy(model), graph, loader)
    found["by hand"] = by_hand(copy.deepcopy(model), graph)
    shards = clustered(data, model, RANKS)
    own = {"use_distributed_sampler": False}
    found["shards"] = fitted(example, copy.deepcopy(model), shards, **own)
    loader = gas.SubgraphLoader(shards, shuffle=True, log=False)
    for given in (None, loader):
        try:
            fitted(example, copy.deepcopy(model), shards, given)
        except ValueError as error:
            found["refused", given is None] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on(RANKS, on_one_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", ["hook", "loader"])
def test_parts_are_shared_out(case, ranks):
    """Also if Lightning didn't see the loader being made."""
    found = [each[case] for each in ranks]
    for epoch in range(EPOCHS):
        steps = PARTS // RANKS
        seen = [each["seen"][epoch * steps : (epoch + 1) * steps] for each in found]
        parts = [offset for one in seen for (offset,) in one]
        assert len(set(parts)) == len(parts) == PARTS
    assert found[0]["seen"][:steps] != found[0]["seen"][steps:]  # It is told the epoch.
    for each in found:
        assert all(written.all() for written in each["written"])
        assert each["rows"][0].size(0) == NODES
        for rows, other in zip(each["rows"], found[0]["rows"], strict=True):
            assert torch.equal(rows, other)
        for weight, want in zip(each["weights"], found[0]["weights"], strict=True):
            assert torch.equal(weight, want)
        assert torch.equal(each["pred"], found[0]["pred"])


def test_training_is_that_of_a_plain_loop(ranks):
    """The mean of gradients is by labelled nodes."""
    for each in ranks:
        for case in ("hook", "loader"):
            for weight, want in zip(each[case]["weights"], each["by hand"], strict=True):
                torch.testing.assert_close(weight, want, rtol=1e-9, atol=1e-11)


def test_shards_are_not_shared_out_again(ranks):
    for each in ranks:
        found = each["shards"]
        assert len(found["seen"]) == EPOCHS * PARTS // RANKS
        assert len({offset for (offset,) in found["seen"]}) == PARTS // RANKS
        assert all(written.all() for written in found["written"])
        for weight, want in zip(found["weights"], ranks[0]["shards"]["weights"], strict=True):
            assert torch.equal(weight, want)
        assert torch.equal(found["pred"], ranks[0]["shards"]["pred"])
        for from_hook in (True, False):
            assert "Trainer(use_distributed_sampler=False)" in each["refused", from_hook]
