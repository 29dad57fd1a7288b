"""Rows of the table for `dot_product_attention`."""

from jax.sharding import PartitionSpec as P

from checking.cases.attention import AttentionCase
from checking.cases.base import Rows, Split
from checking.cases.dtypes import BF16, F16, F64

Attention = AttentionCase


def _attentions() -> list[AttentionCase]:
    return [
        # sizes: one query, no batch, no multiple of anything, other head sizes for values
        Attention(batch=None, queries=1, keys=33, heads=3, key_heads=1, residual=True),
        Attention(queries=67, keys=35, heads=6, size=24, value_size=16, causal=True, bias="1n1s", soft_cap=1.5),
        Attention(batch=1, queries=130, keys=257, heads=4, key_heads=1, size=64, value_size=64, dtype=BF16),
        Attention(queries=33, keys=65, heads=4, key_heads=2, size=192, value_size=128, dtype=BF16, causal=True),
        Attention(dtype=F64, heads=4, residual=True, bias="bnts", sinks=True),
        # masks
        Attention(window=(2, 1), alignment="bottom_right", mask="b1ts"),
        Attention(batch=3, causal=True, alignment="bottom_right", lengths="query key", residual=True),
        Attention(segments="both", window=(3, None), residual=True, queries=9, keys=9, dtype=F16),
        Attention(mask_mod="prefix", lengths="key", mask="1111", batch=3),
        # functions of scores
        Attention(score_mod="slopes", positions="query key", window=(None, 2), heads=4, residual=True),
        Attention(score_mod="table", bias="ts", dtype=BF16),
        Attention(score_mod="temperature", mask_mod="stripes", soft_cap=2.0, sinks=True, residual=True),
        Attention(dropout=0.3, bias="b11s", heads=4, residual=True),
    ]


SMALL = [
    Attention(
        queries=3, keys=2, batch=1, dtype=F64, score_mod="slopes", soft_cap=2.0, sinks=True, causal=True, residual=True
    ),
    Attention(queries=2, keys=3, key_heads=1, bias="1nts", lengths="key", window=(1, 0), dropout=0.25),
]
PLAIN = Attention(queries=16, keys=16, heads=4, size=16, value_size=16, dtype=BF16, causal=True)
EVERYTHING = Attention(
    queries=4,
    keys=4,
    heads=4,
    bias="1nts",
    sinks=True,
    score_mod="slopes",
    mask_mod="stripes",
    segments="both",
    dropout=0.2,
    residual=True,
)
ROWS = Rows(
    every=_attentions(),
    empty=[
        Attention(queries=0, causal=True, bias="bnts", residual=True),
        Attention(keys=0, sinks=True, residual=True),
        Attention(keys=0, residual=True),
        Attention(batch=0, lengths="key"),
        Attention(size=0, value_size=0),
    ],
    not_finite=[Attention(data="nan", causal=True)],
    plain=[PLAIN],
    small=SMALL,
    deep=SMALL[:1],
    tiny=[],
    repeated=[Attention(queries=64, keys=96, heads=4, size=32, value_size=32, dtype=BF16, causal=True, bias="1nts")],
    mapped=[
        *(
            (Attention(queries=2, keys=3, heads=2, key_heads=1, bias="1nts", residual=True), axes)
            for axes in [(1, 0, None, 2), (None, 0, 0, None)]
        ),
        (Attention(queries=3, keys=3, dropout=0.3, sinks=True, mask_mod="prefix"), (0, None, 0, None)),
    ],
    narrow=[(Attention(dtype=BF16, bias="1n11"), (0, None, None, 0))],
    nested=[(Attention(queries=2, keys=3, bias="ts"), (0, None, 0, None), (0, None, None, 0))],
    looped=[Attention(queries=4, keys=6, heads=4, causal=True, bias="1nts")],
    donated=[(Attention(queries=33, keys=40, heads=4, size=16, value_size=16, causal=True), (0,))],
    unsized=[
        (
            [
                Attention(queries=q, keys=k, batch=b, heads=4, bias="11ts", causal=True)
                for b, q, k in ((2, 4, 6), (1, 3, 5))
            ],
            ("b, q, 4, 4", "b, k, 2, 4", "b, k, 2, 4", "1, 1, q, k"),
        )
    ],
    split=[
        # Batch elements and heads by themselves: nothing is sent but what is summed of gradients.
        Split(
            Attention(heads=4, key_heads=4),
            (P("a", None, "b"),) * 3,
            sends=set(),
            gradient_sends=set(),
        ),
        Split(
            Attention(heads=4, key_heads=2, sinks=True, bias="1nts", causal=True),
            (*(P("a", None, "b"),) * 3, P(None, "b"), P("b")),
            sends=set(),
            gradient_sends={"all-reduce"},
        ),
        # One key head for all: its gradient is a sum over devices.
        Split(
            Attention(heads=4, key_heads=1, residual=True),
            (P(None, None, ("a", "b")), P(), P()),
            sends=set(),
            gradient_sends={"all-reduce"},
        ),
        Split(EVERYTHING, (*(P("a", None, "b"),) * 3, P(None, "b"), P("b"), P())),
        # Lengths are whole on each device: slower, but right.
        Split(Attention(queries=4, keys=8, causal=True), (P(None, "a"), P("b", "a"), P()), explicit=False),
        Split(Attention(queries=4, keys=8, causal=True, bias="b1ts"), (P("b", "a"), P("b"), P(), P("b", None, "a"))),
    ],
    manual=[
        (
            Attention(batch=8, queries=3, keys=3, bias="1nts", residual=True, causal=True),
            (*(P("rows"),) * 3, P()),
            P("rows"),
        ),
        (Attention(batch=8, queries=2, keys=3, mask_mod="stripes"), (P("rows"),) * 3, P("rows")),
    ],
)
