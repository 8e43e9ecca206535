"""Our kernels against PyTorch's for moving and summing rows on a GPU, by the size of rows.

    python benchmarks/costs.py                # the table that is kept
    python benchmarks/costs.py --device cpu --megabytes 1   # a rehearsal: both ways are the same

What is found is kept in gas's cache, too: from then on gas takes the faster ways on such a GPU.
"""

from __future__ import annotations

from functools import partial

from common import make_parser, markdown, mean_time, save

from gas.native import measure_costs


def main() -> None:
    parser = make_parser(__doc__, name="costs", root=False)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--megabytes", type=int, default=512, help="of the largest tables")
    args = parser.parse_args()
    timer = partial(mean_time, at_least=0.01) if args.device == "cpu" else None
    found = measure_costs.measure(args.device, args.megabytes << 20, timer)
    header = ["operation", "bytes of a row, or width", "gas", "PyTorch", "PyTorch over gas"]
    rows = [
        (
            operation,
            size,
            *(f"{1e6 * seconds[way]:.1f} us" for way in measure_costs.WAYS),
            f"{seconds['torch'] / seconds['gas']:.2f}x",
        )
        for operation, sizes in found.items()
        for size, seconds in sizes.items()
    ]
    save(args.name, {"device": args.device, "seconds": found}, markdown(header, rows))


if __name__ == "__main__":
    main()
