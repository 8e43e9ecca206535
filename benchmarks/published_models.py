"""Convert models that others published, from clones of their repositories, one class after another.

``published_models.jsonl`` names the classes: source, file, class, and how its user builds and calls
it. The code itself stays in its repository: ``--sources`` is a folder with a clone of each,
named as ``REPOSITORIES`` says. Each model is converted in float64, and compared with the module
that its user calls: ``predict`` of the whole graph, mini-batches, and ``gas.verify``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import functools
import json
import multiprocessing
import os
import sys
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import common
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data

import gas

CASES = Path(__file__).with_suffix(".jsonl")
TOLERANCE = 1e-10
SIZES = {"N": 60, "E": 300, "IN": 5, "OUT": 3}

REPOSITORIES = {
    "PyG models": "pyg-team/pytorch_geometric, models",
    "PyG": "pyg-team/pytorch_geometric",
    "OGB": "snap-stanford/ogb",
    "tunedGNN": "LUOyk1999/tunedGNN",
    "pyg_autoscale": "rusty1s/pyg_autoscale",
    "Non-Homophily": "CUAI/Non-Homophily-Large-Scale",
    "Deep_GCN_Benchmarking": "VITA-Group/Deep_GCN_Benchmarking",
    "GPRGNN": "jianhao2016/GPRGNN",
    "GCNII": "chennnM/GCNII",
    "NodeFormer": "qitianwu/NodeFormer",
    "GreatX": "EdisonLeeeee/GreatX",
    "GraphGym": "snap-stanford/GraphGym",
    "SGCN": "benedekrozemberczki/SGCN",
    "BernNet": "ivam-he/BernNet",
    "ChebNetII": "ivam-he/ChebNetII",
    "GraphCON": "tk-rusch/GraphCON",
    "gradientgating": "tk-rusch/gradientgating",
    "DeeperGNN": "divelab/DeeperGNN",
    "GRACE": "CRIPAC-DIG/GRACE",
    "GCA": "CRIPAC-DIG/GCA",
    "BGRL": "nerdslab/bgrl",
    "Dir-GNN": "emalgorithm/directed-graph-neural-network",
    "OrderedGNN": "LUMIA-Group/OrderedGNN",
    "PairNorm": "LingxiaoShawn/PairNorm",
    "GDC": "gasteigerjo/gdc",
    "GBK-GNN": "Xzh0u/GBK-GNN",
    "MaskGAE": "EdisonLeeeee/MaskGAE",
    "GATv2": "tech-srl/how_attentive_are_gats",
    "DeepRobust": "DSE-MSU/DeepRobust",
    "PyGOD": "pygod-team/pygod",
    "PyGSD": "SherylHYX/pytorch_geometric_signed_directed",
    "SGFormer": "qitianwu/SGFormer",
    "Heterophilic": "turja16/Heterophilic_Benchmarks",
    "PyGCL": "PyGCL/PyGCL",
    "DIG": "divelab/DIG",
    "PyG Temporal": "benedekrozemberczki/pytorch_geometric_temporal",
    "Polynormer": "cornell-zhang/Polynormer",
}


def make_data(attributes: dict[str, str]) -> Data:
    """Return a small directed graph with the attributes that a case names, floats in float64."""
    torch.manual_seed(1)
    n, e = SIZES["N"], SIZES["E"]
    edges = torch.randperm(n * (n - 1))[:e]
    row, col = edges // (n - 1), edges % (n - 1)
    edge_index = torch.stack([row, col + (col >= row)])
    edge_index = edge_index[:, (edge_index[1] * n + edge_index[0]).argsort()]  # By destination.
    data = Data(x=torch.rand(n, SIZES["IN"]), edge_index=edge_index)
    data.y = torch.randint(SIZES["OUT"], (n,))
    known = {
        **SIZES,
        "torch": torch,
        "data": data,
        "rand": torch.rand,
        "randint": lambda high, *shape: torch.randint(high, shape),
        "csr": lambda weight=None: make_matrix(data, weight),
        "SparseTensor": lambda weight=None: make_sparse_tensor(data, weight),
    }
    for key, expression in attributes.items():
        data[key] = eval(expression, dict(known))
    for key, value in data.to_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point():
            data[key] = value.double()
    return data


def make_matrix(data: Data, weight: Tensor | None) -> Tensor:
    """Return the transposed adjacency matrix, of which rows are destinations."""
    n = SIZES["N"]
    weight = torch.ones(SIZES["E"], dtype=torch.double) if weight is None else weight.double()
    return torch.sparse_coo_tensor(data.edge_index.flip(0), weight, (n, n)).to_sparse_csr()


def make_sparse_tensor(data: Data, weight: Tensor | None) -> Any:
    from torch_sparse import SparseTensor

    n = SIZES["N"]
    row, col = data.edge_index.flip(0)
    value = weight if weight is None else weight.double()
    return SparseTensor(row=row, col=col, value=value, sparse_sizes=(n, n))


def load(root: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Run the imports, functions and classes of a file, without what it does besides."""
    path = root / case["file"] if "file" in case else None
    name = "published_" + case["name"]
    module = types.ModuleType(name)
    if "package" in case:  # For relative imports, without what its __init__.py imports.
        module.__package__ = case["package"]
        names = case["package"].split(".")
        for position in range(1, len(names) + 1):
            parent = types.ModuleType(".".join(names[:position]))
            parent.__path__ = [str(root.joinpath(*names[:position]))]
            sys.modules.setdefault(parent.__name__, parent)
    sys.modules[name] = module
    space = vars(module)
    setup = {"namespace": types.SimpleNamespace, "torch": torch, **SIZES}
    space.update({key: eval(text, dict(setup)) for key, text in case.get("setup", {}).items()})
    if path is None:
        exec(case["imports"], space)
        return space
    kept = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, kept):
            run_statement(statement, space, str(path))
    return space


def run_statement(statement: ast.stmt, space: dict[str, Any], path: str) -> None:
    code = compile(ast.Module([statement], []), path, "exec")
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        exec(code, space)
        return
    try:
        exec(code, space)
    except ImportError:  # A package that the class needn't need.
        for alias in statement.names:
            space[(alias.asname or alias.name).split(".")[0]] = MagicMock()


@contextlib.contextmanager
def in_folder(folder: Path, extra: list[Path]):
    """Import local modules from a folder, and forget them afterwards."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(folder), *map(str, extra)]
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(str(folder)) or any(file.startswith(str(e)) for e in extra):
                del sys.modules[name]


def leaves(out: Any) -> list[Any]:
    if dataclasses.is_dataclass(out):
        out = {field.name: getattr(out, field.name) for field in dataclasses.fields(out)}
    return tree_leaves(out)


def error_of(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    if mine.shape != theirs.shape:
        return float("inf")
    scale = max(1e-30, float(theirs.abs().max())) if theirs.numel() else 1.0
    error = float((mine - theirs).abs().max()) / scale if theirs.numel() else 0.0
    return error if error == error else float("inf")


def largest_error(net: Any, data: Data, case: dict[str, Any], call: Any) -> float:
    """Convert a module, and return its largest error on the whole graph and on mini-batches."""
    expected = leaves(call(net, copy.copy(data)))
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    found = leaves(model.predict(graph, log=False))
    if len(found) != len(expected):
        return float("inf")
    pairs = list(zip(found, expected, strict=True))
    error = max(error_of(a, b) for a, b in pairs if isinstance(b, Tensor))
    for batch in gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False):
        nodes = graph.perm[batch.n_id[: batch.batch_size]]
        for mine, theirs in zip(leaves(model(batch)), expected, strict=True):
            if isinstance(theirs, Tensor):
                error = max(error, error_of(mine, theirs[nodes]))
    return error if gas.verify(model, graph) else float("inf")


def describe(error: Exception) -> str:
    """Return what failed, and where, without the machine's folders."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, {frame.name})"


def run_case(sources: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Return a case's result: ``converted``, ``refused``, ``wrong``, ``foreign``, ``not run``."""
    root = sources / REPOSITORIES[case["source"]].replace("/", "+")
    folder = (root / case["file"]).parent if "file" in case else root
    begin, error, message = time.perf_counter(), None, ""
    with in_folder(folder, [root / each for each in case.get("path", [])]):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)  # Constants that a forward makes are double, too.
        try:
            data = make_data(case.get("data", {}))
            space = load(root, case)
            space.update(SIZES, data=data, namespace=types.SimpleNamespace)
            net = eval(case["build"], space).double().eval()
            for parameter in net.parameters():
                if parameter.numel() and not parameter.abs().any():
                    torch.nn.init.normal_(parameter)  # Zeros hide errors.
            text = case.get("call", "net(data.x, data.edge_index)")
            code = compile(text, "call", "eval")

            def call(net: Any, data: Any) -> Any:
                return eval(code, {"net": net, "data": data, "torch": torch})

            call(net, copy.copy(data))
        except Exception as failure:
            return {"result": "not run", "message": describe(failure)}
        try:
            error = largest_error(net, data, case, call)
            result = "converted" if error <= TOLERANCE else "wrong"
        except ValueError as refusal:
            result, message = "refused", str(refusal)
            inner = traceback.extract_tb(refusal.__traceback__)[-1].filename
            if f"{os.sep}gas{os.sep}" not in inner:
                result, message = "foreign", describe(refusal)
        except Exception as failure:
            result, message = "foreign", describe(failure)
        finally:
            torch.set_default_dtype(torch.float32)
    return {
        "result": result,
        "error": error,
        "message": message,
        "seconds": time.perf_counter() - begin,
    }


def count_by_source(results: list[dict[str, Any]]) -> str:
    """Return a table of classes and cases by source; a class converts if one of its modes does."""
    rows = []
    for source in [*dict.fromkeys(each["source"] for each in results), ""]:
        cases = [each for each in results if source in ("", each["source"])]
        classes: dict[tuple[str, str, str], set[str]] = {}
        for each in cases:
            key = each["source"], each["file"], each["name"]
            classes.setdefault(key, set()).add(each["result"])
        converted = sum("converted" in found for found in classes.values())
        exact = [each for each in cases if each["result"] == "converted"]
        refused = sum(each["result"] == "refused" for each in cases)
        largest = max((each["error"] for each in exact), default=0.0)
        rows.append(
            [
                REPOSITORIES.get(source, source) or "**all**", f"{converted} of {len(classes)}",
                f"{len(exact)} of {len(cases)}", refused, len(cases) - len(exact) - refused,
                f"{largest:.0e}",
            ]
        )  # fmt: skip
    header = ["source", "classes", "cases", "refused", "anything else", "largest error"]
    return common.markdown(header, rows)


def label_of(case: dict[str, Any]) -> str:
    where = f"{case['source']} {case.get('file', '')} {case['name']}"
    return f"{where} [{case['mode']}]" if case.get("mode") else where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--only", help="part of source, file or class; nothing is written")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = args.cases.read_text().splitlines()
    cases = [json.loads(line) for line in lines if line.strip() and not line.startswith("#")]
    if args.only:
        cases = [case for case in cases if args.only in label_of(case)]
    results = []
    # PyG writes code for the first layer of a class, which changes later ones: a process for each.
    pool = multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1)
    found = pool.imap(functools.partial(run_case, args.sources), cases)
    for case, out in zip(cases, found, strict=True):
        named = {key: case.get(key, "") for key in ("source", "file", "name", "mode")}
        results.append({**named, **out, "seconds": round(out.get("seconds", 0.0), 2)})
        error = "" if out.get("error") is None else f"{out['error']:.1e}"
        print(f"{out['result']:<10} {error:<8} {label_of(case)}", flush=True)
        if out["message"]:
            print("    " + out["message"].strip().replace("\n", "\n    "), flush=True)
    pool.terminate()
    table = count_by_source(results)
    if args.only or args.cases != CASES:
        print(table)
    else:
        common.save("published_models", {"results": results}, table)


if __name__ == "__main__":
    main()
