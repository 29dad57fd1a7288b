"""Small calls, with knobs of Hopper's kernel that its heuristic would not choose."""

from checking.attention.calls import ALIGNED, CAUSAL, RESIDUAL, WINDOW, bias, call
from jaxdnn.engines.attention.sm90.knobs import AttentionSm90Knobs

# Warp groups let blocks pass at either edge of their tile, at both, or all but one: those of queries past the end.
SKIPS = {"skips": True}
HALVES = {"halves": True}
IN_TWO_STAGES, IN_REGISTERS = {"query_stages": 2}, {"query_in_registers": True}
TILED = {
    "wide blocks": (
        call((130, 400, 64, 64), (2, 1), lengths=True, **WINDOW, **RESIDUAL),
        AttentionSm90Knobs(128, 176),
    ),
    "passing, causal": (
        call((400, 400, 64, 64), (2, 1), **CAUSAL, **RESIDUAL),
        AttentionSm90Knobs(192, 128, **IN_TWO_STAGES, **SKIPS),
    ),
    "passing, window": (
        call((420, 400, 32, 32), (2, 1), **WINDOW, **RESIDUAL),
        AttentionSm90Knobs(192, 64, **IN_TWO_STAGES, **SKIPS),
    ),
    "passing, one stage": (
        call((260, 300, 32, 32), **WINDOW, **RESIDUAL),
        AttentionSm90Knobs(192, 64, stages=1, **SKIPS),
    ),
    "passing, full": (
        call((200, 200, 32, 32), **RESIDUAL),
        AttentionSm90Knobs(192, 64, stages=3, **IN_TWO_STAGES, **SKIPS),
    ),
    "passing, lengths": (
        call((300, 280, 32, 32), (2, 1), 3, lengths=True, **WINDOW, **ALIGNED, **RESIDUAL),
        AttentionSm90Knobs(192, 64, **IN_REGISTERS, **SKIPS),
    ),
    "passing, fewer keys": (
        call((400, 130, 32, 32), **ALIGNED, **RESIDUAL),
        AttentionSm90Knobs(128, 64, **IN_TWO_STAGES, **SKIPS),
    ),
    "passing, no turns": (call((200, 200, 160, 64), **CAUSAL), AttentionSm90Knobs(128, 64, **SKIPS)),
    "passing, splits": (
        call((140, 400, 32, 32), **CAUSAL, **RESIDUAL),
        AttentionSm90Knobs(192, 64, splits=3, **IN_REGISTERS, **SKIPS),
    ),
    "passing, bias in tiles": (
        call((200, 304, 64, 64), (2, 1), 2, **bias(1, 2, 200, 304), **WINDOW, **RESIDUAL),
        AttentionSm90Knobs(192, 64, score_stages=1, cluster=2, **SKIPS),
    ),
    # Warp groups see half of the block at the diagonal, or the whole of it, or nothing of it; or have one block alone.
    "halves, causal": (
        call((520, 520, 64, 64), (2, 1), **CAUSAL, **RESIDUAL),
        AttentionSm90Knobs(128, 128, **IN_TWO_STAGES, **HALVES),
    ),
    "halves, aligned": (
        call((330, 485, 96, 32), (2, 1), **ALIGNED, **RESIDUAL),
        AttentionSm90Knobs(128, 128, **IN_REGISTERS, **HALVES),
    ),
    "halves, one stage": (
        call((300, 420, 32, 32), **WINDOW, **RESIDUAL),
        AttentionSm90Knobs(128, 128, stages=1, **HALVES),
    ),
    "halves, lengths": (
        call((300, 400, 32, 32), (2, 1), 3, lengths=True, **ALIGNED, **RESIDUAL),
        AttentionSm90Knobs(128, 128, **IN_TWO_STAGES, **HALVES),
    ),
    "halves, passing": (
        call((400, 464, 32, 32), (2, 1), **ALIGNED, **RESIDUAL),
        AttentionSm90Knobs(192, 128, **IN_TWO_STAGES, **SKIPS, **HALVES),
    ),
    "halves, splits": (
        call((140, 400, 32, 32), **CAUSAL, **RESIDUAL),
        AttentionSm90Knobs(128, 128, splits=2, **IN_TWO_STAGES, **HALVES),
    ),
}
