"""Do the tests notice? Changes one operator, flag or constant at a time, and runs the tests.

    make mutants FILES="gas/nn/spmm.py gas/models/gcn2.py" [N=50] [SEED=0]

``N`` random changes, made by cosmic-ray in a copy of the repository, each followed by the tests of
the changed file's subject alone. Prints what survives; fails if that is more than a tenth.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "runs", "__pycache__", ".*_cache")
ARITHMETIC, BITS = "(Add|Sub|Mul|Div|FloorDiv|Mod)", "(BitOr|BitAnd|BitXor|LShift|RShift)"
ORDER = "(Eq|NotEq|Lt|LtE|Gt|GtE)"
OPERATORS = re.compile(
    f"core/(ReplaceBinaryOperator_({ARITHMETIC}_{ARITHMETIC}|{BITS}_{BITS})"
    f"|ReplaceComparisonOperator_({ORDER}_{ORDER}|Is_IsNot|IsNot_Is)"
    "|ReplaceUnaryOperator_(Delete_.*|USub_UAdd)"
    "|Replace(True|False|And|Or|Break|Continue)With.*|AddNot|NumberReplacer)"
)
CONVERT = {  # Of gas/convert, whose tests are by what users write: see tests/convert.
    "arguments": "given_lists model_shapes own_layers caches user_shapes",
    "check": "unusual_modules given_graph layers training own_layers",
    "conversion": "unusual_modules changes training caches user_shapes",
    "edge_layers": "given_graph matrices own_layers model_shapes common_lines",
    "edge_values": "projections messages caches edge_dropout edge_lists",
    "failures": "user_shapes caches model_shapes node_tables",
    "inputs": "given_graph unusual_modules user_shapes model_shapes",
    "known": "unusual_modules training common_lines user_shapes",
    "layers": "given_graph own_layers messages layers edge_lists",
    "lists_and_tables": "given_lists node_tables caches",
    "matrices": "matrices given_graph",
    "messages": "messages projections edge_lists",
    "model": "histories parts relu_dropout followed user_shapes",
    "modes": "training edge_dropout user_shapes",
    "normalise": "given_graph own_layers model_shapes edge_lists",
    "outputs": "training changes caches user_shapes",
    "place": "histories unusual_modules common_lines model_shapes",
    "preparation": "matrices messages edge_lists",
    "prepare": "matrices messages caches edge_dropout edge_lists",
    "products": "projections matrices messages node_tables",
    "rewrite": "training matrices projections relu_dropout messages user_shapes",
    "runs": "training changes caches edge_dropout",
    "sample": "unusual_modules given_graph model_shapes",
    "scalable": "unusual_modules user_shapes given_lists node_tables",
    "scope": "training projections own_layers edge_dropout",
    "segments": "user_shapes",
    "state": "training changes caches edge_dropout",
    "trace": "changes training own_layers messages user_shapes",
    "traced": "unusual_modules projections messages given_lists",
    "traced_matrix": "matrices given_graph",
    "wrappers": "kept_graphs unusual_modules given_lists",
}
OTHER_TESTS = {  # Where they have other names.
    **{
        str(path.relative_to(ROOT)): [f"convert/test_{test}.py" for test in tests.split()]
        for name, tests in CONVERT.items()
        for path in (ROOT / "gas/convert").rglob(f"{name}.py")
    },
    "gas/augment/checks.py": ["augment/test_base.py", "augment/test_mh.py"],
    "gas/augment/mh.py": ["augment/test_mh.py", "augment/test_chain.py"],
    "gas/augment/units.py": [f"augment/test_{name}.py" for name in ("base", "drop", "views")],
    "gas/augment/statistics.py": ["augment/test_mh.py", "augment/test_chain.py"],
    "gas/cli/__init__.py": ["cli/test_options.py", "cli/test_settings.py"],
    "gas/cli/checkpoints.py": [
        "cli/test_commands.py",
        "training/test_diverged.py",
        "checkpoint/test_resume.py",
    ],
    "gas/cli/checks.py": [
        f"cli/test_{name}.py" for name in ("options", "command_folders", "hetero")
    ],
    "gas/cli/command.py": [
        *(f"cli/test_{name}.py" for name in ("commands", "command_folders", "experiment")),
        "test_errors.py::test_texts[examples]",
    ],
    "gas/cli/doctor.py": ["cli/test_commands.py"],
    "gas/cli/experiment.py": ["cli/test_experiment.py", "cli/test_html.py"],
    "gas/cli/graphs.py": [
        f"cli/test_{name}.py" for name in ("experiment", "hetero", "command_folders")
    ],
    "gas/cli/options.py": [
        *(f"cli/test_{n}.py" for n in ("options", "commands", "experiment", "command_folders")),
        "test_errors.py::test_texts[examples]",
    ],
    "gas/cli/parser.py": [
        f"cli/test_{name}.py" for name in ("commands", "command_folders", "options")
    ],
    "gas/cli/results.py": ["cli/test_commands.py", "cli/test_hetero.py"],
    "gas/cli/runs.py": [
        f"cli/test_{name}.py" for name in ("commands", "command_folders", "hetero")
    ],
    "gas/cli/setup.py": [
        f"cli/test_{name}.py" for name in ("experiment", "hetero", "settings", "command_folders")
    ],
    **{
        f"gas/graph/folder/{name}.py": ["graph/test_folder.py", "attacks/test_graph_folders.py"]
        for name in ("description", "new", "opening", "writing")
    },
    **{
        f"gas/datasets/importing/{name}.py": ["datasets/test_import_graph.py"]
        for name in ("graph", "sorting", "stages")
    },
    "gas/history/cuda.py": ["history/test_cuda.py", "history/test_streams.py"],
    "gas/history/rows.py": ["scalable"],
    "gas/loader/cutter.py": ["loader"],
    "gas/models/gcn.py": ["models"],
    **{
        f"gas/native/{name}.py": [f"nn/test_{name}.py"]
        for name in ("attention", "custom_op", "edge_conv", "mixture")
    },
    "gas/native/augment.py": ["augment/test_kernels.py"],
    "gas/native/engine.py": ["history/test_engine.py"],
    "gas/native/transfer.py": ["native", "history/test_history.py", "cli/test_account.py"],
    "gas/graph/folder/npy.py": ["graph/test_npy.py"],
    "gas/graph/hetero.py": ["graph", "hetero/test_hetero_models.py"],
    "gas/graph/cluster.py": ["graph/test_cluster.py", "graph/test_partition.py"],
    "gas/graph/features.py": ["graph", "test_sparse_features.py"],
    "gas/graph/links.py": ["loader/test_links.py"],
    "gas/native/files.py": ["native/test_files.py"],
    "gas/scalable/arguments.py": ["models"],
    "gas/scalable/inference.py": [
        f"scalable/test_{name}.py" for name in ("inference", "norms", "predict")
    ],
    "gas/scalable/distributed/exchange.py": ["distributed"],
    "gas/scalable/distributed/group.py": ["distributed"],
    "gas/native/extension.py": ["native/test_extension.py", "native/test_devices.py"],
    "gas/native/memory.py": ["native", "cli/test_report.py"],
    "gas/nn/attention.py": ["nn/test_attention.py", "nn/test_conv_attention.py"],
    "gas/nn/edge_conv.py": ["nn/test_edge_conv.py", "nn/test_conv_edge.py"],
    "gas/nn/sum_convs.py": ["nn/test_conv.py"],
    "gas/nn/mixture.py": ["nn/test_mixture.py", "nn/test_conv_edge.py"],
    "gas/nn/spmm.py": ["nn/test_spmm.py", "nn/test_conv.py", "nn/test_transforms.py"],
    **{
        f"gas/scalable/distributed/{name}.py": [
            "distributed/test_ranks.py",
            "distributed/test_ranks_gradients.py",
        ]
        for name in ("distribute", "ranks")
    },
    **{
        f"gas/training/{name}.py": ["training/test_plan.py", "training/test_memory.py"]
        for name in ("choice", "cost", "planner")
    },
    "gas/training/epochs.py": [
        f"training/test_{name}.py" for name in ("fit", "callbacks", "diverged", "loop")
    ],
    "gas/training/fit.py": [
        f"training/test_{name}.py" for name in ("fit", "callbacks", "average", "warm_up")
    ],
    "gas/training/full_batch.py": ["training/test_loop.py", "training/test_fit.py"],
    "gas/training/links.py": ["training/test_links_scores.py", "loader/test_links.py"],
    "gas/training/loop.py": ["training/test_loop.py", "training/test_diverged.py"],
    "gas/training/measure.py": [
        "training/test_plan.py",
        "training/test_memory.py",
        "cli/test_account.py",
    ],
    "gas/training/optimizer_hooks.py": ["training/test_average.py", "training/test_warm_up.py"],
    "gas/training/record.py": [
        f"training/test_{name}.py" for name in ("diverged", "fit", "loop", "callbacks")
    ],
}


def tests_of(file: str) -> list[str]:
    """Return the tests of a file's subject: those of its name, or else all of its room.

    And those of the errors of its room.
    """
    room, stem = Path("tests", *Path(file).parts[1:-1]), Path(file).stem
    if room.name == "hetero":
        room = Path("tests", "hetero")
    elif not (ROOT / room).exists():  # A part of a room with one file of tests.
        room, stem = room.parent, room.name
    named = sorted((ROOT / room).glob(f"test_{stem}*.py"))
    found = [str(path.relative_to(ROOT)) for path in named] or [str(room)]
    if file in OTHER_TESTS:
        found = [f"tests/{name}" for name in OTHER_TESTS[file]]
    page = {"cli": "command"}.get(Path(file).parts[1], Path(file).parts[1])
    if (ROOT / "tests" / "refusals" / f"{page}.py").exists():
        found.append(f"tests/test_errors.py::test_texts[{page}]")
    return ["tests/test_defaults.py", *found]


def mutants_of(code: str) -> list[list[tuple[str, int]]]:
    """For each place of a source that can be changed: the changes, (operator, occurrence)."""
    nodes, places = list(ast_nodes(get_ast(code))), {}
    for name in filter(OPERATORS.fullmatch, operator_names()):
        operator = get_operator(name)()
        found = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(found):
            places.setdefault((start, name == "core/AddNot"), []).append((name, occurrence))
    return [places[place] for place in sorted(places)]


def meaning(code: str) -> str:
    """Return a source without its annotations, which aren't evaluated."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if hasattr(node, name):
                setattr(node, name, None if not isinstance(node, ast.AnnAssign) else ast.Name("_"))
    return ast.dump(tree)


def changes(files: list[str], seed: int) -> Iterator[tuple[str, str]]:
    """Files and their changed sources: each place once, in random order."""
    draw = random.Random(seed)
    sources = {file: (ROOT / file).read_text() for file in files}
    places = [(file, place) for file in files for place in mutants_of(sources[file])]
    draw.shuffle(places)
    for file, place in places:
        name, occurrence = draw.choice(place)
        changed = mutate_code(sources[file], get_operator(name)(), occurrence)
        with contextlib.suppress(SyntaxError):  # The asterisk of a signature is no product.
            if meaning(changed) != meaning(sources[file]):
                yield file, changed


def run(copy: Path, tests: list[str], limit: float) -> int:
    """Return the exit status of the tests, -1 if they take too long; torch is there already."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(copy)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.path.insert(0, str(copy))
        flags = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
        os._exit(int(pytest.main([*flags, *tests])))
    ended, begin = 0, time.monotonic()
    try:
        while time.monotonic() - begin < limit:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return -1
    finally:
        if not ended:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def show(file: str, before: str, after: str) -> str:
    """Return the line that was changed, as it was and as it is."""
    lines = enumerate(zip(before.splitlines(), after.splitlines(), strict=False), 1)
    number, (old, new) = next((number, pair) for number, pair in lines if pair[0] != pair[1])
    return f"{file}:{number}\n  - {old.strip()}\n  + {new.strip()}"


def main() -> int:
    """Count what is noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("-n", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import torch_geometric  # noqa: F401  # Loaded once, for all children.

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "repository")
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        if (ROOT.parent / "shared").is_dir():
            Path(scratch, "shared").symlink_to(ROOT.parent / "shared")
        os.environ["PYTHONPATH"] = str(copy)
        limits = {}
        for tests in {tuple(tests_of(file)) for file in args.files}:
            begin = time.monotonic()
            if run(copy, list(tests), 600) != 0:
                sys.exit(f"{' '.join(tests)} fail before any change")
            limits[tests] = 30 + 5 * (time.monotonic() - begin)
        # Two changes of one second and size would share their bytecode.
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        for file in args.files:
            for compiled in (copy / file).parent.glob(f"__pycache__/{Path(file).stem}.*"):
                compiled.unlink()
        total = survived = 0
        for file, changed in changes(args.files, args.seed):
            if total == args.n:
                break
            before = (copy / file).read_text()
            (copy / file).write_text(changed)
            total += 1
            tests = tests_of(file)
            noticed = run(copy, tests, limits[tuple(tests)]) != 0
            print("." if noticed else "S", end="", file=sys.stderr, flush=True)
            if not noticed:
                survived += 1
                print(show(file, before, changed), flush=True)
            (copy / file).write_text(before)
    print(f"{total - survived} of {total} changes were noticed, {survived} survived")
    return int(10 * survived > total)


if __name__ == "__main__":
    sys.exit(main())
