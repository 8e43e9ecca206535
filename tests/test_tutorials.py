"""Run every notebook of the tutorials, in reduced sizes, and check its stored outputs."""

import ast
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import ROOT

FOLDER = ROOT / "docs" / "tutorials"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
PLACES = r"/(?:home|root|tmp|usr|opt|work|mnt|var|Users|private)/|ipykernel|site-packages"


def read(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def cells_of(notebook, kind):
    """Return the cells of a kind, and the source of each."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == kind]
    return [(cell, "".join(cell["source"])) for cell in cells]


def has_parameters(cell):
    return "parameters" in cell["metadata"].get("tags", ())


def run_cells(notebook, values, name="notebook"):
    """Execute the code of a notebook in a new namespace, with other values of its parameters."""
    sys.modules["tutorial"] = types.ModuleType("tutorial")  # PyG looks for the module of a class.
    namespace = vars(sys.modules["tutorial"])
    for number, (cell, source) in enumerate(cells_of(notebook, "code")):
        first, _, rest = source.partition("\n")
        if first.startswith("%%writefile "):
            Path(first.split()[1]).write_text(rest)
            continue
        exec(compile(source, f"{name}, code cell {number}", "exec"), namespace)
        if has_parameters(cell):
            assert values.keys() <= namespace.keys(), "no such parameter"
            namespace.update(values)
    return namespace


# Executed -----------------------------------------------------------------------------------------


def cora(found, printed):
    assert found["pred"].shape == (2708, 7)
    assert max(found["run"].val_acc) > 0.6
    assert torch.allclose(found["pred"], found["out"], atol=1e-4)


def convert(found, printed):
    assert found["scores"][-1]["test"] > 0.3  # Of 16 classes.
    assert found["difference"] < 1e-4
    assert "'norm' (GraphNorm) isn't exact on mini-batches" in printed
    assert Path("net.pt").exists()


def large(found, printed):
    assert found["pred"].shape == (3000, 16)
    assert list(found["steps"]) == ["write", "read", "partition", "train, evaluate", "predict"]
    assert found["sizes"]["peak of the process"] > found["sizes"]["histories"] > 0


def links(found, printed):
    assert found["losses"][-1] < found["losses"][0]
    assert found["ranks"].median() < 400  # Of 1,000.
    assert found["node"] not in found["best"]


def hetero(found, printed):
    assert found["pred"].shape == (800, 8)
    assert found["scores"][-1]["train"] > 0.3  # Of 8 topics.
    assert torch.allclose(found["pred"], found["whole"], atol=1e-4)


def out_of_core(found, printed):
    memory, disk = found["results"]["memory"], found["results"]["disk"]
    assert len(memory["losses"]) == 2
    assert memory["test"] == disk["test"] > 0.1
    assert disk["mapped"] > 0


def distributed(found, printed):
    for result in found["results"].values():
        assert result["prediction"] == [1000, 16]
        assert len(result["scores"]) == 2


REDUCED = {
    "cora": {"EPOCHS": 10},
    "convert": {"NUM_NODES": 1000, "EPOCHS": 6},
    "large": {"NUM_NODES": 3000, "NUM_PARTS": 16, "EPOCHS": 1},
    "links": {"NUM_NODES": 1000, "EPOCHS": 10},
    "hetero": {"NUM_PAPERS": 800, "EPOCHS": 6},
    "out_of_core": {"NUM_NODES": 3000, "NUM_PARTS": 16, "EPOCHS": 2},
    "distributed": {"NUM_NODES": 1000, "EPOCHS": 2},
}
CHECKS = {
    check.__name__: check
    for check in (cora, convert, large, links, hetero, out_of_core, distributed)
}
MARKS = {
    "cora": [pytest.mark.requires("shared")],
    "out_of_core": [pytest.mark.slow],  # Starts programs, as the next does.
    "distributed": [pytest.mark.slow],
}


def test_every_notebook_is_executed():
    assert set(NAMES) == REDUCED.keys() == CHECKS.keys()


@pytest.mark.requires("matplotlib")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, ())) for name in REDUCED]
)
def test_notebook_runs(name, tmp_path, monkeypatch, capsys, request):
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # Of the programs that it starts.
    plt.switch_backend("agg")
    values = dict(REDUCED[name])
    if name == "cora":
        values["ROOT"] = str(request.getfixturevalue("data_root"))
    try:
        found = run_cells(read(name), values, name)
        assert plt.get_fignums(), "it draws nothing"
        plt.gcf().savefig("figure.png")
    finally:
        plt.close("all")
    CHECKS[name](found, capsys.readouterr().out)


def one_cell(source, tags=()):
    return {"cells": [{"cell_type": "code", "metadata": {"tags": tags}, "source": [source]}]}


def test_a_cell_that_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError):
        run_cells(one_cell("1 / 0"), {})
    with pytest.raises(AssertionError, match="no such parameter"):
        run_cells(one_cell("SIZE = 3", ["parameters"]), {"SIZES": 1})
    assert run_cells(one_cell("SIZE = 3", ["parameters"]), {"SIZE": 1})["SIZE"] == 1
    run_cells(one_cell("%%writefile program.py\n1 / 0"), {})
    assert Path("program.py").read_text() == "1 / 0"


# As they are stored -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_parameters_come_first(name):
    cells = cells_of(read(name), "code")
    assert [number for number, (cell, _) in enumerate(cells) if has_parameters(cell)] == [0]
    for node in ast.parse(cells[0][1]).body:
        assert isinstance(node, ast.Assign)
        ast.literal_eval(node.value)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_where_it_leads(name):
    texts = [source for _, source in cells_of(read(name), "markdown")]
    assert texts[0].startswith("# ")
    assert "At the end you will" in texts[0]
    assert "## Where to go next" in texts[-1]
    assert re.search(r"\]\(\.\./\w+\.md", texts[-1])


@pytest.mark.parametrize("name", NAMES)
def test_links_and_files_exist(name):
    text = "\n".join(source for _, source in cells_of(read(name), "markdown"))
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (FOLDER / link).exists(), link
    for path in re.findall(r"`((?:examples|benchmarks|docs)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", NAMES)
def test_only_public_names(name):
    for _, source in cells_of(read(name), "code"):
        assert not re.search(r"\bgas(\.\w+)*\._|\bgas(\.\w+){2,} import|\bgas\.native", source)


def faults_of(notebook):
    """Iterate over what mustn't be in the outputs."""
    cells = [cell for cell, _ in cells_of(notebook, "code")]
    if [cell["execution_count"] for cell in cells] != [*range(1, len(cells) + 1)]:
        yield "not executed in order, in a new kernel"
    for output in (output for cell in cells for output in cell["outputs"]):
        if output["output_type"] == "error":
            yield "an error"
        text = "".join(output.get("text", "")) + json.dumps(
            output.get("data", {}).get("text/plain")
        )
        yield from re.findall(rf"Traceback|Warning|{PLACES}", text)


@pytest.mark.parametrize("name", NAMES)
def test_outputs(name):
    notebook = read(name)
    assert not [*faults_of(notebook)]
    outputs = [output for cell, _ in cells_of(notebook, "code") for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 150_000


def test_faults_are_found():
    def faults(count=1, **output):
        cell = {"cell_type": "code", "source": [], "execution_count": count, "outputs": [output]}
        return [*faults_of({"cells": [cell]})]

    assert not faults(output_type="stream", text=["fine\n"])
    assert faults(2, output_type="stream", text=["fine\n"])
    assert faults(output_type="error")
    assert faults(output_type="stream", text=["kept in /home/", "anna/graph\n"])
    assert faults(output_type="execute_result", data={"text/plain": ["Path('/tmp/graph')"]})
    assert faults(output_type="stream", text=["<stdin>:1: UserWarning: stale\n"])
