"""The data module for Lightning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE, to_hetero

import gas

# Lightning itself uses names that PyTorch has deprecated.
requires_lightning = pytest.mark.requires("lightning")
ignores_warnings = pytest.mark.filterwarnings("ignore")


def test_without_lightning(monkeypatch):
    monkeypatch.setattr("gas.contrib.lightning.LightningDataModule", object)
    with pytest.raises(ImportError, match="pip install lightning"):
        gas.lightning.PartitionData("graph")


@requires_lightning
@ignores_warnings
def test_training_and_validation_have_all_parts(tmp_path):
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model, self.seen, self.validated = model, [], []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch.offset.tolist())
            own = batch.own
            return F.cross_entropy(self.model(batch)[own.train_mask], own.y[own.train_mask])

        def validation_step(self, batch, batch_idx):
            self.validated.append(batch.offset.tolist())
            assert self.model(batch, push=False).size(0) == batch.batch_size

        def configure_optimizers(self):
            return torch.optim.Adam(self.model.parameters(), lr=0.01)

    torch.manual_seed(0)
    data, in_channels, out_channels = gas.get_data(tmp_path, "planted:500")
    model = gas.to_scalable(GraphSAGE(in_channels, 16, 2, out_channels), data)
    graph = gas.cluster(data, 8, model=model, method="random", log=False)
    model.refresh(graph)
    before = [p.detach().clone() for p in model.parameters()]
    module, parts = Classifier(model), gas.lightning.PartitionData(graph, batch_size=2)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, parts)
    starts = graph.parts[:-1].tolist()
    for epoch in (module.seen[:4], module.seen[4:]):
        assert sorted(start for batch in epoch for start in batch) == starts
    assert module.seen[:4] != module.seen[4:]
    assert module.validated == 2 * [[starts[i]] for i in (0, 2, 4, 6)]
    assert not any(map(torch.equal, before, model.parameters()))


@requires_lightning
@ignores_warnings
def test_arguments_are_those_of_the_loader():
    graph = gas.cluster(gas.get_data("unused", "planted:100")[0], 5, method="random", log=False)
    parts = gas.lightning.PartitionData(graph, 2, shuffle=False, precompute=False)
    assert [batch.offset.numel() for batch in parts.train_dataloader()] == [2, 2, 1]
    assert not parts.train_dataloader().feature_sums.is_on
    with pytest.raises(ValueError, match="'batch_size' is 0"):
        gas.lightning.PartitionData(graph, 0)


@requires_lightning
@ignores_warnings
@pytest.mark.parametrize("step", [3, 4])
def test_a_checkpoint_goes_on_with_the_rest_of_the_epoch_and_filled_histories(tmp_path, step):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Classifier(lightning.LightningModule):
        def __init__(self, model, graph):
            super().__init__()
            self.model, self.graph, self.seen, self.errors = model, graph, [], []

        def training_step(self, batch, batch_idx):
            if not self.seen:  # The stored rows are those of the weights that were loaded.
                kept = [history.emb.clone() for history in self.model.histories]
                self.model.refresh(self.graph, log=False)
                now = [history.emb for history in self.model.histories]
                self.errors = [float((a - b).abs().max()) for a, b in zip(kept, now, strict=True)]
            self.seen.append((self.current_epoch, batch.offset.tolist()))
            own = batch.own
            return F.cross_entropy(self.model(batch)[own.train_mask], own.y[own.train_mask])

        def configure_optimizers(self):
            return torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train(seed, callbacks=(), **options):
        torch.manual_seed(seed)
        data, in_channels, out_channels = gas.get_data(tmp_path, "planted:500")
        model = gas.to_scalable(GraphSAGE(in_channels, 16, 2, out_channels), data)
        graph = gas.cluster(data, 8, model=model, method="random", log=False)
        model.refresh(graph, log=False)
        module = Classifier(model, graph)
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, callbacks=list(callbacks),
            enable_checkpointing=bool(callbacks), enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, gas.lightning.PartitionData(graph, batch_size=2), **options)
        return module

    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=step, save_top_k=-1)
    whole = train(0, [saving])
    again = train(1, ckpt_path=tmp_path / f"step={step}.ckpt", weights_only=False)
    assert len(again.seen) == len(whole.seen) - step
    rest = [parts for epoch, parts in again.seen if epoch == 0]
    assert rest == [parts for _, parts in whole.seen[step:4]]
    last = [start for epoch, parts in again.seen if epoch == 1 for start in parts]
    assert sorted(last) == sorted(start for _, parts in whole.seen[4:] for start in parts)
    assert max(again.errors) < 1e-5


@requires_lightning
@ignores_warnings
def test_validation_of_a_checkpoint_keeps_its_statistics_of_norms(tmp_path):
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model, self.outs = model, []

        def validation_step(self, batch, batch_idx):
            self.outs.append(self.model(batch, push=False))

    data, in_channels, out_channels = gas.get_data(tmp_path, "planted:500")
    net = GraphSAGE(in_channels, 16, 2, out_channels, norm="batch_norm")
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 8, model=model, method="random", log=False)
    module = Classifier(model)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    parts = gas.lightning.PartitionData(graph, batch_size=2)
    trainer.validate(module, parts, verbose=False)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    module.outs.clear()
    trainer.validate(module, parts, tmp_path / "a.ckpt", verbose=False, weights_only=False)
    assert all(torch.equal(value, kept[name]) for name, value in module.state_dict().items())
    expected = model.eval().predict(graph, log=False)[graph.perm]
    torch.testing.assert_close(torch.cat(module.outs), expected)


@requires_lightning
@ignores_warnings
def test_heterogeneous_graphs_are_trained_and_resumed(tmp_path):
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model, self.epochs, self.rows, self.validated = model, [], None, []

        def training_step(self, batch, batch_idx):
            if self.rows is None:
                self.rows = [history.emb.clone() for history in self.model.histories]
            self.epochs.append(self.current_epoch)
            out = self.model(batch)["a"]
            return F.cross_entropy(out, batch["a"].y[: out.size(0)])

        def validation_step(self, batch, batch_idx):
            out = self.model(batch, push=False)["a"]
            self.validated.append(batch["a"].n_id[: out.size(0)])

        def configure_optimizers(self):
            return torch.optim.Adam(self.model.parameters(), lr=0.01)

    torch.manual_seed(0)
    data = HeteroData()
    data["a"].x, data["a"].y = torch.randn(40, 4), torch.randint(2, (40,))
    data["b"].x = torch.randn(30, 4)
    pairs = torch.stack([torch.randint(40, (100,)), torch.randint(30, (100,))])
    data["a", "to", "b"].edge_index, data["b", "of", "a"].edge_index = pairs, pairs.flip(0)
    net = to_hetero(GraphSAGE((-1, -1), 8, 2, 2), data.metadata())
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, method="random", log=False)

    def train(epochs, model, **options):
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        module = Classifier(model)
        trainer.fit(module, gas.lightning.PartitionData(graph, batch_size=2), **options)
        return trainer, module

    trainer, module = train(1, model)
    assert module.epochs == [0, 0]
    assert torch.equal(torch.cat(module.validated), torch.arange(40))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    model.refresh(graph, log=False)
    expected = [history.emb.clone() for history in model.histories]
    again = train(2, gas.to_scalable(net, data), ckpt_path=tmp_path / "a.ckpt", weights_only=False)[
        1
    ]
    assert again.epochs == [1, 1]
    torch.testing.assert_close(again.rows, expected)
