"""The tables of ``ranks.py``: counts, measurements and simulations."""

from __future__ import annotations

import dataclasses
from typing import Any

from common import markdown
from hundred_million import PART_NODES, PARTS_PER_BATCH

import gas
from gas.contrib.simulation import Machine, PartitionStatistics, simulate
from gas.native.memory import human

RANKS = (2, 4, 8, 16, 32, 64, 256, 1024)
FITTED = (4, 16, 64)
VALIDATED_PARTS = 64

# What is simulated.
GRAPHS = {"papers100M": (111_000_000, 1_600_000_000), "10 billion": (694_000_000, 10_000_000_000)}
FEATURES, WIDTH, LAYERS, CLASSES = 128, 256, 3, 172
MACHINES = (1, 2, 4, 8, 16, 32, 64)
SHOWN = (1, 4, 16, 64)  # The others are in the JSON file.
LINKS = {"10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}
LATENCY = 25e-6  # Assumed, of a message between hosts.
FASTER, COPIES = 100, 500e9  # Assumed, of an accelerator: times faster than measured; bytes/s.


def model_of(num_nodes: int = 1) -> gas.ScalableGNN:
    return gas.models.GCN(num_nodes, FEATURES, WIDTH, CLASSES, LAYERS, 0.5)


def of(found: dict[str, Any]) -> PartitionStatistics:
    return PartitionStatistics(**found["statistics"])


def counted_rows(name: str, edges: str, found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for ranks, one in found.items():
        if "not_measured" in one:
            rows.append([name, edges, ranks, f"not measured: {one['not_measured']}", *[""] * 7])
        elif ranks != "1":
            s = of(one)
            rows.append(
                [
                    name,
                    edges,
                    f"{s.num_ranks:,}",
                    f"{100 * s.cut / s.num_edges:.1f} %",
                    f"{s.replicas_per_node:.2f}",
                    f"{100 * s.pairs / (s.num_ranks * (s.num_ranks - 1)):.0f} %",
                    f"{s.rows_balance:.2f}",
                    f"{s.edges_balance:.2f}",
                    f"{s.replicas_balance:.2f}",
                    f"{s.sent_balance:.2f}",
                    f"{one['cut_seconds']:.0f} s",
                ]
            )
    return rows


def held_out_rows(name: str, small: dict[str, Any], large: dict[str, Any]) -> list[list[str]]:
    """Return replicas as the law of few ranks predicts them, and as they were counted."""
    fitted = [of(small[str(ranks)]) for ranks in FITTED]
    rows = []
    for edges, found in (("10M", small), ("100M", large)):
        for ranks, one in found.items():
            if ranks == "1" or "not_measured" in one or (found is small and int(ranks) in FITTED):
                continue
            s = of(one)
            law = fitted[0].extrapolate(nodes=s.num_nodes, ranks=int(ranks), others=fitted[1:])
            error = law.replicas / s.replicas - 1
            rows.append(
                [
                    name,
                    edges,
                    ranks,
                    f"{s.replicas_per_node:.2f}",
                    f"{law.replicas_per_node:.2f}",
                    f"{100 * error:+.0f} %",
                ]
            )
    return rows


def base_of(found: dict[str, Any]) -> tuple[PartitionStatistics, list[PartitionStatistics]]:
    """Return statistics of shards with parts, to extrapolate from, and the others.

    Shards were cut alone, and parts alone: a part is taken to have rows for as many ranks as its
    shard has, which is the most there can be.
    """
    counted = [of(found[str(ranks)]) for ranks in RANKS]
    parts, first = of(found["1"]), counted[0]
    base = dataclasses.replace(
        first,
        num_parts=parts.num_parts,
        halo=parts.halo,
        part_spread=parts.part_spread,
        ranges=parts.num_parts * first.pairs // first.num_ranks,
        feature_bytes=4 * FEATURES,
    )
    return base, counted[1:]


def simulations(statistics: dict[str, Any], measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an epoch of every graph on every number of machines, links and processors."""
    model, results = model_of(), []
    known = Machine(**{**measured, "widths": tuple(measured["widths"])})
    processors = {
        "1 core, measured": known,
        f"{FASTER} times as fast, assumed": dataclasses.replace(
            known,
            **{name: getattr(known, name) / FASTER for name in known.measured_fields
               if name.startswith("seconds")},
            copy_bandwidth=COPIES,
        ),
    }  # fmt: skip
    for graph, (nodes, edges) in GRAPHS.items():
        for kind, found in statistics.items():
            base, others = base_of(found)
            for ranks in MACHINES:
                s = base.extrapolate(nodes=nodes, edges=edges, ranks=ranks, others=others)
                for processor, machine in processors.items():
                    for link, bandwidth in LINKS.items():
                        given = dataclasses.replace(machine, bandwidth=bandwidth, latency=LATENCY)
                        options = {"batch_size": PARTS_PER_BATCH, "overlap": True}
                        one = simulate(s, model, given, **options)
                        results.append(
                            {
                                "graph": graph,
                                "kind": kind,
                                "machines": ranks,
                                "processor": processor,
                                "link": link,
                                "epoch_seconds": one.epoch_seconds,
                                "speed_up": one.speed_up,
                                "limit": one.limit,
                                "hidden_seconds": one.hidden_seconds,
                                "history_seconds": one.history_seconds,
                                "parts_of_time": one.parts_of_time,
                                "sent_bytes": one.sent_bytes,
                                "total_history_bytes": one.total_history_bytes,
                                "replicas_per_node": s.replicas_per_node,
                                "memory": one.memory,
                                "memory_bytes": one.memory_bytes,
                                "steps": one.steps,
                            }
                        )
    return results


def simulated_rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row for some numbers of machines, with the links side by side."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for one in results:
        if one["machines"] in SHOWN:
            key = tuple(one[name] for name in ("graph", "kind", "processor", "machines"))
            found.setdefault(key, {})[one["link"]] = one
    rows = []
    for (graph, kind, processor, machines), links in found.items():
        one = links[next(iter(LINKS))]
        epochs = [
            f"{links[link]['epoch_seconds']:,.{0 if links[link]['epoch_seconds'] > 20 else 1}f} s, "
            f"{links[link]['speed_up']:.1f} ({links[link]['limit']})"
            for link in LINKS
        ]
        replicas, sent = f"{one['replicas_per_node']:.1f}", human(one["sent_bytes"])
        memory = human(one["memory_bytes"])
        rows.append(
            [graph, kind, processor.split(",")[0], machines, *epochs, replicas, sent, memory]
        )
    return rows


def tables(content: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return all tables, and what was simulated for the last."""
    statistics, large = content.get("statistics", {}), content.get("large", {})
    texts = []
    rows = [row for kind, found in statistics.items() for row in counted_rows(kind, "10M", found)]
    rows += counted_rows("planted", "100M", large)
    header = [
        "graph", "edges", "shards", "edges cut", "replicas per node", "pairs that talk",
        "rows, largest / mean", "edges", "replicas", "rows sent", "cut in",
    ]  # fmt: skip
    texts.append(f"**Counted.** Shards cut by KaMinPar.\n\n{markdown(header, rows)}")
    rows = [
        row
        for kind, found in statistics.items()
        for row in held_out_rows(kind, found, large if kind == "planted" else {})
    ]
    header = ["graph", "edges", "shards", "replicas per node, counted", "by the law", "error"]
    fitted = ", ".join(map(str, FITTED))
    texts.append(
        f"**Held out.** A law fitted to {fitted} shards of 10 million edges, and what was "
        f"counted.\n\n{markdown(header, rows)}"
    )
    results: list[dict[str, Any]] = []
    if "machine" in content and statistics:
        known = content["machine"]
        rows = [
            [name, f"{known[name]:.3g}"]
            for name in (*known["measured_fields"], "fit_error")
        ]  # fmt: skip
        texts.append(
            f"**Measured** on one core of this machine, in CPU time: a GCN of {LAYERS} layers of "
            f"{WIDTH}, {FEATURES} features, parts of {PART_NODES:,} nodes.\n\n"
            f"{markdown(['', 'value'], rows)}"
        )
        results = simulations(statistics, known)
        header = [
            "graph", "cut as", "processor", "machines",
            *(f"{link}: epoch, speed-up (limited by)" for link in LINKS), "replicas per node",
            "sent by a rank", "memory of a rank",
        ]  # fmt: skip
        assumed = (
            f"Assumed: links of {' and '.join(LINKS)} per machine, {1e6 * LATENCY:.0f} µs a "
            f"message, one rank per machine; the accelerator: {FASTER} times as fast as measured "
            f"here, {COPIES / 1e9:.0f} GB/s copied. {PARTS_PER_BATCH} parts per mini-batch; rows "
            "travel during a whole step (overlap=True); histories are float32."
        )
        sizes = "; ".join(
            f"{name}: {nodes / 1e6:,.0f} million nodes, {edges / 1e9:.1f} billion edges"
            for name, (nodes, edges) in GRAPHS.items()
        )
        texts.append(
            f"**Extrapolated**, from what was counted in graphs of 10 million edges: no such graph "
            f"was cut. {sizes}. {assumed}\n\n{markdown(header, simulated_rows(results))}"
        )
    texts.append(validation_text(content.get("validation")))
    return "\n\n".join(texts), results


def validation_text(found: list[dict[str, Any]] | None) -> str:
    if not found or "not_measured" in found[0]:
        return "**Validation** against local processes: not measured."
    rows = []
    for one in found:
        predicted, ranks = one["predicted"], one["found"]
        cpu = [rank["cpu_seconds"] for rank in ranks]
        mean, sent = sum(cpu) / len(cpu), sum(rank["sent_bytes"] for rank in ranks) / len(ranks)
        rows.append(
            [
                f"{one['nodes']:,}",
                one["ranks"],
                f"{predicted['cpu_seconds']:.2f} s",
                f"{mean:.2f} s",
                f"{100 * (predicted['cpu_seconds'] / mean - 1):+.0f} %",
                f"{predicted['most_cpu_seconds']:.2f} s",
                f"{max(cpu):.2f} s",
                f"{predicted['sent_bytes']:,.0f}",
                f"{sent:,.0f}",
            ]
        )
    header = [
        "nodes", "processes", "CPU time, mean of ranks, predicted", "measured", "error",
        "slowest rank, predicted", "measured", "bytes sent, mean of ranks, predicted", "measured",
    ]  # fmt: skip
    return (
        "**Validated** against local processes of one thread each: a GCN of 3 layers of 128 on a "
        f"planted graph, 20 edges per node, in {VALIDATED_PARTS} parts, one per "
        "mini-batch; of a rank and epoch. CPU time, because there are fewer cores than processes. "
        "What it is predicted from was measured by as many processes at once as there are."
        f"\n\n{markdown(header, rows)}"
    )
