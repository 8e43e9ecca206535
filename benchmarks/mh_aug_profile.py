"""Time of the phases of an MH-Aug step: ours, and a transcription of the published step.

    python benchmarks/mh_aug_profile.py --root data
    python benchmarks/mh_aug_profile.py --cases Cora --trace trace    # and a trace of each

A step is one transition on the whole graph and one optimizer step on the full batch. The published
step is written anew from its description, for this comparison alone, and without the binomials of
its acceptance: it copies the graph, builds edge lists in Python, aggregates four times where two
differ, reads numbers of tensors one by one, and runs a forward pass for the entropy. Phases are
ranges of ``torch.profiler``. The chain is measured on growing graphs as well: the time of a
transition, compared with two passes over the compressed rows.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import make_parser, markdown, save, time_in_turn
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import gas
from gas.augment import PUBLISHED, mh_aug_loss
from gas.augment.loss import entropy
from gas.datasets import get_data
from gas.native.augment import ego_hop

CASES = {  # And their edges.
    "Cora": 10_556,
    "planted:5000": 100_000,
    "planted:50000": 1_000_000,
    "planted:200000": 4_000_000,
    "planted:1000000": 20_000_000,
}
PHASES = (
    "delta", "augmentation", "message passing", "ego-graph values", "distribution", "model",
    "entropy", "acceptance",
)  # fmt: skip
CHAIN = PUBLISHED["cora"].chain
# The transcription builds lists of edges in Python: beyond so many it takes fewer steps. And beyond
# MOST_EDGES the full batch of both doesn't fit: the chain alone is measured.
FEW_STEPS, MANY_EDGES, MOST_EDGES = 2, 500_000, 5_000_000


class Timer:
    """Timer of phases, which are ranges of the profiler as well; in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with record_function(phase):
            yield
        self.seconds[phase] += time.perf_counter() - start


def make_model(data: Data, num_classes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = GCN(data.num_features, 64, 2, num_classes, dropout=0.5)
    return model, torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)


class Naive:
    """The published step, transcribed."""

    def __init__(self, data: Data, num_classes: int) -> None:
        self.data = data
        self.model, self.optimizer = make_model(data, num_classes)
        self.now, self.delta_now = copy.deepcopy(data), (0.0, 0.0)

    def step(self, phase: Timer) -> None:
        data, c = self.data, CHAIN
        with phase("delta"):
            delta = [
                self._truncated(mean, sd)
                for mean, sd in zip(
                    self.delta_now, (c["sigma_delta_e"], c["sigma_delta_v"]), strict=True
                )
            ]
        with phase("augmentation"):
            proposal = self._augment(delta)
        with phase("message passing"):
            values = [self._aggregate(graph) for graph in (data, self.now, data, proposal)]
        with phase("ego-graph values"):
            changes = [
                [1 - after / before for after, before in zip(graph, values[0], strict=True)]
                for graph in (values[1], values[3])
            ]
        with phase("model"), torch.no_grad():
            logits = self.model(data.x, data.edge_index)
        with phase("entropy"):
            eps = entropy(logits) / math.log(logits.size(1))
        with phase("distribution"):
            old, new = (self._log_p(change, eps) for change in changes)
        with phase("acceptance"):
            accept = math.log(random.random() + 1e-300) < new - old
        with phase("model"):
            graphs = (data, self.now, proposal if accept else self.now)
            outs = [self.model(graph.x, graph.edge_index) for graph in graphs]
            train(outs, data, self.optimizer)
        if accept:
            self.now, self.delta_now = proposal, tuple(delta)

    @staticmethod
    def _truncated(mean: float, sd: float) -> float:
        while True:
            value = random.gauss(mean, sd)
            if 0 <= value <= 1:
                return value

    def _augment(self, delta: list[float]) -> Data:
        out = copy.deepcopy(self.data)
        edges = self.data.edge_index
        num_edges, num_nodes = edges.size(1), self.data.num_nodes
        kept = sorted(random.sample(range(num_edges), num_edges - int(delta[0] * num_edges)))
        pairs = [[edges[0, e].item(), edges[1, e].item()] for e in kept]
        out.edge_index = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t().contiguous()
        for node in random.sample(range(num_nodes), int(delta[1] * num_nodes)):
            out.x[node] = 0
        return out

    def _aggregate(self, graph: Data) -> tuple[Tensor, Tensor]:
        ones = torch.ones(graph.num_nodes)
        nodes = (graph.x != 0).any(dim=1).float()
        return self._two_hops(graph.edge_index, ones), self._two_hops(self.data.edge_index, nodes)

    @staticmethod
    def _two_hops(edge_index: Tensor, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])
        return x

    @staticmethod
    def _log_p(change: list[Tensor], eps: Tensor) -> float:
        total = 0.0
        for value, side, lam in zip(change, "ev", ("lam1", "lam3"), strict=True):
            sigma = CHAIN[f"a_{side}"] * eps + CHAIN[f"b_{side}"]
            distance = (value - CHAIN[f"mu_{side}"]) ** 2 / (2 * sigma**2)
            total -= CHAIN[lam] * distance.sum().item()
        return total


class Ours:
    """The same step by ``gas.MHAug``."""

    def __init__(self, data: Data, num_classes: int) -> None:
        self.data = data
        self.model, self.optimizer = make_model(data, num_classes)
        self.chain = gas.MHAug(data, **CHAIN)
        self.logits: Tensor | None = None

    def step(self, phase: Timer) -> None:
        chain, data = self.chain, self.data
        with phase("entropy"):
            if self.logits is not None:
                chain.update_entropy(self.logits)  # Those of the last step: no forward pass.
        with watched(chain, phase):
            chain.run()
        with phase("augmentation"):
            views = [chain.apply(data, previous) for previous in (True, False)]
        with phase("model"):
            outs = [self.model(graph.x, graph.edge_index) for graph in (data, *views)]
            train(outs, data, self.optimizer)
        self.logits = outs[0].detach()


@contextmanager
def watched(chain: gas.MHAug, phase: Timer) -> Iterator[None]:
    """Time the parts of transitions, by wrapping the methods of this chain."""
    target = chain._target
    parts = (
        (chain._proposal, "draw", "delta"),
        (chain, "_propose", "augmentation"),  # Around the draw of k, which is subtracted.
        (target, "_count", "message passing"),
        (target, "delta", "ego-graph values"),  # Around message passing, likewise.
        (target, "log_prob", "distribution"),
        (chain, "log_acceptance", "acceptance"),
    )
    for owner, name, label in parts:
        setattr(owner, name, timed(getattr(owner, name), label, phase))
    before = dict(phase.seconds)
    try:
        yield
    finally:
        for owner, name, _ in parts:
            delattr(owner, name)
        spent = {label: phase.seconds[label] - before.get(label, 0.0) for label in PHASES}
        phase.seconds["augmentation"] -= spent["delta"]
        phase.seconds["ego-graph values"] -= spent["message passing"]


def timed(function: Callable[..., Any], label: str, phase: Timer) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with phase(label):
            return function(*args)

    return call


def train(outs: list[Tensor], data: Data, optimizer: torch.optim.Optimizer) -> None:
    loss = mh_aug_loss(*outs, data.y, data.train_mask, **PUBLISHED["cora"].loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def effective_sample_size(values: Tensor) -> float:
    """Return a series' length over its integrated autocorrelation time (Geyer, 1992)."""
    x = values.double() - values.double().mean()
    n = x.numel()
    if float(x.square().sum()) == 0.0:
        return 1.0
    spectrum = torch.fft.rfft(x, 2 * n)
    rho = torch.fft.irfft(spectrum.abs().square(), 2 * n)[:n]
    rho = rho / rho[0]
    pairs = rho[: n - n % 2].view(-1, 2).sum(dim=1)
    positive = int((pairs < 0).double().argmax()) if bool((pairs < 0).any()) else pairs.numel()
    return n / max(float(2 * pairs[:positive].sum() - 1), 1.0)


def measure_chain(data: Data, transitions: int, repeats: int, **options: Any) -> dict[str, float]:
    """Measure acceptance, effective sample size and the passes over the rows per transition."""
    chain = gas.MHAug(data, **CHAIN, **options)
    units = chain.units
    edges = torch.ones(units.size, dtype=torch.bool)
    x = torch.ones(units.num_nodes, 2, dtype=torch.double)

    def passes() -> None:
        ego_hop(units.graph, edges, ego_hop(units.graph, edges, x))

    times = time_in_turn({"transition": chain.step, "passes": passes}, repeats)
    dropped = []
    for _ in range(transitions):
        chain.step()
        dropped.append(chain.states[1].drop_fractions)
    series = torch.stack(dropped)
    seconds = {name: t["median"] for name, t in times.items()}
    return {
        "nodes": units.num_nodes,
        "edges": units.num_edges,
        "transition_seconds": seconds["transition"],
        "two_passes_seconds": seconds["passes"],
        "ratio": seconds["transition"] / seconds["passes"],
        "acceptance_rate": chain.acceptance_rate,
        "effective_sample_size_edges": effective_sample_size(series[:, 0]),
        "effective_sample_size_nodes": effective_sample_size(series[:, 1]),
        "transitions": transitions,
    }


def phases_of(contender: Naive | Ours, steps: int, trace: Path | None) -> dict[str, float]:
    """Return seconds per step of each phase."""
    contender.step(Timer())  # Warm-up.
    timer = Timer()
    for _ in range(steps):
        contender.step(timer)
    if trace is not None:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            contender.step(Timer())
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    return {phase: timer.seconds[phase] / steps for phase in PHASES}


def main() -> None:
    parser = make_parser(__doc__, name="mh_aug_profile")
    parser.add_argument("--cases", nargs="*", help=f"(of {', '.join(CASES)}: up to --largest)")
    parser.add_argument("--largest", type=int, default=4_000_000, help="edges (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="per contender and graph")
    parser.add_argument("--transitions", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--trace", type=Path, help="folder for a trace of one step of each")
    args = parser.parse_args()

    results: dict[str, Any] = {}
    phase_rows, chain_rows = [], []
    small = [case for case, num_edges in CASES.items() if num_edges <= args.largest]
    for case in args.cases or small:
        torch.manual_seed(0)
        random.seed(0)
        data, _, num_classes = get_data(args.root, case)
        makers = {"published": Naive, "ours": Ours}
        if data.edge_index.size(1) > MOST_EDGES:
            makers = {}
        phases = {}
        for name, make in makers.items():
            few = name == "published" and data.edge_index.size(1) > MANY_EDGES
            steps = min(args.steps, FEW_STEPS) if few else args.steps
            trace = args.trace and args.trace / f"{case.replace(':', '_')}_{name}.json"
            phases[name] = found = phases_of(make(data, num_classes), steps, trace)
            found["transition"] = sum(t for phase, t in found.items() if phase != "model")
            cells = [f"{1000 * found[phase]:.2f}" for phase in (*PHASES, "transition")]
            cells.append("")
            if name == "ours" and "published" in phases:
                cells[-1] = f"{phases['published']['transition'] / found['transition']:.0f}x"
            phase_rows.append([case, name, *cells])
        chains = {
            "published settings": measure_chain(data, args.transitions, args.repeats),
            "tempered": measure_chain(data, args.transitions, args.repeats, reference_size=2708),
        }
        for name, found in chains.items():
            chain_rows.append([
                f"{case}, {name}", f"{found['edges']:,}",
                f"{1000 * found['transition_seconds']:.2f} ms", f"{found['ratio']:.2f}",
                f"{100 * found['acceptance_rate']:.1f} %",
                f"{found['effective_sample_size_edges']:.0f}, "
                f"{found['effective_sample_size_nodes']:.0f} of {found['transitions']}",
            ])  # fmt: skip
        results[case] = {"phase_seconds": phases, "chain": chains}
    tables = [
        "Milliseconds per step:",
        markdown(
            ["graph", "step", *PHASES, "all but the model", "published over ours"], phase_rows
        ),
        "The chain; its transition, and two passes over the compressed rows:",
        markdown(
            ["graph", "edges", "transition", "over two passes", "accepted", "effective samples"],
            chain_rows,
        ),
    ]
    save(args.name, {"cases": results}, "\n\n".join(tables))


if __name__ == "__main__":
    main()
