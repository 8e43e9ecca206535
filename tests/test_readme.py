"""What the documentation shows is run as it stands."""

import re

import pytest
import torch
from conftest import ROOT, random_graph

import gas

CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def blocks(file):
    return CODE.findall((ROOT / file).read_text())


def test_readme(capsys):
    (code,) = blocks("README.md")
    exec(compile(code, "README.md", "exec"), {})
    accuracy, *verified = capsys.readouterr().out.splitlines()
    assert float(accuracy) > 0.5  # Of 16 classes.
    assert verified[-1].startswith("exact")


def test_conversion(capsys):
    (code,) = blocks("docs/conversion.md")
    exec(compile(code, "conversion.md", "exec"), {"__name__": "conversion"})
    printed = re.search(
        r"\n```\n(Net: .*?)```", (ROOT / "docs/conversion.md").read_text(), re.DOTALL
    )
    assert printed is not None
    assert capsys.readouterr().out == printed.group(1)


def test_model_of_the_guide():
    model_code, _, inference_code = blocks("docs/models.md")
    namespace: dict = {}
    exec(compile(model_code.rstrip() + "\n\n" + inference_code, "models.md", "exec"), namespace)
    data = random_graph()
    perm, ptr = gas.metis(data.edge_index, 5, num_nodes=60, log=False)
    data = gas.permute(data, perm, log=False)
    model = namespace["SAGE"](60, 5, 8, 3, num_layers=3).eval()
    assert type(model).forward_layer is not gas.ScalableGNN.forward_layer
    expected = model(data.x, data.edge_index)
    loader = gas.EvalSubgraphLoader(data, ptr, batch_size=2, log=False)
    assert torch.allclose(model(loader=loader), expected, atol=1e-5)


def test_histories():
    namespace: dict = {}
    for code in blocks("docs/histories.md"):
        exec(compile(code, "histories.md", "exec"), namespace)
    assert namespace["out"].shape[1] == namespace["in_channels"]


def test_training():
    experiment, own_loop, other_graph = blocks("docs/training.md")
    namespace: dict = {}
    exec(compile(experiment, "training.md", "exec"), namespace)
    assert namespace["run"].test_acc[-1] > 0.1
    test_data = random_graph(features=namespace["data"].num_features)
    namespace.update(
        model=gas.models.GraphSAGE(90, test_data.num_features, 8, 3, 2),
        test_data=test_data,
        test_ptr=torch.tensor([0, 30, 60]),
    )
    exec(compile(own_loop, "training.md", "exec"), {"loader": [0, 1]})
    exec(compile(other_graph, "training.md", "exec"), namespace)
    assert namespace["out"].shape == (60, 3)


def test_augmentation(capsys):
    namespace: dict = {}
    whole, histories = blocks("docs/augmentation.md")
    exec(compile(whole, "augmentation.md", "exec"), namespace)
    assert "steps=12" in capsys.readouterr().out
    exec(compile(histories, "augmentation.md", "exec"), namespace)
    assert namespace["chain"].statistics().steps == 36
    assert namespace["out"].shape == (1000, namespace["out_channels"])


def test_imports_of_the_migration_page():
    (code,) = blocks("docs/migration.md")
    exec(compile(code, "migration.md", "exec"), {})


ECOSYSTEM = [
    "compile",
    "explain",
    pytest.param(
        "lightning",
        marks=[
            pytest.mark.requires("lightning"),
            pytest.mark.filterwarnings("ignore:.*LeafSpec"),
            pytest.mark.filterwarnings("ignore:.*does not have many workers"),
        ],
    ),
    pytest.param("hub", marks=pytest.mark.requires("huggingface_hub")),
]


@pytest.mark.parametrize("subject", ECOSYSTEM)
def test_ecosystem(subject):
    code = dict(
        zip(["compile", "explain", "lightning", "hub"], blocks("docs/ecosystem.md"), strict=True)
    )
    exec(compile(code[subject], "ecosystem.md", "exec"), {"__name__": "ecosystem"})
    torch._dynamo.reset()


PAGES = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"]
PAGES += [f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("file", PAGES)
def test_links_and_files_exist(file):
    text = (ROOT / file).read_text()
    assert not re.search(r"@[A-Z]+@", text)  # Places to be filled.
    folder = (ROOT / file).parent
    for link in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (folder / link).exists(), link
    for script in re.findall(r"`(\w+\.py)`", text):
        assert list(ROOT.glob(f"*/{script}")), script
    for path in re.findall(r"`((?:benchmarks|examples|gas|csrc|tests|docs)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
