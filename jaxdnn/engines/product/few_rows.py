"""Who serves products of few rows (or few columns): `few_rows_reason`."""

from jaxdnn.device import Target
from jaxdnn.engines.product.skinny import heuristic as skinny
from jaxdnn.engines.product.skinny.knobs import SkinnyProduct
from jaxdnn.engines.product.sm90.heuristic import candidates
from jaxdnn.engines.product.sm90_model import MEMORY_RATE, seconds

# Seconds that the kernel of `sm90` takes before and after what its model tells; skinny's tells that too: see "Few rows,
# by whom" in benchmarks/results/product_kernels.md.
START = 2.2e-6


def few_rows_reason(one: SkinnyProduct, target: Target) -> str | None:
    """Why the tiles of `sm90` take less time than skinny's kernel, by the models of both, or None."""
    theirs = next(candidates(one.product, target, matrices=True), None)
    ours = next(skinny.candidates(one, target), None)
    if theirs is None or ours is None:
        return None
    slower = max(1.0, MEMORY_RATE / (target.bandwidth or MEMORY_RATE))  # memory than what their model was fitted to
    expected = START + slower * seconds(one.product, theirs, target.sm_count, matrices=True)
    own = skinny.seconds(one, ours, target)
    if own <= expected:
        return None
    tile = f"{theirs.tile_m} x {theirs.tile_n}"
    return f"tiles of {tile} are expected to take {1e6 * expected:.1f} us, and this kernel {1e6 * own:.1f}"
