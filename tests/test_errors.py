"""The exact text of every error and warning that a user can meet: ``errors.txt``, to be read.

Each case of ``refusals/`` provokes one. After a change of texts, look at what differs, then::

    GAS_REWRITE_ERRORS=1 python -m pytest tests/test_errors.py

writes the file anew, unless this is CI. Complete is what reaches every ``raise`` and
``warnings.warn`` of ``gas/``, but for those that ``UNREACHED`` explains.
"""

import ast
import dataclasses
import difflib
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from refusals import (
    Tools,
    augment,
    checkpoint,
    compat,
    convert,
    datasets,
    distributed,
    examples,
    graph,
    growing,
    hetero,
    history,
    links,
    loader,
    models,
    nn,
    rank_checkpoints,
    scalable,
    training,
)
from refusals import native as native_cases

import gas

# The extension's own errors are among the texts; train_gas.py asks for matplotlib first.
pytestmark = [pytest.mark.requires("native"), pytest.mark.requires("matplotlib")]

SNAPSHOT = ROOT / "tests" / "errors.txt"
PACKAGE = Path(gas.__file__).resolve().parent
ROOMS = {
    "gas.native": native_cases,
    "gas.graph": graph,
    "gas.history": history,
    "gas.nn": nn,
    "gas.augment": augment,
    "gas.loader": loader,
    "gas.loader.links": links,
    "gas.scalable": scalable,
    "gas.distributed": distributed,
    "gas.models": models,
    "gas.convert": convert,
    "gas.growing": growing,
    "gas.hetero": hetero,
    "gas.datasets": datasets,
    "gas.training": training,
    "gas.checkpoint": checkpoint,
    "gas.checkpoint.ranks": rank_checkpoints,
    "gas.compat": compat,
    "examples": examples,
}

# What no case reaches: where, how its statement begins, and why.
UNREACHED = [
    ("augment/base.py", "raise NotImplementedError", "of a method that subclasses write"),
    ("nn/conv.py", "raise NotImplementedError", "of a method that subclasses write"),
    ("scalable/model.py", "raise NotImplementedError", "of a method that subclasses write"),
    ("graph/layout.py", "raise NotImplementedError(f'nobody makes", "no way in asks for one"),
    ("native/encoded_rows.py", "raise NotImplementedError", "of a method that subclasses write"),
    ("convert/model.py", "raise AssertionError", "a stage of inference pushes nothing itself"),
    ("convert/scalable.py", "raise AssertionError", "stands for histories where none are read"),
    ("hetero/passes.py", "raise Reached", "ends forward early; never leaves the package"),
    ("scalable/call.py", "raise Reached", "ends forward early; never leaves the package"),
    ("checkpoint/files.py", "raise AssertionError", "who writes one writes its manifest"),
    ("training/checkpoints.py", "raise SystemExit", "a signal, as tests/checkpoint has it"),
]

# Cases whose words are PyTorch's, the system's, or those of the user's own code.
WORDS_OF_OTHERS = {
    "Settings.load, no file",
    "nn.Dropout, a negative probability",
    "push, a store that fails",
}


@dataclasses.dataclass(frozen=True)
class Site:
    """A statement that raises or warns."""

    file: str
    first: int
    last: int
    text: str

    @property
    def lines(self):
        return range(self.first, self.last + 1)

    def __str__(self):
        return f"gas/{self.file}:{self.first}: {self.text}"


def sites():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            raises = isinstance(node, ast.Raise) and node.exc is not None
            warns = isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
            if raises or warns:
                text = ast.unparse(node).split("\n")[0]
                name = path.relative_to(PACKAGE).as_posix()
                found.append(Site(name, node.lineno, node.end_lineno, text))
    return found


SITES = {(site.file, line): site for site in sites() for line in site.lines}


def _inside(file):
    """A path inside the package, or None."""
    path = Path(file)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


def lines_of(error):
    """The lines of ``gas/`` that an error, and those that caused it, came through."""
    lines, trace = set(), error.__traceback__
    while trace is not None:
        lines.add((_inside(trace.tb_frame.f_code.co_filename), trace.tb_lineno))
        trace = trace.tb_next
    for cause in (error.__cause__, error.__context__):
        if cause is not None and cause is not error:
            lines |= lines_of(cause)
    return lines


def normalised(text, folder):
    for path, name in ((folder, "<tmp>"), (tempfile.gettempdir(), "<tmp>"), (ROOT, "<root>")):
        text = text.replace(str(path), name)
    text = re.sub(r"[\d.,]+ (\w+) are free", r"<n> \1 are free", text)
    text = re.sub(r"<n> \w+ are free", "<n> are free", text)
    text = re.sub(r"\([\d,]+ are free\)", "(<n> are free)", text)
    return re.sub(r"0x[0-9a-f]+", "<address>", text)


def provoke(case, folder):
    """The text of what a case raises or warns, and the lines that this came from."""
    lines, warned = set(), []

    def show(message, category, filename, lineno, file=None, line=None):
        frame = sys._getframe(1)
        while frame.f_code.co_filename == warnings.__file__:
            frame = frame.f_back
        line = _inside(frame.f_code.co_filename), frame.f_lineno
        if line in SITES:  # Others are PyTorch's.
            lines.add(line)
            warned.append(f"{category.__name__}: {message}")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.manual_seed(0)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        try:
            case(Tools(folder, patch))
        except (Exception, SystemExit) as error:
            return normalised(f"{type(error).__name__}: {error}", folder), lines | lines_of(error)
    return normalised("\n".join(warned) or "nothing", folder), lines


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The text of every case, and the statements of ``gas/`` that it comes from."""
    text, met = ["What the package refuses, and in which words. See test_errors.py."], {}
    for room, module in ROOMS.items():
        text += ["", "", room, "=" * len(room)]
        for number, (name, case) in enumerate(module.CASES.items()):
            said, lines = provoke(case, tmp_path_factory.mktemp(f"case{number}"))
            text += ["", name, *(f"    {line}".rstrip() for line in said.split("\n"))]
            met[room, name] = {SITES[line] for line in lines if line in SITES}
    return "\n".join(text) + "\n", met


def test_texts(page):
    text, _ = page
    if os.environ.get("GAS_REWRITE_ERRORS") and not os.environ.get("CI"):
        SNAPSHOT.write_text(text)
    before = SNAPSHOT.read_text() if SNAPSHOT.exists() else ""
    changes = difflib.unified_diff(before.split("\n"), text.split("\n"), "errors.txt", "now", n=2)
    if text != before:  # (An assertion would show the whole page.)
        pytest.fail("\n".join([*changes, "see the docstring of this file"]))


def test_words_are_ours(page):
    _, met = page
    others = {
        name
        for (room, name), from_here in met.items()
        if not from_here and room not in ("gas.native", "examples")
    }
    assert others == WORDS_OF_OTHERS


def test_no_error_is_left_out(page):
    reached = set().union(*page[1].values())
    left, excused = [], set()
    for site in dict.fromkeys(SITES.values()):
        met = site in reached
        excuse = next(
            (e for e in UNREACHED if e[0] == site.file and site.text.startswith(e[1])), None
        )
        if excuse is not None:
            assert not met, f"{site} is reached: take it from UNREACHED"
            excused.add(excuse)
        elif not met:
            left.append(str(site))
    assert not left, "no case reaches\n" + "\n".join(left)
    assert excused == set(UNREACHED), "UNREACHED names what is no longer there"
