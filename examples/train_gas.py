"""Trains a graph neural network with historical embeddings and reports how it went.

    python examples/train_gas.py                                   # a generated graph, no network
    python examples/train_gas.py --dataset Cora --root data --model gat --runs 10
    python examples/train_gas.py --dataset my_graph --undirected   # nodes.csv and edges.csv
    python examples/train_gas.py --dataset my_graph --hetero       # a column 'type' in them
    python examples/train_gas.py --dataset my_graph.npz --num-parts 100 --batch-size 10
    python examples/train_gas.py --dataset Cora --root data --augment mh_aug

Into ``--out`` it writes ``metrics.json`` (scores, of every epoch), ``curve.png``, and the model of
the best epoch by validation: its parameters, ``model.safetensors``, and what it predicts of every
node, ``predictions.parquet``, in the order and by the ids of the graph as it was given. Ctrl-C
keeps what there is; with ``--checkpoint-every 1``, or ``10min``, a run that was killed goes on by
``--resume``, as if it had not been. Settings that are not given are those of ``benchmarks/``, for
the data sets and models it has: the published ones, where there are some.
"""

from __future__ import annotations

import sys

try:
    from pathlib import Path

    from gas.cli import train
except KeyboardInterrupt:  # Imports take seconds.
    sys.exit(130)

if __name__ == "__main__":
    train(Path(__file__).resolve().parent.parent / "benchmarks")
