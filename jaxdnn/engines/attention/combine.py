"""Attention whose keys are split: where the splits' results lie, and the step that combines them.

The kernel of that step is cpp/kernels/attention/combine.cuh.
"""

from dataclasses import replace

from jaxdnn.engines.attention.function import place_parameters, place_types
from jaxdnn.engines.attention.problem import Attention, Heads
from jaxdnn.engines.product.element_epilogue import ctype
from jaxdnn.engines.product.problem import EpilogueOperand
from jaxdnn.engines.unit import Parameter, Stage, arguments, entry_text, numbers, struct_text
from jaxdnn.plan import Launch, Scratch
from jaxdnn.pointwise import Term

THREADS = 256  # of attention/combine.cuh, at most
COLUMNS = 4  # of a thread


def partial_attention(problem: Attention, scratch: int) -> Attention:
    """The problem of one split: its results, [split, batch, head, query, column], are float32 in scratch buffers, which
    are numbered from `scratch`, and so are its log-sum-exps.
    """
    queries, size = problem.query_length, problem.value_head_size
    batch = (Term(problem.query_heads * queries * size),)
    return replace(
        problem,
        out=Heads(Scratch(scratch), "float32", batch, size, queries * size),
        log_sum_exp=EpilogueOperand(Scratch(scratch + 1), "float32", "column", queries, 1),
        sinks=None,
    )


def partial_bytes(problem: Attention, splits: int) -> tuple[int, int]:
    """Sizes of the scratch buffers."""
    rows = splits * problem.batch * problem.query_heads * problem.query_length
    return 4 * rows * problem.value_head_size, 4 * rows


def combine_stage(problem: Attention, splits: int, scratch: int) -> Stage:
    """Combines the splits' results, whose scratch buffers are numbered from `scratch`."""
    places = {"sinks": problem.sinks, "log_sum_exp": problem.log_sum_exp}
    there = {name: place for name, place in places.items() if place is not None}
    partial, out = partial_attention(problem, scratch), problem.out
    assert partial.log_sum_exp is not None
    found = [
        Parameter("const float*", "parts", "parts", partial.out.buffer),
        Parameter("const float*", "log_sum_exps", "log_sum_exps", partial.log_sum_exp.buffer),
        Parameter(f"{ctype(out.dtype)}*", "out", "out", out.buffer),
        *numbers("long long", out_row=out.length_stride, out_head=out.head_stride, out_batch=out.batch_stride or 0),
        *(parameter for name, place in there.items() for parameter in place_parameters(name, place)),
        *numbers(splits=splits, query_heads=problem.query_heads, query_length=problem.query_length),
    ]
    types = {"T": ctype(out.dtype), "Sinks": "void", "LogSumExp": "void"} | place_types(there)
    config = struct_text("CombineConfig", types, {})
    entry = entry_text("attention_combine", "jaxdnn::AttentionCombine<CombineConfig>", str(THREADS), found)
    width = problem.value_head_size // COLUMNS
    lanes = min(1 << (splits - 1).bit_length(), 1 << (THREADS // width).bit_length() - 1)
    rows = problem.batch * problem.query_heads * problem.query_length
    launch = Launch("attention_combine", arguments(found), (rows, 1, 1), (width, lanes, 1))
    return Stage(("attention/combine.cuh",), f"\n{config}\n{entry}", (launch,), partial_bytes(problem, splits))
