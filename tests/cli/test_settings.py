import inspect

import pytest
from conftest import ROOT

import gas
from gas.cli import MODELS, Settings
from gas.cli.settings import ARCHITECTURES
from gas.datasets import dataset_key, dataset_names

FILES = sorted((ROOT / "benchmarks").glob("*/*.yaml"))


def test_every_cell_of_the_paper_is_there():
    names = [path.stem for path in FILES if path.parent.name == "paper_small"]
    for model, missing in {"gcn": (), "appnp": (), "gcn2": (), "gat": ("amazon",)}.items():
        found = {name.removesuffix(f"_{model}") for name in names if name.endswith(f"_{model}")}
        expected = {
            "cora", "citeseer", "pubmed", "coauthorcs", "coauthorphysics", "amazoncomputers",
            "amazonphoto", "wikics",
        }  # fmt: skip
        assert found == {name for name in expected if not name.startswith(missing or "-")}
    large = {path.stem.split("_")[0] for path in FILES if path.parent.name == "paper_large"}
    assert large == {"reddit2", "ppi", "flickr", "yelp", "ogbnarxiv", "ogbnproducts"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_settings_can_be_used(path):
    """Every file loads, names a known data set and model, and makes that model."""
    settings, about = Settings.load(path)
    known = {*map(dataset_key, dataset_names()), "planted"}
    assert dataset_key(about["dataset"]) in known
    assert path.stem == f"{dataset_key(about['dataset'])}_{about['model']}"
    architecture = dict(settings.architecture)
    width = architecture["hidden_channels"]
    if "aggregators" in architecture:
        import torch

        architecture["deg"] = torch.ones(4)
    if width <= 128:
        model = MODELS[about["model"]](4, 6, out_channels=3, **architecture)
        assert model.num_layers == settings.architecture["num_layers"]
    assert set(about) <= {"dataset", "model", "published"}


# Parts, parts per batch, learning rate, weight decays, clipping, epochs, layers and width: copied
# from the published configuration by hand, the files were made by a script.
CORNERS = {
    "cora_gcn": (40, 10, 0.01, 5e-4, 0, 1.0, 200, 2, 16),
    "citeseer_gcn": (24, 8, 0.01, 5e-4, 0, None, 200, 2, 16),
    "wikics_gcn": (32, 16, 0.02, 5e-4, 0, 1.0, 200, 2, 33),
    "pubmed_gat": (4, 1, 0.01, 1e-3, 0, None, 400, 2, 8),
    "wikics_gat": (2, 1, 0.007, 5e-4, 0, None, 400, 2, 14),
    "coauthorphysics_gat": (4, 1, 0.005, 0.01, 0, None, 400, 2, 8),
    "cora_appnp": (4, 2, 0.01, 0.005, 0, None, 600, 10, 64),
    "wikics_appnp": (4, 2, 0.02, 5e-4, 0, None, 600, 2, 64),
    "cora_gcn2": (2, 1, 0.01, 0.01, 5e-4, None, 1000, 64, 64),
    "citeseer_gcn2": (40, 20, 0.01, 0.01, 5e-4, 1.0, 1000, 32, 256),
    "amazoncomputers_gcn2": (32, 16, 0.01, 0.01, 5e-4, 1.0, 300, 16, 64),
    "ogbnarxiv_gcn": (80, 40, 0.01, 0, 0, None, 300, 3, 256),
    "ppi_gcn2": (20, 2, 0.001, 0, 0, 1.0, 2000, 9, 2048),
    "ogbnproducts_pna": (150, 1, 0.001, 0, 0, None, 150, 3, 256),
    "reddit2_pna_jk": (200, 100, 0.005, 0, 0, 1.0, 400, 3, 128),
}


@pytest.mark.parametrize("name", CORNERS)
def test_figures_of_published_settings(name):
    (path,) = (path for path in FILES if path.stem == name)
    s, _ = Settings.load(path)
    shape = s.architecture["num_layers"], s.architecture["hidden_channels"]
    decays = s.reg_weight_decay, s.nonreg_weight_decay
    found = (s.num_parts, s.batch_size, s.lr, *decays, s.grad_norm, s.epochs, *shape)
    assert found == CORNERS[name]
    assert s.inductive == name.startswith("ppi")


def test_published_settings():
    cora, about = Settings.load(ROOT / "benchmarks" / "paper_small" / "cora_gat.yaml")
    assert cora.architecture == {
        "num_layers": 2, "hidden_channels": 8, "hidden_heads": 8, "out_heads": 1, "dropout": 0.6,
    }  # fmt: skip
    assert (cora.num_parts, cora.batch_size, cora.lr, cora.epochs, cora.runs) == (
        40, 10, 0.005, 400, 20,
    )  # fmt: skip
    assert (cora.reg_weight_decay, cora.nonreg_weight_decay, cora.grad_norm) == (5e-4, 0, 1.0)
    assert about["published"] == {"mean": 83.32, "std": 0.62}
    # Recipes are those of the paper; defaults those of gas.fit.
    assert (cora.correct_drift, cora.average_weights) == (False, False)
    default = Settings.default("gat")
    assert (default.grad_norm, default.correct_drift, default.average_weights) == (1.0, True, True)


def test_an_empty_file_and_shared_defaults(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ValueError, match="holds no settings, expected lines such as 'lr: 0.01'"):
        Settings.load(tmp_path / "empty.yaml")
    Settings.default("gcn").architecture["dropout"] = 0.9
    assert Settings.default("gcn").architecture["dropout"] == 0.5
    assert Settings.default("sage").architecture["dropout"] == 0.5


def test_defaults_are_those_of_fit():
    fit = inspect.signature(gas.fit).parameters
    for name in ("grad_norm", "correct_drift", "average_weights", "warm_up"):
        assert getattr(Settings.default("gcn"), name) == fit[name].default


def test_changing_settings():
    base = Settings.default("gcn")
    changed = base.replace(lr=0.5, num_layers=7, epochs=None)
    assert (changed.lr, changed.epochs) == (0.5, base.epochs)
    assert changed.architecture == {**base.architecture, "num_layers": 7}
    assert base.architecture["num_layers"] == 2
    assert set(ARCHITECTURES) == set(MODELS)


def test_settings_that_nobody_gave():
    assert Settings() == Settings(
        {}, None, None, 0.01, 0.0, 0.0, None, 0.0, None, 100, 1, None, False
    )  # fmt: skip
    assert {name: layers["num_layers"] for name, layers in ARCHITECTURES.items()} == {
        "gcn": 2, "gat": 2, "appnp": 10, "gcn2": 8, "gin": 2, "sage": 2, "pna": 2, "pna_jk": 2,
    }  # fmt: skip
    assert ARCHITECTURES["gat"] == {
        "num_layers": 2, "hidden_channels": 8, "hidden_heads": 8, "out_heads": 1, "dropout": 0.5,
    }  # fmt: skip
    assert {ARCHITECTURES[name]["hidden_channels"] for name in {*MODELS} - {"gat"}} == {64}


def test_zero_is_a_rate():
    assert Settings(lr=0, reg_weight_decay=0.0, grad_norm=0, edge_dropout=0).lr == 0
    for name in ("lr", "reg_weight_decay", "nonreg_weight_decay", "grad_norm", "edge_dropout"):
        with pytest.raises(ValueError, match=f"'{name}' is -0.5, expected a finite number of"):
            Settings(**{name: -0.5})
    for name in ("num_parts", "batch_size", "max_steps", "epochs", "runs"):
        assert getattr(Settings(**{name: 1}), name) == 1
    with pytest.raises(ValueError, match="'edge_dropout' is 1, expected less than 1"):
        Settings(edge_dropout=1)


def test_sizes_follow_the_graph():
    sized = Settings().for_size(30_000)
    assert (sized.num_parts, sized.batch_size) == (100, 12)
    sized = Settings().for_size(10)
    assert (sized.num_parts, sized.batch_size) == (1, 1)
    sized = Settings().for_size(10**6)
    assert (sized.num_parts, sized.batch_size) == (256, 32)
    sized = Settings(num_parts=4, batch_size=9).for_size(10)
    assert (sized.num_parts, sized.batch_size) == (4, 4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lr: 5e-4", "'lr' is '5e-4', expected a finite number of at least 0: write 0.0005"),
        ("epochs: 0", "'epochs' is 0, expected an integer of at least 1"),
        ("num_parts: 1.5", "'num_parts' is 1.5, expected an integer"),
        ("grad_norm: none", "'grad_norm' is 'none', expected a finite number"),
        ("metric: mape", "'metric' is 'mape', expected one of accuracy"),
        ("epoch: 3", "'epoch' is no setting, expected some of architecture, average_weights"),
        ("epochs: true", "'epochs' is True, expected an integer"),
        ("lr: true", "'lr' is True, expected a finite number"),
        ("edge_dropout: 1.5", "'edge_dropout' is 1.5, expected less than 1"),
    ],
)
def test_wrong_settings_name_the_file(tmp_path, line, message):
    path = tmp_path / "mine.yaml"
    path.write_text(f"dataset: Cora\n{line}\n")
    with pytest.raises(ValueError, match=f"mine.yaml: {message}"):
        Settings.load(path)
