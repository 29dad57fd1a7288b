"""Which knobs of the two kernels of gradients to try, best first."""

from collections.abc import Iterator
from dataclasses import replace

from jaxdnn.device import Target
from jaxdnn.engines.attention.problem import Attention
from jaxdnn.engines.attention.shares import best_shares
from jaxdnn.engines.attention.sm90.backward.knobs import function_registers
from jaxdnn.engines.attention.sm90.gradients.knobs import (
    KEY_REGISTERS,
    KEY_TILE,
    QUERY_REGISTERS,
    AttentionSm90GradientKnobs,
    key_knobs_reason,
    key_registers,
    query_knobs_reason,
    query_registers,
)
from jaxdnn.engines.attention.sm90.heuristic import swizzle
from jaxdnn.engines.attention.transposed import by_feature

BLOCKS = (128, 112, 96, 80, 64)  # that gradients stream: wide multiplies read shared memory less often
FLOAT32_BLOCKS = (*BLOCKS, 32)  # whose features are streamed, too


def gradient_candidates(problem: Attention, target: Target) -> Iterator[AttentionSm90GradientKnobs]:
    """Knobs that work for the call: the best of both kernels, then others of one."""
    first = AttentionSm90GradientKnobs(
        query_tile=64 if problem.query_length <= 64 else 128,
        query_swizzle=swizzle(problem, 1, target),
        cluster=2 if problem.key_length > KEY_TILE and target.sm_count > 1 else 1,
        key_swizzle=gradient_swizzle(problem, target),
    )
    blocks = FLOAT32_BLOCKS if by_feature(problem) else BLOCKS
    of_queries = [
        one
        for block in blocks
        for stages in (2, 1)
        if not query_knobs_reason(
            problem, one := replace(first, key_block=block, value_stages=stages), target.shared_memory
        )
    ]
    of_keys = [
        one
        for block in blocks
        if not key_knobs_reason(problem, one := replace(first, query_block=block), target.shared_memory)
    ]
    taken = function_registers(problem)
    of_queries = [one for one in of_queries if query_registers(problem, one) + taken <= QUERY_REGISTERS] or [
        min(of_queries, key=lambda one: one.key_block)
    ]
    of_keys = [one for one in of_keys if key_registers(problem, one) + taken <= KEY_REGISTERS] or of_keys[-1:]
    of_keys = [replace(one, shares=best_shares(problem, (one.query_block, KEY_TILE), target)) for one in of_keys]
    best = of_queries[0]
    yield from (replace(one, query_block=of_keys[0].query_block, shares=of_keys[0].shares) for one in of_queries)
    yield from (replace(best, query_block=one.query_block, shares=one.shares) for one in of_keys[1:])


def gradient_swizzle(problem: Attention, target: Target) -> int:
    """Key heads whose queries, with their cotangents, fit in the L2 cache."""
    vectors = problem.query.itemsize * (problem.head_size + problem.value_head_size)
    fitting = target.l2_bytes // (problem.group * problem.query_length * vectors)
    return 1 << (max(1, fitting).bit_length() - 1)
