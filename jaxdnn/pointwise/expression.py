"""C++ expressions, in parentheses only where an operator asks for them."""

from collections.abc import Sequence
from dataclasses import dataclass

# How tightly the outermost operator of an expression binds. The first is C++'s many levels below comparisons.
OTHER, COMPARISON, SUM, PRODUCT, UNARY, PRIMARY = range(6)

# Of an operator: how tightly it binds, and how tightly its arguments must. A sum on the right of a sum keeps its
# parentheses, since floats are not associative.
_OPERATORS = {
    "?": (OTHER, (COMPARISON, PRIMARY, PRIMARY)),
    **dict.fromkeys(("&", "|", "^"), (OTHER, (SUM, SUM))),
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), (COMPARISON, (SUM, SUM))),
    **dict.fromkeys(("+", "-"), (SUM, (SUM, PRODUCT))),
    "*": (PRODUCT, (PRODUCT, UNARY)),
}
_NEGATION = (UNARY, (PRIMARY,))
_CALL = (PRIMARY, (OTHER, OTHER, OTHER))


@dataclass(frozen=True)
class Expression:
    """A value, as C++.

    Attributes:
      text: the expression.
      binds: how tightly its outermost operator does.
      leaf: whether it is a name or a literal.
    """

    text: str
    binds: int = PRIMARY
    leaf: bool = False


def composed(template: str, arguments: Sequence[Expression]) -> Expression:
    """A template of one operation, as in `operations.TABLE`, with its arguments in place."""
    match template.split(" "):
        case [single]:
            binds, wanted = _NEGATION if single.startswith("-") else _CALL
        case ["{0}", operator, *_]:
            binds, wanted = _OPERATORS[operator]
        case _:
            binds, wanted = _CALL
    texts = (one.text if one.binds >= least else f"({one.text})" for one, least in zip(arguments, wanted, strict=False))
    return Expression(template.format(*texts), binds)
