"""The structure of the package: rooms, imports between them, sizes of files and functions.

A *room* is a direct subpackage or module of ``gas``. An *arrow* is a pair of rooms of which one
imports the other, imports for types alone left out. A *circle* is a strongly connected set of
files, imports for types included. A *floor* is the length of the longest path down from a room.

Each limit may be lowered, and isn't raised: a change that needs more makes room elsewhere.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import gas
from gas.scalable.deprecated import DeprecatedNames

ROOT = Path(__file__).resolve().parent.parent
ROOMS, ARROWS, FLOORS = 16, 60, 9
CIRCLES = 0
LONG_FILES, LONG_FUNCTIONS = 3, 3  # Over 400 and over 60 lines.
LOCAL_IMPORTS = 0  # Imports of gas inside functions.
DEEP_IMPORTS = 0  # Imports of a module inside another room, instead of the room's public names.
CALLS = 1000  # Python calls of a training step.
METHODS = 16  # Public methods of ScalableGNN, properties counted.
WAY_FILES, WAY_CLASSES = 6, 8  # Of a row that is pushed, and of one that is read.


class Import(NamedTuple):
    """An import of a file of the package in another."""

    source: str
    target: str
    is_for_types: bool
    is_local: bool


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "gas").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def module_of(name: str) -> str:
    """Return the file that a dotted name is in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def room_of(module: str) -> str:
    """Return the room of a module.

    Private modules of ``gas`` itself belong to ``gas``, and ``python -m gas`` to the command.
    """
    room = module.partition(".")[2].partition(".")[0]
    return {"": "gas", "_moved": "gas", "_startup": "gas", "__main__": "cli"}.get(room, room)


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        return []
    return [name for name in names if name.split(".")[0] == "gas"]


def walk(source: str, node: ast.AST, types: bool = False, local: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for_types = types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
        inside = local or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in imported(child):
            if module_of(name) != source:
                yield Import(source, module_of(name), for_types, inside)
        yield from walk(source, child, for_types, inside)


IMPORTS = [each for name, tree in TREES.items() for each in walk(name, tree)]


def arrows() -> set[tuple[str, str]]:
    pairs = ((room_of(i.source), room_of(i.target)) for i in IMPORTS if not i.is_for_types)
    return {(above, below) for above, below in pairs if above != below}


def circles(pairs: set[tuple[str, str]]) -> list[list[str]]:
    """Return the strongly connected sets of more than one: those that reach one another."""
    below: dict[str, set[str]] = {}
    for above, target in pairs:
        below.setdefault(above, set()).add(target)

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for each in below.get(todo.pop(), ()):
                if each not in seen:
                    seen.add(each)
                    todo.append(each)
        return seen

    reach = {name: reached(name) for name in below}
    in_circles = {name for name in below if name in reach[name]}
    sets = {frozenset(o for o in in_circles if o in reach[n] and n in reach[o]) for n in in_circles}
    return sorted(map(sorted, sets))


def test_no_new_circles_of_files():
    found = circles({(each.source, each.target) for each in IMPORTS})
    assert len(found) <= CIRCLES, "\n".join(map(", ".join, found))


def test_rooms_lie_on_floors():
    pairs = arrows()
    assert not circles(pairs)
    floors: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in floors:
            floors[room] = 1 + max((floor(low) for high, low in pairs if high == room), default=0)
        return floors[room]

    rooms = {room_of(module) for module in MODULES}
    assert len(rooms) <= ROOMS, sorted(rooms)
    assert len(pairs) <= ARROWS, sorted(pairs)
    assert max(map(floor, rooms)) <= FLOORS, floors


def test_nothing_imports_contrib():
    assert not [above for above, below in arrows() if below == "contrib"]


def test_imports_stand_at_the_top():
    found = [f"{each.source} imports {each.target}" for each in IMPORTS if each.is_local]
    assert len(found) <= LOCAL_IMPORTS, "\n".join(found)


def test_rooms_import_public_names():
    found = [
        f"{name} imports from {node.module}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and imported(node) and node.module.count(".") > 1
        if room_of(node.module) != room_of(name)
    ]
    assert len(found) <= DEEP_IMPORTS, "\n".join(found)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without those of its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def test_files_and_functions_are_short():
    files = [name for name, path in MODULES.items() if path.read_text().count("\n") > 400]
    assert len(files) <= LONG_FILES, files
    functions = [
        f"{name}: {node.name} {code_lines(node)}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > 60
    ]
    assert len(functions) <= LONG_FUNCTIONS, functions


QUESTION_WORDS = {"What", "Which", "Who", "Whose", "Where", "When", "Why", "How", "Whether"}


def test_docstrings_say_what_is_done():
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    found = [
        f"{name}: {text.splitlines()[0]}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node) or "")
        if text.split()[0] in QUESTION_WORDS
    ]
    assert not found, "\n".join(found)


STEP = """
import sys, torch, torch.nn.functional as F, gas
from torch_geometric.nn import GraphSAGE
torch.manual_seed(0)
data, in_channels, out_channels = gas.get_data("data", "planted:5000")
net = GraphSAGE(in_channels, 64, num_layers=3, out_channels=out_channels)
model = gas.to_scalable(net, data)
graph = gas.cluster(data, num_parts=40, model=model, log=False)
loader = gas.SubgraphLoader(graph, batch_size=5, log=False)
optimizer = torch.optim.Adam(model.parameters())
calls = [0]
def step(batch):
    own = batch.own
    loss = F.cross_entropy(model(batch)[own.train_mask], own.y[own.train_mask])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
def count(frame, event, arg):
    calls[0] += event == "call"
for _ in range(2):
    for batch in loader:
        step(batch)
batches = iter(loader)
step(next(batches))
sys.setprofile(count)
step(next(batches))
sys.setprofile(None)
print(calls[0])
"""


@pytest.mark.requires("native")
def test_a_step_makes_few_calls():
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) <= CALLS


def test_a_model_has_few_public_methods():
    former = vars(DeprecatedNames)
    names = {
        name
        for each in gas.ScalableGNN.__mro__
        if each.__module__.startswith("gas.") and each is not DeprecatedNames
        for name, value in vars(each).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    assert len(names) <= METHODS, sorted(names)
    assert not names & former.keys()


@pytest.mark.requires("native")
def test_the_way_of_a_row_is_short():
    """A row is pushed and another is read; each file and class on their way is counted.

    ``push_and_pull`` (``scalable/call.py``) makes a ``Call``, which checks the rows and pushes the
    batch's own to a ``History`` (``history/history.py``). Its ``HostLink`` makes a ``Job``
    (``native/transfer.py``) of them, which the ``TransferEngine`` runs (``history/transfer.py``).
    ``BatchPulls`` (``history/rows.py``) reads the halo's rows by the same link: a ``Pull`` into
    memory of the ``BufferPool`` (``native/transfer.py``). Ids are checked by ``native/checks.py``.
    """
    model = gas.ScalableGNN(20, 4, 2)
    n_id, x = torch.arange(12), torch.ones(12, 4, requires_grad=True)
    where = 8, n_id, torch.tensor([0]), torch.tensor([8])
    model.histories[0].push(torch.ones(20, 4))
    files, classes = set(), set()

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(ROOT / "gas")):
            files.add(name.removeprefix(str(ROOT / "gas")))
            if "self" in frame.f_locals:
                classes.add(type(frame.f_locals["self"]).__name__)

    sys.setprofile(note)
    model.push_and_pull(model.histories[0], x, *where)
    sys.setprofile(None)
    model.close()
    assert len(files) <= WAY_FILES, sorted(files)
    assert len(classes) <= WAY_CLASSES, sorted(classes)
