"""The rows of the products: what is interesting of shapes, batches, dimension numbers, dtypes and epilogues."""

from typing import Any

from jax.sharding import PartitionSpec as P

from checking.cases.base import Rows, Split
from checking.cases.dtypes import BF16, E4M3, E5M2, F16, F32, F64, I8, I32
from checking.cases.matmul import MatmulCase, product


def _every() -> list[MatmulCase]:
    def dot(a: Any, b: Any, numbers: Any, *dtypes: str, **fields: Any) -> MatmulCase:
        return product(a, b, *dtypes, **fields).replace(kind="dot_general", numbers=numbers)

    def gated(a: Any, b: Any, *dtypes: str, **fields: Any) -> MatmulCase:
        return product(a, b, *dtypes, **fields).replace(kind="gated_linear_unit")

    def row(n: int, dtype: str = F32) -> Any:
        return ((n,), dtype)

    scalar = ((), F32)
    nn = ((1,), (0,))
    none = ((), ())
    return [
        # shapes: vectors, one of everything, no tile multiple, skinny both ways, several tiles
        product((8,), (8,)),
        product((7,), (7, 5)),
        product((5, 7), (7,)),
        product((1, 1), (1, 1)),
        product((3, 5), (5, 2)),
        product((33, 65), (65, 17)),
        product((128, 64), (64, 256), BF16),
        product((130, 70), (70, 140), BF16),
        product((257, 96), (96, 136), F16),
        product((1, 520), (520, 300), BF16),
        product((16, 1024), (1024, 264), BF16),
        product((40, 513), (513, 72), F16),
        product((300, 24), (24, 1), F32),
        product((2, 4099), (4099, 3), F32),
        product((260, 520), (520, 390), F32, precision="highest"),
        # batches and broadcasts
        product((3, 4, 8), (3, 8, 5)),
        product((3, 4, 8), (8, 5), BF16),
        product((4, 8), (3, 8, 5)),
        product((2, 1, 4, 8), (3, 8, 5)),
        product((2, 3, 4, 8), (2, 1, 8, 5), BF16),
        product((2, 3, 70, 40), (2, 3, 40, 33), F16),
        product((6,), (2, 6, 5)),
        # dimension numbers
        dot((9, 20), (20, 11), (nn, none), F32),
        dot((40, 72), (56, 72), (((1,), (1,)), none), BF16),
        dot((72, 40), (72, 56), (((0,), (0,)), none), BF16),
        dot((72, 40), (56, 72), (((0,), (1,)), none), F16),
        dot((3, 4, 5), (4, 5, 6), (((1, 2), (0, 1)), none)),
        dot((3, 4, 5), (5, 4, 6), (((1, 2), (1, 0)), none)),
        dot((5, 3, 4), (4, 5, 6), (((2,), (0,)), ((0,), (1,)))),
        dot((2, 3, 4, 5), (5, 2, 3, 6), (((3,), (0,)), ((0, 1), (1, 2))), BF16),
        dot((4, 3, 2, 8), (4, 7, 2, 8), (((3,), (3,)), ((0, 2), (0, 2))), BF16),
        dot((3, 4), (5, 6), (((), ()), none)),
        dot((3, 4), (3, 4), (((0, 1), (0, 1)), none)),
        dot((3, 4), (3, 4), (((), ()), ((0, 1), (0, 1)))),
        # dtypes and their mixtures, and what is stored
        product((33, 40), (40, 24), F64),
        product((33, 40), (40, 24), E4M3, out_dtype=BF16),
        product((33, 48), (48, 24), E4M3, E5M2, out_dtype=F32),
        product((33, 48), (48, 32), E5M2, out_dtype=F16),
        product((33, 40), (40, 24), I8, out_dtype=I32),
        product((33, 40), (40, 24), BF16, F32),
        product((33, 40), (40, 24), BF16, out_dtype=F32),
        product((33, 40), (40, 24), F32, out_dtype=BF16),
        product((33, 40), (40, 24), F16, out_dtype=F64),
        # epilogues
        product((33, 40), (40, 24), epilogue="relu"),
        product((130, 64), (64, 72), BF16, epilogue="bias gelu", extras=(row(72, BF16),)),
        product((130, 64), (64, 72), F32, epilogue="bias erf gelu", extras=(row(72),)),
        product((40, 64), (64, 33), F16, epilogue="bias", extras=(row(33),)),
        product((2, 3, 20, 16), (16, 24), BF16, epilogue="bias gelu", extras=(row(24),), out_dtype=F32),
        product((33, 40), (40, 24), epilogue="accumulate", extras=(((33, 24), F32), scalar, scalar)),
        product((33, 40), (40, 24), BF16, epilogue="residual", extras=(row(24), ((33, 24), BF16))),
        product((3, 33, 40), (3, 40, 24), BF16, epilogue="residual", extras=(((3, 1, 24), BF16), ((3, 33, 24), BF16))),
        product((33, 40), (40, 24), epilogue="of rows", extras=(row(33),)),
        product((33, 48), (48, 32), E4M3, epilogue="scaled", extras=(scalar, scalar), out_dtype=BF16),
        product((33, 40), (40, 24), I8, epilogue="dequantized", extras=(row(24),), out_dtype=I32),
        product((33, 40), (40, 24), BF16, epilogue="two results", extras=(row(24),)),
        product((33, 40), (40, 24), epilogue="below the diagonal"),
        product((33, 40), (40, 24), epilogue="softmax"),
        product((5, 40), (40,), epilogue="silu"),
        # reductions
        product((133, 40), (40, 72), BF16, epilogue="largest"),
        product((133, 40), (40, 72), epilogue="summed over rows", extras=(((133, 72), F32),)),
        product((2, 33, 40), (2, 40, 24), BF16, epilogue="summed over rows", extras=(((2, 33, 24), BF16),)),
        product((33, 40), (40, 300), epilogue="least of each row"),
        product((33, 40), (40, 1), epilogue="least of each row"),
        product((33, 106), (106, 256), epilogue="extrema", precision="highest"),
        product((33, 40), (40, 24), epilogue="sum alone"),
        # two products at once
        gated((33, 40), (40, 24)),
        gated((2, 65, 64), (64, 136), BF16),
        gated((33, 40), (40, 24), F16, epilogue="gelu", extras=(row(24), row(24, F16))),
        gated((8,), (8, 6), epilogue="relu"),
    ]


LAYER = product((3, 4), (4, 2), epilogue="bias gelu", extras=(((2,), F32),))
REDUCED = product((3, 4), (4, 2), epilogue="summed over rows", extras=(((3, 2), F32),))
GATED = product((3, 4), (4, 2)).replace(kind="gated_linear_unit")
DOT = MatmulCase("dot_general", (4, 3, 2), (3, 5, 2), numbers=(((1,), (0,)), ((2,), (2,))))
SMALL = [
    LAYER,
    product((3, 4), (4, 2), F64, epilogue="residual", extras=(((2,), F64), ((3, 2), F64))),
    product((2, 3, 4), (2, 4, 2)),
    REDUCED,
    GATED,
    product((3, 4), (4, 2), epilogue="softmax"),
]
MLP = product((8, 12), (12, 16), epilogue="bias gelu", extras=(((16,), F32),))
DOWN = product((8, 12), (12, 16))
ACCUMULATED = product((33, 40), (40, 24), epilogue="accumulate", extras=(((33, 24), F32), ((), F32), ((), F32)))

ROWS = Rows(
    every=_every(),
    empty=[
        product((0, 8), (8, 5), epilogue="relu"),
        product((4, 0), (0, 5), epilogue="bias gelu", extras=(((5,), F32),)),
        product((3, 4, 8), (3, 8, 0), BF16),
        product((0, 4, 8), (0, 8, 5)),
    ],
    not_finite=[
        product((33, 40), (40, 24), data="nan"),
        product((33, 40), (40, 24), BF16, data="inf"),
        product((33, 40), (40, 24), BF16, data="nan", epilogue="bias gelu", extras=(((24,), BF16),)),
        product((33, 40), (40, 24), data="nan", epilogue="largest"),
    ],
    # A k that XLA's kernels do not serve in less time.
    plain=[product((6, 136), (136, 24), BF16, epilogue="bias gelu", extras=(((24,), F32),))],
    small=SMALL,
    deep=SMALL[:2],
    tiny=[product((2, 3), (3, 2), epilogue="silu")],
    repeated=[product((130, 300), (300, 72), BF16, epilogue="largest")],
    mapped=[
        *((LAYER, axes) for axes in [(0, None, None), (None, 1, None), (None, None, 0), (1, 2, None), (0, 0, 1)]),
        *((DOT, axes) for axes in [(0, None), (2, None), (None, 1), (3, 0)]),
        *((GATED, axes) for axes in [(1, None, None), (None, 0, None), (None, 0, 0)]),
        *((REDUCED, axes) for axes in [(0, None, None), (0, 0, 0)]),
    ],
    narrow=[(LAYER.replace(dtypes_of=(BF16, BF16)), (0, None, None))],
    nested=[(LAYER, (0, None, 0), (0, 0, None))],
    looped=[product((5, 8), (8, 8), epilogue="silu")],
    donated=[(ACCUMULATED, (2,))],
    unsized=[([MLP.replace(a=(m, 12)) for m in (7, 3)], ("m, 12", "12, 16", "16"))],
    split=[
        *(
            Split(MLP, specs, (y,), sends=set(), gradient_sends={"all-reduce"}, calls=(1, 3))
            for specs, y in [
                ((P("a"), P(), P()), P("a")),
                ((P(), P(None, "b"), P("b")), P(None, "b")),
                ((P("a"), P(None, "b"), P("b")), P("a", "b")),
                ((P(("a", "b")), P(), P()), P(("a", "b"))),
            ]
        ),
        # As in data parallelism, where nobody says where the cotangents lie.
        Split(MLP, (P("a"), P(), P()), sends=set(), gradient_sends={"all-reduce"}, calls=(1, 3)),
        # A split contraction is summed over the devices.
        Split(DOWN, (P(None, "a"), P("a", None)), sends={"all-reduce"}, explicit=False),
        # As weights lie that are split like the data (FSDP): one has the axis, and the others are gathered.
        Split(MLP, (P("a"), P("a"), P()), explicit=False),
        Split(MLP, (P("a"), P(None, "a"), P("a")), explicit=False),
        Split(MLP, (P(None, "a"), P(None, "a"), P()), explicit=False),
        Split(MLP, (P(("a", "b")), P(None, "b"), P("b")), explicit=False),
        Split(MLP, (P("b", "a"), P("a", "b"), P("a")), explicit=False),
        # gelu(x + y) is not gelu(x) + gelu(y): what is split is gathered.
        Split(MLP, (P(None, "a"), P("a", None), P()), explicit=False),
        *(
            Split(DOWN.replace(epilogue=name), (P("a"), P(None, "b")))
            for name in ("largest", "least of each row", "sum alone")
        ),
        *(
            Split(DOWN.replace(epilogue=name), (P("a"), P(None, "b")), (P("a", "b"),))
            for name in ("relu", "below the diagonal")
        ),
        # A matrix that is read along with its transpose is whole on each device.
        Split(
            product((8, 12), (12, 8), epilogue="symmetric residual", extras=(((8, 8), F32),)),
            (P("a"), P(None, "b"), P()),
        ),
    ],
    manual=[(MLP, (P("rows"), P(), P()), P("rows"))],
)
