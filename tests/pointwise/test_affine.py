"""Where the elements of operands lie, if a coordinate joins dimensions of which they have some; and tables."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checking.pointwise.layouts import array
from checking.pointwise.loads import LOADS
from checking.pointwise.runs import Emitted, run_host
from checking.pointwise.tolerance import check
from jaxdnn.pointwise import Term, UnsupportedOperation, collapse, trace
from jaxdnn.pointwise.program import merged_terms

# ------------------------------------------------------------ terms


def offset(terms: tuple[Term, ...], coordinate: int) -> int:
    return sum(coordinate // t.divisor % (t.modulus or 1 << 62) * t.stride for t in terms)


@pytest.mark.parametrize("sizes", [(), (1,), (5,), (2, 3), (3, 1, 2), (2, 3, 4), (1, 2, 1, 3), (2, 2, 2, 2)])
def test_terms_say_where_each_element_lies(sizes):
    """For all orders of the operand's dimensions, and all choices of those that it has."""
    for order in itertools.permutations(range(len(sizes))):
        for had in itertools.product((False, True), repeat=len(sizes)):
            kept = [d for d in order if had[d]]
            steps = {d: int(np.prod([sizes[e] for e in kept[i + 1 :]], dtype=int)) for i, d in enumerate(kept)}
            strides = [steps.get(d, 0) for d in range(len(sizes))]
            terms = merged_terms(sizes, strides)
            for coordinate, place in enumerate(np.ndindex(*sizes)):
                assert offset(terms, coordinate) == np.dot(place, strides).astype(int)
            assert len(terms) <= sum(size != 1 for size, has in zip(sizes, had, strict=True) if has)
            assert sum(term.plain for term in terms) == 0 or len(terms) == 1


def test_terms_are_as_few_as_can_be():
    assert merged_terms((2, 3, 4), (12, 4, 1)) == (Term(1),)
    assert merged_terms((2, 3, 4), (0, 4, 1)) == (Term(1, 1, 12),)  # a bias that a batch shares
    assert merged_terms((2, 3, 4), (3, 1, 0)) == (Term(1, 4),)  # one for each pair of the outer dimensions
    assert merged_terms((2, 3, 4), (0, 1, 0)) == (Term(1, 4, 3),)  # channels of NCHW
    assert merged_terms((2, 3, 4), (4, 0, 1)) == (Term(4, 12), Term(1, 1, 4))  # a gate, [N, 1, C]
    assert merged_terms((2, 1, 3), (1, 5, 2)) == (Term(1, 3), Term(2, 1, 3))  # transposed
    assert merged_terms((2, 3), (0, 0)) == merged_terms((1, 1), (1, 1)) == ()


# ------------------------------------------------------------ the host's interpreter and the emitted source


@pytest.fixture(scope="module")
def emitted(tmp_path_factory) -> Emitted:
    return Emitted(list(LOADS.values()), tmp_path_factory.mktemp("affine") / "unit")


@pytest.mark.parametrize("name", LOADS)
def test_loads(name, emitted):
    check(LOADS[name], host=run_host(LOADS[name]), emitted=emitted.run(list(LOADS).index(name)))


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("function", "operand", "reason"),
    [
        (lambda acc, t: acc + jax.lax.dynamic_slice(t, (1,), (5,)), "float32[9]", "it takes 5 of 9 elements"),
        (lambda acc, t: acc + jnp.concatenate([t, t])[: acc.shape[-1]], "float32[5]", "slice"),
        (lambda acc, t: acc + jnp.concatenate([t, t]), "float32[2,5]", "it joins arrays"),
        (lambda acc, t: acc + jnp.arange(9.0)[t], "int32[5]", "its dtype|indexed as a table"),
        (lambda acc, t: acc + jnp.take(t, acc.astype("int32")), "float32[3,3]", "reshape"),
        (lambda acc, t: acc + acc[t], "int32[4]", "elements of the accumulator from other places"),
    ],
)
def test_refused(function, operand, reason):
    like = array(operand, "")
    with pytest.raises(UnsupportedOperation, match=reason):
        trace(function, (4, 5), ["float32"], [like])


def test_programs_do_not_depend_on_sizes():
    """What only counts elements is in the collapsed loads' numbers."""

    def terms(batch: int, heads: int) -> Any:
        shape, operand = (batch, heads, 5, 7), (1, heads, 5, 7)
        program = trace(lambda acc, b: acc + b, shape, ["float32"], [jax.ShapeDtypeStruct(operand, "float32")])
        collapsed = collapse(program, shape, [operand], (2, 1, 1))
        assert not isinstance(collapsed, str)
        return program, [[(t.divisor > 1, bool(t.modulus)) for t in one] for one in collapsed.affine_loads[0].terms]

    assert terms(3, 4) == terms(5, 9)
