"""Draw the curves of ``time_to_accuracy.py``: validation score against seconds of training.

    python benchmarks/figures.py

One panel for each case that has another contender than the full batch; seconds are those of
training, without evaluation.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from common import load

NAMES = {  # Contenders that are drawn, with their colour.
    "full batch": "black",
    "histories": "tab:blue",
    "weights of the last step": "tab:orange",
    "stale rows as they are": "tab:green",
    "64 parts": "tab:red",
}
OUT = Path(__file__).resolve().parents[1] / "docs/images/time_to_accuracy.svg"


def draw(cases: dict[str, Any], path: Path) -> None:
    """Draw one panel for each case."""
    columns = min(2, len(cases))
    rows = -(-len(cases) // columns)
    size = (5.5 * columns, 3.2 * rows)
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for panel in panels.flat[len(cases) :]:
        panel.set_visible(False)
    for panel, (case, runs) in zip(panels.flat, cases.items(), strict=False):
        name, model, norm, lr, _ = case.split(":")
        best = max(runs["full batch"]["val"])
        end = 1.2 * runs["full batch"]["seconds"][runs["full batch"]["val"].index(best)]
        for contender, colour in NAMES.items():
            if contender in runs:
                run = runs[contender]
                panel.plot(run["seconds"], run["val"], color=colour, label=contender, linewidth=1.2)
        panel.axhline(best - 0.005, color="grey", linewidth=0.8, linestyle=":")
        norms = {"none": "no norm", "batch": "BatchNorm"}
        panel.set(
            title=f"{name}, {model}, {norms[norm]}, lr {lr}", xlabel="seconds of training",
            ylabel="validation accuracy", xlim=(0, end), ylim=(best - 0.15, best + 0.02),
        )  # fmt: skip
    panels.flat[0].legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="time_to_accuracy", help="of the results, or a path")
    parser.add_argument("--out", type=Path, default=OUT, help="the picture (%(default)s)")
    args = parser.parse_args()
    cases = load(args.name)["cases"]
    draw({case: runs for case, runs in cases.items() if len(runs) > 1}, args.out)


if __name__ == "__main__":
    main()
