"""Test accuracy with histories and in full batch, over several seeds.

    python benchmarks/accuracy.py --root data

Runs ``examples/train_gas.py`` with its defaults: published settings on Cora; on FacebookPagePage
random splits of 50/25/25 % and a GCN 2x64, 64 parts, 8 per batch. The model is selected by
validation accuracy. Every epoch ends with a full-batch evaluation that refreshes the histories, as
the published experiments do; the rows "no refresh" leave them alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import markdown, save

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_gas.py"
WAYS = {
    "histories": [],
    "histories, no refresh": ["--no-refresh"],
    "histories, random parts": ["--partition", "random"],
    "full batch": ["--full-batch"],
}
TARGETS = {"Cora": "82.29 ± .76 published", "FacebookPagePage": "-"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", default="data")
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()

    results: dict[str, dict[str, object]] = {}
    rows = []
    for dataset, published in TARGETS.items():
        for way, options in WAYS.items():
            with tempfile.TemporaryDirectory() as out:
                command = [sys.executable, str(SCRIPT), "--dataset", dataset, "--root", args.root]
                command += ["--runs", str(args.runs), "--out", out, *options]
                subprocess.run(command, check=True)
                metrics = json.loads(Path(out, "metrics.json").read_text())
            results.setdefault(dataset, {})[way] = metrics
            test, val = metrics["test_acc"], metrics["val_acc"]
            rows.append(
                [
                    dataset,
                    way,
                    f"{100 * test['mean']:.2f} ± {100 * test['std']:.2f}",
                    f"{100 * val['mean']:.2f} ± {100 * val['std']:.2f}",
                    published if way == "histories" else "",
                ]
            )
    table = markdown(["graph", "training", "test accuracy, %", "validation", "published"], rows)
    save("accuracy", {"runs": args.runs, "results": results}, f"{table}\n\n{args.runs} seeds.")


if __name__ == "__main__":
    main()
