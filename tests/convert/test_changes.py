"""Changes of parameters in forward, and what a module keeps in classes, files and containers."""

import abc
import collections
import functools
import random
import threading
import time
import types

import comparisons
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from comparisons import check, of_x
from conftest import random_graph
from torch import nn
from torch_geometric.utils import degree

import gas


def net_of(function, **attributes):
    """Return a module of a class of this file, whose globals conversion then looks at."""
    net = comparisons.net_of(function, **attributes)
    net.__class__ = type("Net", (type(net),), {"__module__": __name__})
    return net


def clamp_a_view(net, x, edge_index):
    with torch.no_grad():
        net.lin.weight.T.clamp_(-100, 100)
    return net.lin(net.hop(x, edge_index))


def scale_by_a_name(net, x, edge_index):
    with torch.no_grad():
        weight = net.lin.weight
        weight *= (400 / weight.norm()).clamp(max=1)
    return net.lin(net.hop(x, edge_index))


def clamp_several(net, x, edge_index):
    with torch.no_grad():
        torch._foreach_clamp_max_([net.lin.weight], 100.0)
    return net.lin(net.hop(x, edge_index))


def clamp_data(net, x, edge_index):
    net.lin.weight.data.clamp_(-100, 100)
    return net.lin(net.hop(x, edge_index))


class ClampsAnother(nn.Module):
    """A part that is given the edges, and so is followed inside."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x, edge_index):
        self.lin.weight.data.clamp_(-100, 100)
        return self.lin(x)


@pytest.mark.parametrize("function", [clamp_a_view, scale_by_a_name, clamp_several, clamp_data])
def test_changes_of_parameters_that_keep_their_values_are_refused(function):
    with pytest.raises(ValueError, match=r"in forward changes 'lin.weight' of .* the training"):
        gas.to_scalable(net_of(function, hop=pyg.SimpleConv()), random_graph())


def test_changes_inside_of_a_part_with_edges_are_refused():
    net = net_of(lambda net, x, e: net.b(net.part(net.a(x, e), e), e), part=ClampsAnother())
    with pytest.raises(ValueError, match=r"' in forward changes 'part.lin.weight' of the module"):
        gas.to_scalable(net, random_graph())


def test_an_embedding_may_bound_its_norms():
    index = torch.zeros((), dtype=torch.long)
    net = net_of(
        lambda net, x, e: net.b(net.a(x, e) + net.emb(index), e),
        emb=nn.Embedding(5, 8, max_norm=0.1),
    )
    check(net, random_graph(), of_x)


def test_parameters_that_are_made_in_forward_are_refused():
    def make(net, x, edge_index):
        if net.made is None:
            net.made = nn.Linear(8, 8)
        return net.b(net.made(net.a(x, edge_index)), edge_index)

    net = net_of(make, made=None)
    with pytest.raises(ValueError, match=r"'made.weight' is made when .* make it in __init__"):
        gas.to_scalable(net, random_graph())


def test_modules_that_are_made_in_forward():
    check(net_of(lambda net, x, e: net.b(nn.ReLU()(net.a(x, e)), e)), random_graph(), of_x)
    net = net_of(lambda net, x, e: net.b(nn.Linear(8, 8)(net.a(x, e)), e))
    with pytest.raises(ValueError, match="calls a Linear that isn.t a part of the module"):
        gas.to_scalable(net, random_graph())


IN_ORDER, NAMESPACE = collections.OrderedDict(), types.SimpleNamespace(degree=None, nested={})
GENERATORS = [np.random.default_rng(0), random.Random(0), torch.Generator().manual_seed(0)]
RNG, PYTHON, TORCH = GENERATORS
COUNT = torch.zeros(1)


def degrees(x, edge_index):
    return degree(edge_index[1], x.size(0)).view(-1, 1)


def keep_in_order(net, x, edge_index):
    if "degree" not in IN_ORDER:
        IN_ORDER["degree"] = degrees(x, edge_index)
    return net.b(net.a(x, edge_index) * IN_ORDER["degree"], edge_index)


def keep_in_a_namespace(net, x, edge_index):
    if NAMESPACE.degree is None:
        NAMESPACE.degree = NAMESPACE.nested["degree"] = degrees(x, edge_index)
    return net.b(net.a(x, edge_index) * NAMESPACE.nested["degree"], edge_index)


def keep_in_an_attribute(net, x, edge_index):
    if net.kept.degree is None:
        net.kept.degree = degrees(x, edge_index)
    return net.b(net.a(x, edge_index) * net.kept.degree, edge_index)


@pytest.mark.parametrize("function", [keep_in_order, keep_in_a_namespace, keep_in_an_attribute])
def test_containers_of_a_file_are_restored(function):
    net, data = net_of(function, kept=types.SimpleNamespace(degree=None)).eval(), random_graph()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    found = model.eval().predict(graph, log=False)
    assert not IN_ORDER
    assert not NAMESPACE.nested
    assert NAMESPACE.degree is net.kept.degree is None
    torch.testing.assert_close(found, net(data.x, data.edge_index).detach())
    IN_ORDER.clear()
    NAMESPACE.degree = None
    NAMESPACE.nested.clear()


class OfAnotherKind(nn.Module, abc.ABC):
    """A model whose class has a metaclass."""

    kept = None

    def __init__(self):
        super().__init__()
        self.a, self.b = pyg.SAGEConv(5, 8), pyg.SAGEConv(8, 3)

    def forward(self, x, edge_index):
        if OfAnotherKind.kept is None:
            OfAnotherKind.kept = degrees(x, edge_index)
        return self.b(self.a(x, edge_index) * OfAnotherKind.kept, edge_index)


def test_classes_of_any_kind_are_restored():
    class Local(OfAnotherKind):
        mine = None

        def forward(self, x, edge_index):
            if Local.mine is None:
                Local.mine = degrees(x, edge_index)
            return self.b(self.a(x, edge_index) * Local.mine, edge_index)

    for kind in (OfAnotherKind, Local):
        gas.to_scalable(kind(), random_graph())
        assert OfAnotherKind.kept is None
    assert Local.mine is None


def keep_of_parameters(net, x, edge_index):
    if net.kept is None:
        net.kept = net.lin.weight.detach().mean()
    return net.b(net.a(x, edge_index) * net.kept, edge_index)


def test_values_that_are_kept_of_parameters_are_refused():
    net = net_of(keep_of_parameters, kept=None)
    with pytest.raises(ValueError, match="'kept' is computed in the first call, of 'lin.weight'"):
        gas.to_scalable(net, random_graph())


class Remembers(OfAnotherKind):
    @functools.lru_cache  # noqa: B019 (it keeps the model alive, as a user's would)
    def scale(self):
        return self.b.lin_l.weight.detach().mean()

    def forward(self, x, edge_index):
        return self.b(self.a(x, edge_index) * self.scale(), edge_index)


def test_functions_that_remember_are_called_anew():
    net, data = Remembers().eval(), random_graph()
    model = gas.to_scalable(net, data)
    assert Remembers.scale.cache_info().currsize == 0
    graph = gas.cluster(data, 4, model=model, log=False)
    with torch.no_grad():
        net.b.lin_l.weight.add_(1.0)
        expected = net(data.x, data.edge_index)
        torch.testing.assert_close(model.eval().predict(graph, log=False), expected)


def test_generators_and_tensors_of_a_file_are_restored():
    def draw(net, x, edge_index):
        COUNT.add_(RNG.random() + PYTHON.random() + torch.rand(1, generator=TORCH))
        return net.b(net.a(x, edge_index), edge_index)

    states = RNG.bit_generator.state, PYTHON.getstate(), TORCH.get_state()
    with pytest.raises(ValueError, match="random numbers"):
        gas.to_scalable(net_of(draw), random_graph())
    assert (RNG.bit_generator.state, PYTHON.getstate()) == states[:2]
    assert torch.equal(TORCH.get_state(), states[2])
    assert COUNT == 0


def skip_at_random(net, x, edge_index):
    h = net.a(x, edge_index)
    return net.b(h if net.training and RNG.random() < 0.05 else h * 2, edge_index)


def test_branches_by_a_generator_of_a_file_are_refused():
    for _ in range(5):
        with pytest.raises(ValueError, match="draws random numbers in a way"):
            gas.to_scalable(net_of(skip_at_random), random_graph())


def test_what_other_threads_define_stays():
    def convert():
        gas.to_scalable(net_of(keep_in_order), random_graph())

    thread = threading.Thread(target=convert)
    thread.start()
    names = []
    while thread.is_alive():
        names.append(f"defined_meanwhile_{len(names)}")
        globals()[names[-1]] = convert
        time.sleep(1e-4)  # Between others of the conversion's steps, which takes some 50 ms.
    assert all(globals().pop(name, None) for name in names)


def divide_by_the_first_size(net, x, edge_index):
    if "FIRST_SIZE" not in globals():
        globals()["FIRST_SIZE"] = x.size(0)
    return net.b(net.a(x, edge_index) / globals()["FIRST_SIZE"], edge_index)


def test_numbers_that_become_globals_are_no_part_of_the_model():
    """Nor of the module, whose own graph has another size than the small ones."""
    with pytest.raises(ValueError, match="isn't exact on mini-batches"):
        gas.to_scalable(net_of(divide_by_the_first_size), random_graph())
    assert "FIRST_SIZE" not in globals()


def test_a_file_without_a_path_has_no_files_beside_it(monkeypatch):
    """Not those of PyTorch, whose generator draws for dropout."""
    monkeypatch.delitem(globals(), "__file__")

    def drop(net, x, edge_index):
        h = F.dropout(net.a(x, edge_index), training=net.training)
        return net.b(h, edge_index)

    gas.to_scalable(net_of(drop), random_graph())


KEPT: torch.Tensor | None = None


class KeepsGlobally(OfAnotherKind):
    """A model with methods that set a global, of which a decorator hides the code."""

    @torch.no_grad()
    def decorated(self, x, edge_index):
        global KEPT
        if KEPT is None:
            KEPT = degrees(x, edge_index)
        return KEPT

    @staticmethod
    def static(x, edge_index):
        if "MADE_IN_FORWARD" not in globals():
            globals()["MADE_IN_FORWARD"] = degrees(x, edge_index)
        return globals()["MADE_IN_FORWARD"]

    def forward(self, x, edge_index):
        scale = self.decorated(x, edge_index) + self.static(x, edge_index)
        return self.b(self.a(x, edge_index) * scale, edge_index)


def test_globals_that_any_method_sets_are_restored():
    gas.to_scalable(KeepsGlobally(), random_graph())
    assert KEPT is None
    assert "MADE_IN_FORWARD" not in globals()


@functools.lru_cache
def table():
    return torch.randn(8)


def test_functions_of_a_file_keep_what_they_remember():
    before = table()
    check(net_of(lambda net, x, e: net.b(net.a(x, e) * table(), e)), random_graph(), of_x)
    assert table() is before


class Frozen(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")


class NoCopy(list):
    def __copy__(self):
        raise TypeError("can't be copied")


FROZEN, NO_COPY, DEEP = Frozen(a=1), NoCopy([1, 2]), []
for _ in range(3000):
    DEEP = [DEEP]


def test_other_globals_are_left_alone():
    check(net_of(lambda net, x, e: net.b(net.a(x, e), e)), random_graph(), of_x)


def test_changes_by_a_method_of_a_part_are_refused():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def clamp(self, h):
            with torch.no_grad():
                torch._foreach_clamp_max_([self.lin.weight], 100.0)
            return self.lin(h)

    net = net_of(lambda net, x, e: net.b(net.part.clamp(net.a(x, e)), e), part=Part())
    with pytest.raises(ValueError, match=r"' in forward changes 'part.lin.weight' of the module"):
        gas.to_scalable(net, random_graph())


def test_keyword_parameters_are_no_global_graph(monkeypatch):
    class Net(OfAnotherKind):
        def forward(self, *, x, edge_index):
            return self.b(self.a(x.data, edge_index), edge_index)

    monkeypatch.setitem(globals(), "data", random_graph())
    gas.to_scalable(Net(), random_graph())
