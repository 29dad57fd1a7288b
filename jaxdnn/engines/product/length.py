"""How long the compiler takes for an epilogue of a kernel that has it for each element of a fragment."""

from jaxdnn.pointwise import Program

# Seconds that ptxas takes for an operation on each element of 128 x 256.
LENGTHS = {
    **dict.fromkeys(("sin", "cos", "tan"), 2.4),
    **dict.fromkeys(("rem", "pow"), 1.6),
    **dict.fromkeys(("atan2", "asinh", "acosh", "atanh"), 0.8),
    **dict.fromkeys(("log", "log1p", "expm1", "sinh", "cosh", "erf", "erfc", "asin", "acos", "atan"), 0.3),
    **dict.fromkeys(("exp", "tanh", "logistic", "div", "sqrt", "cbrt"), 0.15),
}
LONGEST = 0.9  # of them together, for one and a half with all the rest


def is_long(program: Program) -> bool:
    """Whether an epilogue takes ptxas too long, if its code stands there for each element of a tile."""
    return sum(LENGTHS.get(operation, 0) for operation in program.operations) > LONGEST
