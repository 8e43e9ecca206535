"""Execute tutorials in new kernels, and store their outputs in the notebooks.

    pip install ipykernel ipywidgets nbclient
    OMP_NUM_THREADS=1 python docs/site/execute.py                   # all of them
    OMP_NUM_THREADS=1 python docs/site/execute.py cora --data data  # with Cora, without a network

A notebook runs in an empty folder, with an empty cache of partitions. What varies between runs is
left out: times of cells, and the order in which logs and prints arrive.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "tutorials"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path, data: Path | None) -> None:
    """Execute a notebook, and write it if all cells have run."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        if data is not None:
            Path(folder, "data").symlink_to(data.resolve())
        client = NotebookClient(
            notebook,
            timeout=1200,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env={**os.environ, "GAS_CACHE_DIR": cache})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = tidy(cell.outputs)
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    nbformat.write(notebook, path)


def tidy(outputs: list) -> list:
    """Return outputs with each stream in one piece, first the logs on standard error."""
    streams = []
    for name in ("stderr", "stdout"):
        text = "".join(each.text for each in outputs if each.get("name") == name)
        if text:
            streams.append(nbformat.v4.new_output("stream", name=name, text=text))
    return streams + [each for each in outputs if each.output_type != "stream"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=sorted(p.stem for p in FOLDER.glob("*.ipynb")))
    parser.add_argument(
        "--data", type=Path, help="PyG's data sets, a folder that may be written to"
    )
    args = parser.parse_args()
    for name in args.names:
        execute(FOLDER / f"{name}.ipynb", args.data)
        print(name, flush=True)
