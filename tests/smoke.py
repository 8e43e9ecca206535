"""Train for a few steps with the gas that is installed, such as a wheel's.

Usage: ``python -I tests/smoke.py``. With ``-I``, Python doesn't find the sources of a checkout.
"""

import tempfile
import warnings

import torch

with warnings.catch_warnings():
    # The extension is missing, or has loaded a second OpenMP runtime.
    warnings.simplefilter("error", RuntimeWarning)
    import gas


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root:
        data, in_channels, out_channels = gas.get_data(root, "planted:1000")
    model = gas.models.GraphSAGE(data.num_nodes, in_channels, 32, out_channels, num_layers=2)
    graph = gas.cluster(data, num_parts=8, model=model, log=False, cache=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = gas.fit(model, graph, optimizer, epochs=5, batch_size=2, log=False)
    first, last = run.loss[0], run.loss[-1]
    assert last < first, run.loss
    assert model.predict(graph).shape == (data.num_nodes, out_channels)
    assert gas.verify(model, graph)
    print(f"gas {gas.__version__}, PyTorch {torch.__version__}: loss {first:.2f}, then {last:.2f}")


if __name__ == "__main__":
    main()
