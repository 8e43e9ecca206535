"""Entries of compressed rows found, added and taken out, against sorting anew."""

import pytest
import torch

from gas.graph.links import (
    entry_rows,
    find_changed_rows,
    find_entries,
    first_entry,
    has_entry,
    insert_entries,
    remove_entries,
)
from gas.native.graph import coo_to_csr


def random_rows(num_rows=12, num_cols=9, num_entries=60, dtype=torch.int64):
    row, col = torch.randint(num_rows, (num_entries,)), torch.randint(num_cols, (num_entries,))
    return row, col, *coo_to_csr(row, col, num_rows, dtype)


@pytest.mark.parametrize("num_entries", [0, 1, 60])
def test_entries_are_found(num_entries):
    row, col, rowptr, sorted_col, _ = random_rows(num_entries=num_entries)
    rows, cols = torch.cartesian_prod(torch.arange(12), torch.arange(9)).t()
    pairs = list(zip(row.tolist(), col.tolist(), strict=True))
    every = list(zip(rows.tolist(), cols.tolist(), strict=True))
    assert has_entry(rowptr, sorted_col, rows, cols).tolist() == [p in pairs for p in every]
    for after in (False, True):
        expected = [
            int(rowptr[r]) + sum(v <= c if after else v < c for q, v in pairs if q == r)
            for r, c in every
        ]
        assert first_entry(rowptr, sorted_col, rows, cols, after).tolist() == expected
    if num_entries:
        some = torch.tensor([0, 5, 50, 107])
        found = find_entries(rowptr, sorted_col, rows[some], cols[some])
        wanted = [every[n] for n in some.tolist()]
        rows_there = entry_rows(rowptr, torch.arange(num_entries)).tolist()
        entries = zip(rows_there, sorted_col.tolist(), strict=True)
        number = {}
        for k, pair in enumerate(entries):
            number.setdefault(pair, []).append(k)
        expected = [k for pair in wanted for k in number.get(pair, [])]
        assert found.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_old", "num_new"), [(60, 20), (0, 5), (60, 0), (0, 0), (1, 1)])
def test_entries_are_added_as_if_sorted_anew(num_old, num_new, dtype):
    row, col, rowptr, sorted_col, perm = random_rows(num_entries=num_old, dtype=dtype)
    new_row, new_col = torch.randint(15, (num_new,)), torch.randint(9, (num_new,))
    found = insert_entries(rowptr, sorted_col, new_row, new_col, 15)
    both = coo_to_csr(torch.cat([row, new_row]), torch.cat([col, new_col]), 15, dtype)
    assert torch.equal(found[0], both[0])
    assert torch.equal(found[1], both[1])
    assert found[1].dtype == dtype
    # Equal entries keep their order: those that were there come first, as they were.
    source = torch.cat([perm.long(), num_old + torch.arange(num_new)])[found[2]]
    assert torch.equal(source, both[2].long())


def test_entries_are_taken_out_as_if_never_there():
    row, col, rowptr, sorted_col, perm = random_rows()
    entry = torch.tensor([3, 59, 0, 17, 3])
    fewer, left, kept = remove_entries(rowptr, sorted_col, entry)
    stay = torch.ones(60, dtype=torch.bool)
    stay[perm[entry]] = False
    expected = coo_to_csr(row[stay], col[stay], 12)
    assert torch.equal(fewer, expected[0])
    assert torch.equal(left, expected[1])
    assert torch.equal(kept, torch.tensor([k for k in range(60) if k not in entry.tolist()]))


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_that_differ_are_found(weighted):
    _, _, rowptr, col, _ = random_rows()
    weight = torch.rand(60) if weighted else None
    later, cols, source = insert_entries(
        rowptr, col, torch.tensor([2, 13]), torch.tensor([4, 1]), 14
    )
    weights = None if weight is None else torch.cat([weight, torch.ones(2)])[source]
    expected = {2, 12, 13}
    if weights is not None:
        weights[int(later[7])] += 1
        expected |= {int(torch.searchsorted(later, later[7], right=True)) - 1}
    values, after = (
        ([weight, weight[:, None]], [weights, weights[:, None]]) if weighted else ([], [])
    )
    same = int(later[5])  # Another column, as many entries.
    cols[same] = 8 - cols[same] if cols[same] != 4 else 0
    expected |= {int(torch.searchsorted(later, same, right=True)) - 1}
    assert set(find_changed_rows((rowptr, col, values), (later, cols, after)).tolist()) == expected
    assert find_changed_rows((rowptr, col, values), (rowptr, col, values)).numel() == 0
