"""Words of errors and warnings for the command line."""

import errno
from types import SimpleNamespace

import pytest
from conftest import random_graph

import gas
from gas.cli import Settings
from gas.cli.options import DENSE, _suggest_norm, explain_error, make_augmentation, parse_args


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'lr' is 'fast'", "--lr is 'fast'"),
        ("take lr=0.001", "take --lr 0.001"),
        ("'budget_bytes' is 64, but", "--memory-budget, in bytes, is 64, but"),
        ("undirected=True adds", "--undirected adds"),
        ("accept it by check=False", "accept it by --no-check"),
        ("pass columns={'source': ...}", "pass --columns source=..."),
        ("columns={'source': ..., 'target': ...}", "--columns source=... target=..."),
        ("columns={'label': ...}; or give y.npy", "--columns label=...; or give y.npy"),
        ("say which, columns={'id': 'key'}", "say which, --columns id=key"),
        ("the column 'store' left out", "the column 'store' left out"),
        ("nodes of type 'store'", "nodes of type 'store'"),
        ("('device', 'to', 'a')", "('device', 'to', 'a')"),
        ("runs/lr=0.1/nodes.csv", "runs/lr=0.1/nodes.csv"),
    ],
)
def test_arguments_are_flags_and_names_of_the_user_stay(text, expected):
    assert explain_error(text) == expected


@pytest.mark.requires("tyro")
@pytest.mark.parametrize(
    "option",
    ["--num-layers", "--hidden-channels", "--evaluate-every", "--patience", "--num-steps"],
)
def test_numbers_start_at_one(tmp_path, option):
    name = option.removeprefix("--").replace("-", "_")
    with pytest.raises(ValueError, match=f"'{name}' is 0, expected"):
        parse_args([option, "0", "--out", str(tmp_path)])


@pytest.mark.requires("tyro")
@pytest.mark.parametrize(
    ("option", "value"),
    [("--memory-budget", "nan"), ("--memory-budget", "-5"), ("--seed", str(10**20)),
     ("--dropout", "2"), ("--drop", "1")],
)  # fmt: skip
def test_values_are_checked_before_the_graph_is_loaded(tmp_path, option, value):
    name = option.removeprefix("--").replace("-", "_")
    with pytest.raises(ValueError, match=f"'{name}' is .*, expected "):
        parse_args([option, value, "--augment", "drop_edge", "--out", str(tmp_path)])


@pytest.mark.requires("tyro")
def test_views_are_those_of_the_options(tmp_path):
    def make(*options):
        args = parse_args(["--undirected", *options, "--out", str(tmp_path)])
        views, weights = make_augmentation(args)
        return views and views(random_graph(directed=False)), weights

    assert make() == (None, {"kl": 0.0, "h": 0.0})
    for options, p in (((), 0.3), (("--drop", "0.5"), 0.5)):
        views, weights = make("--augment", "drop_edge", *options, "--entropy", "2")
        assert views.p == p
        assert weights == {"kl": 0.0, "h": 2.0}
    views, weights = make("--augment", "mh_aug", "--kl", "0.25")
    assert views.num_steps == 12
    assert weights == {**gas.augment.PUBLISHED["cora"].loss, "kl": 0.25}


def test_an_error_of_the_system_without_a_file():
    error = OSError(errno.ENOSPC, "No space left on device")
    assert explain_error(error).startswith("No space left on device: free some room")


def test_an_error_of_the_allocator_is_its_first_line():
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\nframe #0: posix()")
    assert explain_error(error).startswith("DefaultCPUAllocator: can't allocate memory: 9 bytes: ")


@pytest.mark.parametrize(
    ("norm", "architecture", "degree", "is_told"),
    [
        (None, {}, DENSE, True),
        (None, {}, DENSE - 1, False),
        ("none", {}, DENSE, False),
        (None, {"batch_norm": False}, DENSE, False),
    ],
)
def test_a_norm_is_recommended_for_dense_graphs_unless_chosen(
    capsys, norm, architecture, degree, is_told
):
    args = SimpleNamespace(norm=norm, full_batch=False, model="gcn")
    data = SimpleNamespace(num_edges=10 * degree, num_nodes=10)
    _suggest_norm(args, Settings({"num_layers": 2, **architecture}), data)
    assert ("--norm batch" in capsys.readouterr().err) == is_told
