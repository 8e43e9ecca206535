"""A missing, broken or outdated binary: everything works, and one warning says why."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

PROGRAM = """
import sys, warnings
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f)]  # Of an editable install.
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import gas
messages = [str(w.message) for w in caught if "native extension" in str(w.message)]
assert len(messages) == 1, messages
print(messages[0])
import torch
from torch_geometric.data import Data
data = Data(x=torch.randn(9, 2), edge_index=torch.randint(9, (2, 30)))
perm, ptr = gas.metis(data.edge_index, 3, num_nodes=9, log=False)
loader = gas.SubgraphLoader(gas.permute(data, perm, log=False), ptr, batch_size=2, log=False)
assert sum(batch_size for _, batch_size, *_ in loader) == 9
fused = gas.SubgraphLoader(gas.permute(data, perm, log=False), ptr, log=False, layout="fused")
model = gas.models.GAT(9, 2, 4, 2, 3, 2, num_layers=2, dropout=0.5)
for batch, *args in fused:
    model(batch.x, batch.adj_t, *args).sum().backward()
assert all(p.grad.isfinite().all() for p in model.parameters())
print(gas.__file__)
"""


def run_without(tmp_path, binary: bytes | None) -> str:
    package = tmp_path / "gas"
    shutil.copytree(ROOT / "gas", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if binary is not None:
        (package / "_C.so").write_bytes(binary)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(package) in done.stdout
    return done.stdout


@pytest.mark.slow
def test_missing_binary(tmp_path):
    said = run_without(tmp_path, None)
    assert "it was not built" in said
    assert "pip install ." in said
    assert "C++17 compiler" in said


@pytest.mark.slow
def test_broken_binary(tmp_path):
    said = run_without(tmp_path, b"this is not a shared library")
    assert "it could not be loaded" in said
    assert "_C.so" in said


@pytest.mark.slow
@pytest.mark.requires("native")
def test_outdated_binary(tmp_path):
    from gas import native

    shutil.copytree(ROOT / "gas", tmp_path / "gas", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "gas" / "native" / "extension.py"
    interface = f"INTERFACE = {native.extension.INTERFACE}"
    text = source.read_text()
    assert interface in text
    source.write_text(text.replace(interface, "INTERFACE = 0"))
    if not list((tmp_path / "gas").glob("_C*.so")):  # Installed, not editable.
        shutil.copy(native.C.__file__, tmp_path / "gas")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "was built from other sources" in done.stdout
