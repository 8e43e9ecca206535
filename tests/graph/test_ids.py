"""``Ids``: rows of nodes by their ids."""

import numpy as np
import pytest

from gas.graph import Ids


def test_rows_of_ids():
    assert Ids(None, 3).rows(np.array([2, 3, -1, 0])).tolist() == [2, -1, -1, 0]
    assert Ids(None, 3).rows(np.array(["2"])).tolist() == [-1]
    numbers = Ids(np.array([7, -5, 30]), 3)
    assert numbers.rows(np.array([30, 7, 8, -5])).tolist() == [2, 0, -1, 1]
    assert numbers.rows(np.array([-6, 31])).tolist() == [-1, -1]
    assert numbers.rows(np.array(["30", "x", "07", "-5", "9" * 30])).tolist() == [2, -1, -1, 1, -1]
    words = Ids(np.array(["b", "ä", "007", "a"]), 4)
    assert words.rows(np.array(["a", "ä", "b", "bb", ""])).tolist() == [3, 1, 0, -1, -1]
    assert words.rows(np.array([7])).tolist() == [-1]
    assert Ids(np.array([], np.int64), 0).rows(np.array([1])).tolist() == [-1]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_unsigned_ids_are_found_as_signed_ones_are(dtype):
    asked = np.array([1, 9, 0], dtype)
    assert Ids(None, 4).rows(asked).tolist() == [1, -1, 0]
    assert Ids(np.array([9, 1]), 2).rows(asked).tolist() == [1, 0, -1]
    assert Ids(np.array([9, 1], dtype), 2).rows(asked).tolist() == [1, 0, -1]


def test_large_unsigned_ids_are_not_rounded():
    known = 2**60 + np.arange(6)
    assert Ids(known, 6).rows(known.astype(np.uint64)).tolist() == [0, 1, 2, 3, 4, 5]
    beyond = np.array([2**64 - 1, 2**63], np.uint64)
    assert Ids(np.array([-1, 5]), 2).rows(beyond).tolist() == [-1, -1]
    assert Ids(beyond, 2).rows(beyond).tolist() == [0, 1]
