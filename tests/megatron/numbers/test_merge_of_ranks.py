"""Merging rows over ranks."""

from __future__ import annotations

import time

import numpy as np
import torch.distributed as dist
from forkpool import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from log_lines import heard

from msprobe_engine.core.statistics import histograms, host_kernel
from msprobe_engine.core.statistics import rows as R
from msprobe_engine.core.statistics.digest import digest_array
from msprobe_integrations.torch.ranks.merge import MergeFailed, RowExchange


def row_of(data: np.ndarray, index0: int) -> np.ndarray:
    row = R.empty(1)
    ints = R.as_int64(row)
    if data.size:
        finite = data[np.isfinite(data)].astype(np.float64)
        ints[0, R.COUNT] = data.size
        ints[0, R.NANS] = np.isnan(data).sum()
        ints[0, R.POS_INF] = (data == np.inf).sum()
        ints[0, R.NEG_INF] = (data == -np.inf).sum()
        ints[0, R.ZEROS] = (data == 0).sum()
        row.view(np.uint64)[0, R.DIGEST] = digest_array(data, index0)
        row[0, R.MIN] = finite.min(initial=np.inf)
        row[0, R.MAX] = finite.max(initial=-np.inf)
        row[0, R.SUM] = finite.sum()
        row[0, R.SUMSQ] = (finite**2).sum()
        ints[0, R.FLAGS] = R.HAS_DIGEST | R.WRITTEN
    return row[0]


def merged(whole: np.ndarray, cuts: list[int], step_of_rank: list[int], patience: float) -> tuple[np.ndarray, str, dict]:
    rank = dist.get_rank()
    bounds = [0, *cuts, len(whole)]
    exchange = RowExchange(None, patience=patience)
    rows = np.stack([row_of(whole[bounds[rank] : bounds[rank + 1]], bounds[rank]), row_of(whole[:0], 0)])
    extra: dict = {"scope": "whole"}
    edit = exchange.merge(step_of_rank[rank], ["a", "b"], [0, 1], [extra])
    edit.start(rows)
    edit.wait(5)
    error = ""
    try:
        edit.apply(rows)
    except MergeFailed as e:
        error = str(e)
    return rows, error, extra


def test_merged_rows_are_those_of_the_whole() -> None:
    """The merge of shard rows over the ranks equals the row of the whole tensor, digest included."""
    whole = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    whole[[3, 500, 700]] = [np.nan, np.inf, 0]
    for rows, error, _ in run_ranks(3, merged, whole, [400, 400], [7, 7, 7], 30.0):
        assert error == ""
        expected = row_of(whole, 0)
        assert rows[0].view(np.int64)[:6].tolist() == expected.view(np.int64)[:6].tolist()
        np.testing.assert_allclose(rows[0][[R.MIN, R.MAX, R.SUM, R.SUMSQ]], expected[[R.MIN, R.MAX, R.SUM, R.SUMSQ]], rtol=1e-13)
        assert R.read_row(rows[1]).count == 0


def _with_more_words(whole: np.ndarray, cut: int) -> np.ndarray:
    part = whole[:cut] if dist.get_rank() == 0 else whole[cut:]
    want = host_kernel.WANT_MOMENTS | host_kernel.want_below(0.5, as_zeros=True)
    rows = R.empty(3)
    for row, (data, what) in enumerate(((part, want), (part, host_kernel.WANT_CRC), (part[:0] if dist.get_rank() else whole, want))):
        host_kernel.reduce(data.ctypes.data, data.size, 0, rows[row].ctypes.data, what, 0)
    counts = histograms.to_rows(histograms.count_values(part, "log2"), part.size)
    rows = np.concatenate([rows, counts])
    exchange = RowExchange(None)
    edit = exchange.merge(7, [str(row) for row in range(len(rows))], range(len(rows)))
    edit.start(rows)
    edit.wait(10)
    edit.apply(rows)
    return rows


def test_words_that_only_some_rows_have() -> None:
    """Moments, counts below a limit and histograms merge to those of the whole, also with an empty shard;
    a row with a checksum loses it."""
    whole = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    whole[[3, 500]] = [np.nan, 0]
    want = host_kernel.WANT_MOMENTS | host_kernel.want_below(0.5, as_zeros=True)
    expected = R.empty(1)
    host_kernel.reduce_into(expected, 0, whole)
    flags = R.WRITTEN | R.HAS_MOMENTS | R.HAS_BELOW | R.HAS_EPS
    host_kernel.reduce(whole.ctypes.data, 1000, 0, expected.ctypes.data, want, 0)
    for rows in run_ranks(2, _with_more_words, whole, 300):
        ints = R.as_int64(rows)
        for row in (0, 2):
            assert ints[row, R.FLAGS] == flags
            assert ints[row, R.BELOW] == R.as_int64(expected)[0, R.BELOW]
            np.testing.assert_allclose(rows[row, [R.SUM3, R.SUM4]], expected[0, [R.SUM3, R.SUM4]], rtol=1e-11)
        assert ints[1, R.FLAGS] == R.WRITTEN
        assert ints[1, 13:].tolist() == [0, 0, 0]
        assert histograms.counts(rows, 3, "log2").tolist() == histograms.count_values(whole, "log2").tolist()


def _apart() -> tuple[dict[int, str], list[str]]:
    rank = dist.get_rank()
    said = heard()
    exchange = RowExchange(None)
    scopes: dict[int, str] = {}
    edits = []
    # rank 0 has no step 5; of step 3 and 7 the ranks have different contents
    for step in (1, 3, 4, 5, 6, 7, 8):
        extra = {"scope": "whole"}
        names = ["a", "b", "c"][: 1 + 2 * rank if step == 3 else 2]
        names[0] = f"a{rank}" if step == 7 else "a"
        rows = R.empty(len(names))
        if step == 5 and rank == 0:
            scopes[5] = "unknown"
            continue
        edit = exchange.merge(step, names, range(len(names)), [extra])
        edit.start(rows)
        edits.append((step, edit, rows, extra))
    for step, edit, rows, extra in edits:
        edit.wait(10)
        edit.apply(rows)
        scopes[step] = extra["scope"]
    dist.barrier()
    exchange.close()
    return dict(sorted(scopes.items())), said


def test_rows_of_different_steps_are_not_mixed() -> None:
    """What not all ranks have (another step, or other contents or another number of rows of the same step) is left out and its scope
    is unknown; said once. The steps that all have are merged, those after it too."""
    for found, said in run_ranks(2, _apart):
        assert found == {1: "whole", 3: "unknown", 4: "whole", 5: "unknown", 6: "whole", 7: "unknown", 8: "whole"}
        assert len(said) == 1
        assert "do not all have the same rows" in said[0]


def _one_sided() -> list[str]:
    exchange = RowExchange(None)
    exchange._patience = 0.5
    said = heard()
    if dist.get_rank() == 0:
        for step in range(3):
            edit = exchange.merge(step, ["a"], [0])
            rows = R.empty(1)
            edit.start(rows)
            edit.wait(3)
            assert edit.ready()
            edit.apply(rows)
        errors = []
        for step in range(3, 70):
            edit = exchange.merge(step, ["a"], [0])
            edit.start(rows)
            try:
                edit.apply(rows)
            except MergeFailed as error:
                errors.append(str(error))
        assert len(errors) == 1
        assert "in 64 steps" in errors[0]
    dist.barrier()
    exchange.close()
    return said


def test_a_rank_that_is_off_costs_a_message_and_no_hang() -> None:
    """When a rank of the group does not send, the others say so once after the patience and go on without these rows, and without a wait
    from then on; after many steps they give it up."""
    said, _ = run_ranks(2, _one_sided, timeout=50)
    assert len(said) == 1
    assert "its probe is off" in said[0]


def _late() -> list[str]:
    rank = dist.get_rank()
    exchange = RowExchange(None)
    extras: list[dict] = [{"scope": "whole"} for _ in range(3)]
    edits = [exchange.merge(step, ["a"], [0], [extra]) for step, extra in enumerate(extras)]
    rows = R.empty(1)
    for step, edit in enumerate(edits):
        if step == 1 and rank:
            time.sleep(1)
        alone = step == 1 and rank == 0
        exchange._patience = 0.1 if alone else 60
        edit.start(rows)
        if alone:
            edit.wait(5)
            edit.apply(rows)
            exchange._patience = 60
        elif step == 0:
            edit.wait(10)
        if step == 1:
            dist.barrier()
    for step, edit in enumerate(edits):
        if step != 1 or rank:
            edit.wait(10)
            edit.apply(rows)
    return [extra["scope"] for extra in extras]


def test_a_rank_that_comes_late_is_waited_for_again() -> None:
    """One that is away for longer than the patience (it writes a checkpoint) costs the others the merge of that step, no later one."""
    first, second = run_ranks(2, _late, timeout=50)
    assert first == ["whole", "unknown", "whole"]
    assert second == ["whole", "whole", "whole"]


def _left_alone() -> bool:
    exchange = RowExchange(None)
    if dist.get_rank() == 0:
        edit = exchange.merge(0, ["a"], [0])
        edit.start(R.empty(1))
        del edit
        exchange.close()  # the other rank waits for this one
    dist.barrier()
    exchange.close()
    return True


def test_closing_does_not_wait_for_a_rank_that_never_answers() -> None:
    """An exchange that the other rank takes no part in is let go."""
    assert run_ranks(2, _left_alone, timeout=50) == [True, True]


@given(st.lists(st.floats(width=32), max_size=50), st.data())
def test_merge_of_any_cut_is_exact_in_counts(values: list[float], data: st.DataObject) -> None:
    """Wherever a tensor is cut, counts, bounds and digest of the merged rows are those of the whole."""
    whole = np.asarray(values, np.float32)
    cut = data.draw(st.integers(0, len(values)))
    both = R.merge(row_of(whole[:cut], 0)[None], row_of(whole[cut:], cut)[None])[0]
    expected = row_of(whole, 0)
    assert both.view(np.int64)[:6].tolist() == expected.view(np.int64)[:6].tolist()
    assert (both[R.MIN], both[R.MAX]) == (expected[R.MIN], expected[R.MAX])
