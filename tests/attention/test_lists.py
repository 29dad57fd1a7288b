"""Lists of the blocks of scores that are visible, and spans of the keys that queries see: what is in them, by running
the text of their kernels on the CPU.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from checking.attention import problems
from checking.attention.calls import MASKED, arrays
from checking.emulation.plans import Emulated
from jaxdnn.engines.attention.lists import block_lists
from jaxdnn.engines.unit import includes
from jaxdnn.plan import Plan, Result, Scratch

NONE, SOME, SPANNED, ALL = range(4)  # of a block; attention/lists.cuh
# By blocks of queries and keys.
WANTED = {
    "by query": (64, 48, {}),
    "by key, ranked": (64, 48, {"by_key": True, "ranked": True}),
    "spanned": (64, 48, {"spanned": True}),
    "spanned, words of keys": (192, 32, {"spanned": True}),
}


@pytest.fixture(scope="module")
def listing(tmp_path_factory):
    """The kernels that write lists, by themselves: what is scratch memory of a plan are their results."""
    plans = []
    for name, (queries, keys, wanted) in product(MASKED, WANTED.values()):
        lists = block_lists(MASKED[name].problem, queries, keys, **wanted)
        stage = lists.stage(0)
        launches = tuple(
            replace(launch, arguments=tuple(Result(a.index) if isinstance(a, Scratch) else a for a in launch.arguments))
            for launch in stage.launches
        )
        unit = includes(stage.headers) + lists.function.text() + stage.text
        plans.append((lists, Plan(unit, "sm_90a", launches), stage.scratch))
    return plans, Emulated([plan for _, plan, _ in plans], tmp_path_factory.mktemp("lists"))


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("name", MASKED)
def test_lists_have_what_is_visible(name, wanted, listing):
    one, number = MASKED[name], [*product(MASKED, WANTED)].index((name, wanted))
    queries, keys, _ = WANTED[wanted]
    plans, emulated = listing
    lists, _, (seen, written, *beside) = plans[number]
    operands = arrays(one)
    run = problems.Run(one.problem, operands, [])
    visible = run.visible()
    found = [
        np.zeros(seen, "uint8"),
        np.zeros(written // 4, "int32"),
        *(np.zeros(size // 4, "int32") for size in beside),
    ]
    emulated.run(number, operands, found)

    b, n, t = one.problem.batch, one.problem.query_heads, one.problem.query_length
    visible = visible.reshape(b, n, t, -1)[: b if lists.by_element else 1, : n if lists.by_head else 1]
    lengths = np.full((b, n), t)
    if one.problem.mask.query_lengths is not None:
        lengths = run.load(one.problem.mask.query_lengths)[:, 0, 0].reshape(b, n)
    some, every = (np.zeros((*visible.shape[:2], *lists.blocks), bool) for _ in range(2))
    for at in np.ndindex(some.shape):
        block = visible[at[:2]][queries * at[2] : lengths[at[:2]]][:queries, keys * at[3] :][:, :keys]
        some[at], every[at] = block.any(), block.size > 0 and block.shape[1] == keys and block.all()
    got = found[0].reshape(some.shape)
    assert not np.any(some & (got == NONE)), "a block that is visible is left out"
    assert not np.any(~every & (got == ALL)), "a block that is not wholly visible is said to be"
    # Extremes of segments and positions leave some open.
    exact = np.mean(np.where(got == SPANNED, SOME, got) == np.where(every, ALL, np.where(some, SOME, NONE)))
    assert exact == 1 if one.problem.mask.program is not None else exact > 0.8
    of_each = lists.blocks[not lists.by_key]
    states = (np.swapaxes(got, 2, 3) if lists.by_key else got).reshape(-1, of_each)
    for line, of_line in zip(found[1].reshape(-1, 1 + of_each), states, strict=True):
        wanted = [4 * i + ALL - int(of_line[i]) for i in reversed(range(of_each)) if of_line[i] != NONE]
        assert [line[0], *line[1 : 1 + line[0]]] == [len(wanted), *wanted]
    if lists.ranked:
        before = np.cumsum(got != NONE, -1) - (got != NONE)
        np.testing.assert_array_equal(found[2].reshape(np.swapaxes(got, 2, 3).shape), np.swapaxes(before, 2, 3))
    if lists.spanned:
        assert np.any(got == SPANNED) or name not in ("documents", "segments")
        check_spans(visible, lengths, got, found[2].reshape(*visible.shape[:3], 2), queries)


def check_spans(visible, lengths, got, spans, queries):
    """Spans are of blocks of queries each of which sees all keys between two that it sees."""
    keys = np.arange(visible.shape[-1])
    for at in np.ndindex(got.shape[:3]):
        rows = slice(queries * at[2], queries * (at[2] + 1))
        seen, within = visible[at[:2]][rows], spans[at[:2]][rows]
        seen = seen & (np.arange(*rows.indices(visible.shape[2])) < lengths[at[:2]])[:, None]
        first = np.where(seen.any(-1), seen.argmax(-1), 0)
        end = np.where(seen.any(-1), len(keys) - seen[:, ::-1].argmax(-1), 0)
        neighbours = np.array_equal(seen.sum(-1), end - first)
        assert not np.any(got[at] == (SOME if neighbours else SPANNED))
        if neighbours:
            np.testing.assert_array_equal(within, np.stack([first, end], -1))
        hidden = seen & ((keys < within[:, :1]) | (keys >= within[:, 1:]))
        assert not hidden.any(), "a span leaves out what a query sees"
