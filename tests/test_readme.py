"""Run every code block of the documentation alone, in an empty folder."""

import argparse
import functools
import re
import runpy
import shlex
import socket
import sys
import textwrap

import pytest
import torch
from conftest import ROOT, random_graph

import gas
from gas.cli import command, commands
from gas.cli import parser as options

PAGES = ["README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "benchmarks/README.md"]
PAGES += sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))
SHELL = ("", "bash", "sh", "console")
OTHERS = ("text", "diff", "yaml")  # Not executable.

FENCE = re.compile(r"^[ \t]*(?:```|~~~)(.*)$", re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")


def blocks(file):
    """Return the kind and the text of every fenced block of a page."""
    text = (ROOT / file).read_text()
    marks = list(FENCE.finditer(text))
    assert len(marks) % 2 == 0, f"{file} has a block without an end"
    return [
        (begin.group(1).strip(), textwrap.dedent(text[begin.end() + 1 : end.start()]))
        for begin, end in zip(marks[::2], marks[1::2], strict=True)
    ]


def python_blocks(file):
    return [code for kind, code in blocks(file) if kind == "python"]


def prose(file):
    """Return a page without its fenced blocks."""
    return "".join(FENCE.split((ROOT / file).read_text())[::4])


# Blocks of Python ---------------------------------------------------------------------------------


def readme(namespace, printed):
    assert namespace["pred"].shape == (5000, 16)
    assert max(namespace["run"].test_acc) > 0.5  # Of 16 classes.


def conversion(namespace, printed):
    shown = [text for kind, text in blocks("docs/conversion.md") if not kind]
    assert printed == shown[0]


def cheaper_inference(namespace, printed):
    data = random_graph()
    perm, ptr = gas.metis(data.edge_index, 5, num_nodes=60, log=False)
    data = gas.permute(data, perm, log=False)
    model = namespace["TwoLayers"](60, 5, 8, 3).eval()
    assert model._has_forward_layer
    expected = model(data.x, data.edge_index)
    loader = gas.EvalSubgraphLoader(data, ptr, batch_size=2, log=False)
    assert torch.allclose(model(loader=loader), expected, atol=1e-5)


def first_model(namespace, printed):
    data = gas.cluster(random_graph(), 5, log=False)
    model = namespace["SAGE"](60, 5, 8, 3, num_layers=3)
    assert gas.verify(model, data, 2, layout="csr")


def has_shape(name, *shape):
    def check(namespace, printed):
        assert namespace[name].shape == shape

    return check


def fitted(namespace, printed):
    assert 1 <= len(namespace["run"]) <= 10
    assert max(namespace["run"].val_acc) > 0.5


def experiment(namespace, printed):
    assert namespace["run"].test_acc[-1] > 0.1


def planned(namespace, printed):
    assert "Histories are expected to take " in printed
    assert len(namespace["loader"]) == namespace["plan"].steps


def parts_by_loss(namespace, printed):
    assert "PartSampler(by='labels', " in printed
    sampler = namespace["sampler"]
    reported = ~sampler.state_dict()["loss"].isnan()
    assert 0 < int(reported.sum()) < int((sampler.labelled > 0).sum())


def on_ranks(namespace, printed):
    assert namespace["pred"].shape == (2000, namespace["out_channels"])
    assert "Traffic(rank=0, steps=24" in printed


def chain(namespace, printed):
    assert "steps=12" in printed


def chain_with_histories(namespace, printed):
    assert namespace["chain"].statistics().steps == 36
    assert namespace["out"].shape == (1000, namespace["out_channels"])


# What some of them compute, by page and position; all others have to run.
CHECKS = {
    ("README.md", 0): readme,
    ("docs/conversion.md", 0): conversion,
    ("docs/models.md", 0): first_model,
    ("docs/models.md", 1): cheaper_inference,
    ("docs/training.md", 0): experiment,
    ("docs/training.md", 1): fitted,
    ("docs/how-to/fit-memory.md", 0): planned,
    ("docs/how-to/batch-norm.md", 0): has_shape("pred", 1000, 16),
    ("docs/how-to/few-labels.md", 0): parts_by_loss,
    ("docs/how-to/larger-than-memory.md", 0): has_shape("pred", 100, 2),
    ("docs/how-to/neighbor-loader.md", 0): has_shape("pred", 2000, 16),
    ("docs/how-to/predict.md", 0): has_shape("few", 2, 16),
    ("docs/how-to/predict.md", 1): has_shape("pred", 600, 16),
    ("docs/distributed.md", 0): on_ranks,
    ("docs/augmentation.md", 0): chain,
    ("docs/augmentation.md", 1): chain_with_histories,
}
BLOCKS = [(file, number) for file in PAGES for number in range(len(python_blocks(file)))]
NEEDS = {
    ("docs/how-to/compile.md", 0): ["one_graph"],
    ("docs/how-to/export.md", 1): ["huggingface_hub"],
    ("docs/how-to/larger-than-memory.md", 0): ["pyarrow"],
    ("docs/how-to/lightning.md", 0): ["lightning"],
    ("docs/how-to/lightning.md", 1): ["lightning"],
    ("docs/how-to/tables.md", 0): ["pyarrow"],
}


@pytest.fixture
def _one_process(monkeypatch):
    """Set the environment that torchrun gives a single process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    about = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in about.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.slow(fast=25)
@pytest.mark.parametrize(
    ("file", "number"),
    [
        pytest.param(*block, marks=[pytest.mark.requires(name) for name in NEEDS.get(block, ())])
        for block in BLOCKS
    ],
)
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # Lightning's, as the next.
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_block_runs_alone(file, number, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    if file == "docs/distributed.md":
        request.getfixturevalue("_one_process")
    namespace = {"__name__": "block"}
    exec(compile(python_blocks(file)[number], f"{file}, block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    torch._dynamo.reset()
    if (file, number) in CHECKS:
        CHECKS[file, number](namespace, printed)


def test_checks_are_of_blocks_that_are_there():
    assert {*CHECKS, *NEEDS} <= set(BLOCKS)


def hidden(kind, text):
    """Return whether a block is Python that isn't run, or of an unknown kind."""
    if kind == "python":
        return False
    python = r"^\s*(import [\w., ]+$|from [\w.]+ import |(def|class) \w+.*:$)"
    looks = re.search(python, text, re.MULTILINE)
    return kind not in SHELL + OTHERS or (kind != "diff" and looks is not None)


@pytest.mark.parametrize("file", PAGES)
def test_no_python_is_hidden(file):
    """Neither in blocks that are called otherwise, nor in those that are called nothing."""
    assert [block for block in blocks(file) if hidden(*block)] == []


def test_what_is_hidden():
    for text in ("import gas", "import torch.nn as nn", "  from gas import a", "def f(x):\n    y"):
        assert hidden("", text)
        assert hidden("text", text)
    assert hidden("py", "")
    assert not hidden("python", "import gas")
    assert not hidden("", "parts   64\nfrom 1 to 2")


# Command lines ------------------------------------------------------------------------------------


class Parsed(BaseException):
    """A script has read its command line, and does nothing more."""


def words_of(line):
    """Return the script and the arguments of a command line; ``None`` if it is none of ours."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["gas"]:
        return "gas", words[1:]
    if words[:2] == ["make", "train"]:
        given = [word.removeprefix("ARGS=") for word in words[2:] if word.startswith("ARGS=")]
        return "examples/train_gas.py", shlex.split(" ".join(given))
    if words and re.fullmatch(r"(\S*/)?python3?", words[0]):
        words = words[1:]
    if words and words[0] == "torchrun":  # With options of its own.
        words = words[next((i for i, word in enumerate(words) if word.endswith(".py")), 0) :]
    if words and re.fullmatch(r"(examples|benchmarks)/\w+\.py", words[0]):
        return words[0], words[1:]
    return None


def command_lines(file):
    """Return the command lines of a page's blocks and of its prose, each once."""
    lines = [line for kind, text in blocks(file) if kind in SHELL for line in text.splitlines()]
    spans = [" ".join(span.split()) for span in INLINE.findall(prose(file))]
    ours = [words_of(line) for line in lines if re.search(r"\.py\b|make train|^gas ", line)]
    ours += [
        words_of(span) for span in spans if re.match(r"(python|make|examples/|gas [a-z]+ -)", span)
    ]
    ours += [("examples/train_gas.py", span.split()) for span in spans if span.startswith("--")]
    return [(script, args) for script, args in filter(None, ours) if args]


COMMANDS = [
    pytest.param(script, args, id=f"{file}: {script} {' '.join(args)}")
    for file in PAGES
    for script, args in command_lines(file)
]


def stop_at_call(function):
    @functools.wraps(function)
    def stop(*_, **__):
        raise Parsed

    return stop


@pytest.fixture
def parse(monkeypatch):
    """Let a script read its command line, and no more: which options there are."""
    parse_args = argparse.ArgumentParser.parse_args

    def parsed(parser, given=None, *_):
        given = sys.argv[1:] if given is None else given
        if len(given) == 1 and given[0] in parser._option_string_actions:  # As it is named.
            raise Parsed
        parse_args(parser, given)
        raise Parsed

    def parsed_by_tyro(given, prog, _):
        is_a_name = len(given) == 1 and given[0][2:].replace("-", "_") in options.NAMES
        if not is_a_name and "--help" not in given:
            options.parse(given, prog)
        raise Parsed

    def run(script, args):
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        monkeypatch.setattr(command, "parse_args", parsed_by_tyro)
        monkeypatch.setattr(
            options, "_read_base_options", lambda first, _: first
        )  # Files aren't there.
        monkeypatch.syspath_prepend(ROOT / "benchmarks")
        monkeypatch.setattr(sys, "argv", [script, *args])
        if script == "gas":
            stubs = {name: stop_at_call(function) for name, function in commands.COMMANDS.items()}
            monkeypatch.setattr(commands, "COMMANDS", stubs)
            commands.main()
            return
        runpy.run_path(str(ROOT / script), run_name="__main__")

    return run


@pytest.mark.parametrize(("script", "args"), COMMANDS)
def test_options_exist(script, args, parse):
    with pytest.raises(Parsed):
        parse(script, args)


TABLES = {  # Of the pages, by their folders: the ids that commands name.
    "my_graph": ["anna", "bert"], "payments": ["n17", "n35"], "payments_of_today": [],
    "raw": [], "shops": ["cleo", "anna"],
}  # fmt: skip
OF_GAS = [
    file
    for file in PAGES
    if any(kind in SHELL and re.search("^gas ", text, re.MULTILINE) for kind, text in blocks(file))
]


def write_tables(folder, ids, ends):
    """Write a graph of 600 nodes in two classes."""
    names = [*ids, *(f"node{i}" for i in range(600 - len(ids)))]
    folder.mkdir(parents=True, exist_ok=True)
    rows = (f"{name},{i % 7},{i % 2}.5,{'ab'[i % 2]}" for i, name in enumerate(names))
    (folder / "nodes.csv").write_text("\n".join(["id,age,turnover,label", *rows]))
    pairs = (f"{names[i]},{names[(7 * i + 2) % 600]}" for i in range(600))
    (folder / "edges.csv").write_text("\n".join([",".join(ends), *pairs]))


@pytest.mark.requires("pyarrow", "tyro", "matplotlib")
@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("file", OF_GAS)
@pytest.mark.filterwarnings("ignore")
def test_commands_run_one_after_the_other(file, tmp_path, monkeypatch):
    """The blocks of a page, in a folder with its tables; trainings of two epochs."""
    monkeypatch.chdir(tmp_path)
    for block in python_blocks(file):
        if 'Path("library")' in block:  # Tables with types.
            exec(block, {})
    lines = [line for kind, text in blocks(file) if kind in SHELL for line in text.splitlines()]
    for line in lines:
        if not line.startswith("gas "):
            continue
        args = shlex.split(line, comments=True)[1:]
        for name in TABLES.keys() & {*args}:
            ends = ("payer", "payee") if "--columns" in args else ("source", "target")
            write_tables(tmp_path / name, TABLES[name], ends)
        commands.main([*args, "--epochs", "2"] if args[0] == "train" else args)
    assert list(tmp_path.rglob("*"))


def test_an_option_that_is_not_there(parse, capsys):
    for args in (["--no-such-option"], ["--model", "no-such-model"]):
        with pytest.raises(SystemExit):
            parse("examples/train_gas.py", args)
    assert "--no-such-option" in capsys.readouterr().err


def test_command_lines_are_found():
    assert len(COMMANDS) > 8
    assert ("examples/train_gas.py", ["--dataset", "my_graph.npz"]) in command_lines("README.md")
    augment = command_lines("docs/augmentation.md")
    assert ("examples/train_gas.py", ["--augment", "mh_aug"]) in augment


# Links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", PAGES)
def test_links_and_files_exist(file):
    text = (ROOT / file).read_text()
    assert not re.search(r"@[A-Z]+@", text)  # Places to be filled.
    folder = (ROOT / file).parent
    for link in re.findall(r"\]\(([\w./-]+)(?:#[\w.-]+)?\)", text):
        assert (folder / link).exists(), link
    for script in re.findall(r"`(\w+\.py)`", text):
        assert list(ROOT.glob(f"*/{script}")), script
    for path in re.findall(r"`((?:benchmarks|examples|gas|csrc|tests|docs)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
