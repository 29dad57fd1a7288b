"""The table of mistakes says what is there: else it would rot as the code changes."""

import ast

import pytest

from checking.mutants.table import ROOT, drawn, load

TABLE = load()


@pytest.mark.parametrize("mutant", TABLE, ids=lambda one: one.name)
def test_a_mistake_can_be_made(mutant):
    text = mutant.applied(ROOT)
    assert mutant.before != mutant.after
    assert mutant.note
    assert mutant.tests
    if mutant.file.endswith(".py"):
        ast.parse(text)
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), f"there is no {path}"
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), f"{path} has no {name}"


def test_the_tests_of_mistakes_are_there(request):
    """With their parameters, which only pytest knows."""
    named = {test for mutant in TABLE for test in mutant.tests}
    collected = {item.nodeid for item in request.session.items}
    collected |= {test.partition("[")[0] for test in collected} | {test.partition("::")[0] for test in collected}
    if request.config.option.keyword or not {test.partition("::")[0] for test in named} <= collected:
        pytest.skip("this run is not of all tests")
    assert not named - collected


def test_names_are_unique():
    assert len({one.name for one in TABLE}) == len(TABLE)


def test_a_draw_is_what_the_seed_says():
    one, again, other = (drawn(TABLE, 8, seed) for seed in ("a", "a", "b"))
    assert one == again != other
    assert len(set(one)) == 8


def test_a_draw_is_of_what_should_be_caught_and_is_built_seldom():
    draws = [drawn(TABLE, 10, str(seed)) for seed in range(50)]
    assert not any(mutant.survives for draw in draws for mutant in draw)
    assert {sum(mutant.is_native for mutant in draw) for draw in draws} == {0, 1, 2}
    assert {mutant.layer for draw in draws for mutant in draw} == {mutant.layer for mutant in TABLE}
