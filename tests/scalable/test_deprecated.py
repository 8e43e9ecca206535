"""Names that a model had before: functions do the same now."""

import pytest
import torch

import gas


@pytest.mark.parametrize("name", ["moved_bytes", "idle_bytes", "is_packed"])
def test_former_properties_warn_and_give_what_functions_give(name):
    model = gas.ScalableGNN(4, 2, 2)
    model.histories[0].push(torch.ones(4, 2))
    with pytest.warns(DeprecationWarning, match=rf"use gas\.scalable\.{name}"):
        former = getattr(model, name)
    assert former == getattr(gas.scalable, name)(model)
    model.close()


def test_former_methods_warn_and_do_the_same():
    model = gas.ScalableGNN(4, 2, 2)
    with pytest.warns(DeprecationWarning, match="without_histories goes away"):
        context = model.without_histories()
    with context:
        assert model.io == "none"
    assert model.io == "concurrent"
    with pytest.warns(DeprecationWarning, match=r"use model\.histories"):
        assert model.emb_device == torch.device("cpu")
    with pytest.warns(DeprecationWarning, match="has_forward_layer"):
        assert not model.has_forward_layer
    model.close()
