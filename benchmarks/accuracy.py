"""Test accuracy with histories and in full batch, over several seeds.

    python benchmarks/accuracy.py --root data

Runs ``examples/train_gas.py`` with its defaults: published settings on Cora; on FacebookPagePage
random splits of 50/25/25 % and a GCN 2x64, 64 parts, 8 per batch. The model is selected by
validation accuracy. Histories store float32 unless a row says otherwise; "prefetch" starts pulls
one batch ahead, so that rows can be a step older. Bytes moved are those of stored rows, read and
written in a training epoch. Every epoch ends with a full-batch evaluation that refreshes the
histories, as the published experiments do; the rows "no refresh" leave them alone. The full batch
trains for as many epochs with the same settings, which is one step per epoch instead of one per
mini-batch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import load, make_parser, markdown, save

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_gas.py"
WAYS = {
    "histories": [],
    "histories, no refresh": ["--refresh", "none"],
    "histories, random parts": ["--partition", "random"],
    "histories, bfloat16": ["--dtype", "bfloat16"],
    "histories, float16": ["--dtype", "float16"],
    "histories, int8": ["--dtype", "int8"],
    "histories, prefetch": ["--prefetch"],
    "full batch": ["--full-batch"],
}
PUBLISHED = {"Cora": "82.29 ± .76", "FacebookPagePage": ""}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--datasets", nargs="*", default=list(PUBLISHED), choices=list(PUBLISHED))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args()

    results = load("accuracy").get("results", {})  # Of what is not run now.
    for dataset in args.datasets:
        results.setdefault(dataset, {})
        for way in args.ways:
            options = WAYS[way]
            with tempfile.TemporaryDirectory() as out:
                command = [sys.executable, str(SCRIPT), "--dataset", dataset, "--root", args.root]
                command += ["--runs", str(args.runs), "--out", out, *options]
                subprocess.run(command, check=True)
                results[dataset][way] = json.loads(Path(out, "metrics.json").read_text())
    rows = [
        [
            dataset,
            way,
            percent(metrics["test_acc"]),
            percent(metrics["val_acc"]),
            mebibytes(metrics, "history_bytes"),
            mebibytes(metrics, "moved_bytes"),
            len(metrics["test_acc"]["values"]),
            PUBLISHED[dataset] if way == "histories" else "",
        ]
        for dataset, ways in results.items()
        for way, metrics in sorted(ways.items(), key=lambda item: list(WAYS).index(item[0]))
    ]
    header = [
        "graph",
        "training",
        "test accuracy, %",
        "validation",
        "histories",
        "moved per epoch",
        "seeds",
        "published",
    ]
    save("accuracy", {"results": results}, markdown(header, rows))


def mebibytes(metrics: dict[str, dict[str, float]], key: str) -> str:
    size = metrics.get(key, {}).get("mean", 0)
    return f"{size / 2**20:.2f} MiB" if size else "-"


def percent(summary: dict[str, float]) -> str:
    return f"{100 * summary['mean']:.2f} ± {100 * summary['std']:.2f}"


if __name__ == "__main__":
    main()
