"""Tables of predictions: read, and compared."""

import numpy as np


def read_parquet(path):
    from pyarrow import parquet

    return parquet.read_table(path).to_pydict()


def compare(found, expected):
    assert list(found) == list(expected)
    for name, values in expected.items():
        if name == "probability":
            np.testing.assert_allclose(found[name], values, rtol=1e-5)
        else:
            assert list(found[name]) == list(values), name
