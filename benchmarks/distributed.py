"""Training on several processes: time, bytes and accuracy against one process.

    python benchmarks/distributed.py --root data               # times and bytes
    python benchmarks/distributed.py --root data --accuracy    # over five seeds

Every process, a rank, has one thread. Strong scaling: the same graph and as many steps an epoch, so
that a rank's mini-batch is smaller by the number of ranks. Weak scaling: ranks with mini-batches of
as many nodes, of a graph that grows with them. Our own full batch trains the same model in one
process of one thread. Runs take turns, A B A B; the time of an epoch is the median over the epochs
of all runs but the first one of each, that of the slowest rank. Bytes are those of rows of
histories on their way, headers included, over the least that can be. Each epoch is followed by no
evaluation; accuracies are those of the test nodes in the epoch with the best validation.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from common import make_parser, markdown, run_ranks, save, say_result
from tqdm import tqdm

import gas
from gas.training import FullBatch, split_mask, train_epoch

MASKS = ("train_mask", "val_mask", "test_mask")


@dataclass(frozen=True)
class Case:
    """A graph and a GCN, on some ranks; ``parts`` of a step are those of all ranks together."""

    dataset: str
    num_layers: int
    hidden: int
    num_parts: int
    parts: int
    dropout: float
    ranks: int
    overlap: bool = False
    dtype: str = "float32"
    full_batch: bool = False
    seed: int = 0
    epochs: int = 6
    evaluate: bool = False


STRONG = ("planted:200000", 3, 128, 64, 16, 0.3)
HALF = ("planted:100000", 3, 128, 32, 8, 0.3)
PAGES = ("FacebookPagePage", 2, 64, 64, 8, 0.3)
TIMED = {
    "strong": {
        "own full batch": Case(*STRONG, 1, full_batch=True),
        "1 rank": Case(*STRONG, 1),
        "2 ranks": Case(*STRONG, 2),
        "2 ranks, overlap": Case(*STRONG, 2, overlap=True),
        "2 ranks, bfloat16": Case(*STRONG, 2, dtype="bfloat16"),
    },
    "weak": {"1 rank": Case(*HALF, 1), "2 ranks": Case(*STRONG, 2)},
}
TITLES = {"strong": "planted:200000, GCN 3x128", "weak": "planted:100000 a rank, GCN 3x128"}


def work(root: str, case: Case) -> None:
    """Train on one rank; the first one prints the results of all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(case.seed)
    data, in_channels, out_channels = gas.get_data(root, case.dataset, split="all")
    for name in MASKS:
        data[name] = split_mask(data[name], case.seed)
    sizes = data.num_nodes, in_channels, case.hidden, out_channels, case.num_layers
    model = gas.models.GCN(*sizes, dropout=case.dropout, dtype=case.dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if case.full_batch:
        batches = FullBatch(model.prepare(data), layout="fused")

        def epoch() -> float:
            return train_epoch(model, batches, optimizer, full_batch=True)

    else:
        shards = case.ranks
        graph = gas.cluster(data, case.num_parts, shards, model=model, log=False)
        options = {"batch_size": case.parts // shards, "shuffle": True, "log": False}
        loader = gas.SubgraphLoader(graph, **options)
        inference = gas.EvalSubgraphLoader(graph, like=loader, log=False)
        model = gas.distribute(model, graph, overlap=case.overlap)

        def epoch() -> float:
            return train_epoch(model, loader, optimizer)

    found = {"seconds": [], "cpu": [], "scores": [], "waited": 0.0, "bytes": 0, "bound": 0}
    for _ in range(case.epochs):
        if not case.full_batch:
            dist.barrier()
        before = None if case.full_batch else model.traffic
        start, cpu = time.perf_counter(), time.process_time()
        epoch()
        found["seconds"].append(time.perf_counter() - start)
        found["cpu"].append(time.process_time() - cpu)
        if before is not None:
            now = model.traffic
            found["waited"] += (now.waited_seconds - before.waited_seconds) / case.epochs
            found["bytes"] += (now.sent_bytes - before.sent_bytes) / case.epochs
            found["bound"] = now.bound_bytes
        if case.evaluate:
            pred = model.predict(inference).argmax(dim=1) == data.y
            found["scores"].append([float(pred[data[name]].float().mean()) for name in MASKS])
    say_result(found)


def launch(root: str, case: Case) -> list[dict]:
    """Run all ranks and return their results."""
    return run_ranks(__file__, case.ranks, "--root", root, "--work", json.dumps(asdict(case)))


def timed(root: str, repeats: int) -> tuple[dict, str]:
    """Return times and bytes of every case."""
    runs = {(kind, name): [] for kind, cases in TIMED.items() for name in cases}
    for _ in tqdm(range(repeats)):
        for kind, name in runs:
            runs[kind, name].append(launch(root, TIMED[kind][name]))
    results: dict[str, dict] = {kind: {} for kind in TIMED}
    for (kind, name), found in runs.items():
        epochs = [
            (max(r["seconds"][i] for r in ranks), max(r["cpu"][i] for r in ranks))
            for ranks in found
            for i in range(1, len(ranks[0]["seconds"]))
        ]
        ranks = [rank for run in found for rank in run]
        results[kind][name] = {
            "seconds": statistics.median(seconds for seconds, _ in epochs),
            "cpu": statistics.median(cpu for _, cpu in epochs),
            "waited": statistics.median(rank["waited"] for rank in ranks),
            "bytes": statistics.fmean(rank["bytes"] for rank in ranks),
            "bound": statistics.fmean(rank["bound"] for rank in ranks),
        }
    rows = []
    for kind, cases in results.items():
        one = cases["1 rank"]
        for name, r in cases.items():
            over = f"{r['bytes'] / r['bound']:.4f}" if r["bound"] else "-"
            rows.append(
                [
                    TITLES[kind],
                    name,
                    f"{1000 * r['seconds']:.0f} ms ({r['seconds'] / one['seconds']:.2f}x)",
                    f"{1000 * r['cpu']:.0f} ms ({r['cpu'] / one['cpu']:.2f}x)",
                    f"{1000 * r['waited']:.0f} ms" if r["bound"] else "-",
                    f"{r['bytes'] / 2**20:.1f} MiB" if r["bound"] else "-",
                    over,
                ]
            )
    header = ["graph", "processes", "epoch", "CPU of a rank", "waited", "sent by a rank", "bound"]
    header[-1] = "over the bound"
    return results, markdown(header, rows)


def accuracies(root: str, seeds: int, epochs: int) -> tuple[dict, str]:
    """Measure the test accuracy of 1, 2 and 4 ranks for the same number of steps."""
    gas.get_data(root, PAGES[0])  # Ranks would process what was downloaded all at once.
    results, rows = {}, []
    ways = [(ranks, overlap) for ranks in (1, 2, 4) for overlap in (False, True) if ranks > overlap]
    for ranks, overlap in tqdm(ways):
        scores = []
        for seed in range(seeds):
            case = Case(*PAGES, ranks, overlap, seed=seed, epochs=epochs, evaluate=True)
            curve = launch(root, case)[0]["scores"]
            scores.append(100 * max(curve, key=lambda score: score[1])[2])
        name = f"{ranks} ranks{', overlap' * overlap}"
        results[name] = scores
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        rows.append([name, f"{statistics.fmean(scores):.2f} ± {spread:.2f}", len(scores)])
    return results, markdown(["FacebookPagePage, GCN 2x64", "test accuracy, %", "seeds"], rows)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=100, help="of a run for accuracy")
    parser.add_argument("--work", help="what one rank does, which torchrun starts")
    args = parser.parse_args()
    if args.work is not None:
        work(args.root, Case(**json.loads(args.work)))
    elif args.accuracy:
        results, table = accuracies(args.root, args.seeds, args.epochs)
        save("distributed_accuracy", {"results": results}, table)
    else:
        results, table = timed(args.root, args.repeats)
        save("distributed", {"results": results}, table)


if __name__ == "__main__":
    main()
