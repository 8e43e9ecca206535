"""The exact text of every error and warning that a user can meet, one page for each room.

Each case of ``refusals/ROOM.py`` provokes one, and ``refusals/ROOM.txt`` has their texts, to be
read. After a change of texts, look at what differs, then one of::

    GAS_REWRITE_ERRORS=1 python -m pytest tests/test_errors.py
    GAS_REWRITE_ERRORS=1 python -m pytest tests/test_errors.py -k loader

writes the pages anew, unless this is CI. Complete is what reaches every ``raise`` and
``warnings.warn`` of ``gas/``, but for those that ``UNREACHED`` explains.
"""

import ast
import dataclasses
import difflib
import functools
import importlib
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from refusals import Tools

import gas

# The extension's own errors are among the texts; train_gas.py asks for matplotlib first.
pytestmark = [pytest.mark.requires("native"), pytest.mark.requires("matplotlib")]

PAGES = ROOT / "tests" / "refusals"
PACKAGE = Path(gas.__file__).resolve().parent
ROOMS = sorted(path.stem for path in PAGES.glob("[a-z]*.py"))

# What no case reaches: where, how its statement begins, and why.
UNREACHED = [
    ("augment/base.py", "raise NotImplementedError", "of a method that subclasses write"),
    ("nn/conv.py", "raise NotImplementedError", "of a method that subclasses write"),
    ("scalable/call.py", "raise NotImplementedError", "of a method that subclasses write"),
    ("graph/layout.py", 'raise NotImplementedError(f"adjacencies', "no caller makes one"),
    ("scalable/deprecated.py", "warn(f'ScalableGNN", "of names that go away in version 0.3"),
    (
        "convert/tracing/runs.py",
        "raise InexactLayerError",
        "has the layer followed; others say why",
    ),
    ("convert/conversion.py", "raise InexactLayerError", "has the layer followed; others say why"),
    (
        "convert/tracing/trace.py",
        "raise self._matrix_error",
        "has the layer followed; others say why",
    ),
    (
        "scalable/hetero/call.py",
        "raise StopForward",
        "ends forward early; is always caught",
    ),
    ("scalable/call.py", "raise StopForward", "ends forward early; is always caught"),
    ("scalable/norms.py", "raise StopForward", "ends forward early; is always caught"),
    ("cli/checkpoints.py", "raise SystemExit", "a signal, as tests/checkpoint has it"),
    ("cli/command.py", "raise KeyboardInterrupt", "a signal, as tests/test_example.py has it"),
    ("cli/command.py", "raise FloatingPointError", "tests/training/test_diverged.py has it"),
    (
        "cli/command.py",
        "raise ValueError('mini-batches differ",
        "no model of gas.models is inexact",
    ),
    ("cli/settings.py", "warn('Settings.but", "of a name that goes away in version 0.3"),
    ("contrib/simulation/machine.py", "warn('Machine.measured", "of such a name, too"),
    (
        "scalable/distributed/exchange.py",
        "raise ValueError(str(error))",
        "tests/attacks has such states",
    ),
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
            warns = isinstance(node, ast.Call) and ast.unparse(node.func) == "warn"
            if raises or warns:
                text = ast.unparse(node).split("\n")[0]
                name = path.relative_to(PACKAGE).as_posix()
                found.append(Site(name, node.lineno, node.end_lineno, text))
    return found


SITES = {(site.file, line): site for site in sites() for line in site.lines}


def _inside(file):
    """Return a path inside the package, or None."""
    path = Path(file)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


def lines_of(error):
    """Return the lines of ``gas/`` that an error, and those that caused it, came through."""
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
    """Return the text of what a case raises or warns, and the lines that this came from."""
    lines, warned = set(), []

    def show(message, category, filename, lineno, file=None, line=None):
        frame = sys._getframe(1)
        code = gas.native.warn.__code__
        while frame.f_code is code or frame.f_code.co_filename == warnings.__file__:
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


@functools.cache
def page_of(room):
    """Return the texts of the cases of a room, and the statements that each case comes from."""
    text, met = [f"The errors and warnings of refusals/{room}.py. See test_errors.py."], {}
    for name, case in importlib.import_module(f"refusals.{room}").CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            said, lines = provoke(case, Path(folder))
        text += ["", name, *(f"    {line}".rstrip() for line in said.split("\n"))]
        met[name] = {SITES[line] for line in lines if line in SITES}
    return "\n".join(text) + "\n", met


@pytest.mark.parametrize("room", ROOMS)
def test_texts(room):
    text, met = page_of(room)
    path = PAGES / f"{room}.txt"
    if os.environ.get("GAS_REWRITE_ERRORS") and not os.environ.get("CI"):
        path.write_text(text)
    before = path.read_text() if path.exists() else ""
    changes = difflib.unified_diff(before.split("\n"), text.split("\n"), path.name, "now", n=2)
    if text != before:  # (An assertion would show the whole page.)
        pytest.fail("\n".join([*changes, "see the docstring of this file"]))
    if room not in ("native", "examples"):  # The extension's, and those of the scripts.
        others = {name for name, from_here in met.items() if not from_here}
        assert others == WORDS_OF_OTHERS & met.keys()


def test_no_page_is_left_over():
    assert sorted(path.stem for path in PAGES.glob("*.txt")) == ROOMS


@pytest.mark.slow  # All cases in turn.
def test_no_error_is_left_out():
    reached = set().union(*(sites for room in ROOMS for sites in page_of(room)[1].values()))
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
