"""How many registers may hold accumulators on Hopper, beside what an epilogue needs: what does not spill.

Numbers in brackets are those of the notes on sm90 in benchmarks/results/product_kernels.md.
"""

from collections.abc import Sequence

import numpy as np

from jaxdnn.engines.product.length import is_long
from jaxdnn.engines.product.problem import EpilogueOperand, Matrix, Product, Reduced
from jaxdnn.engines.product.sm90.knobs import Sm90Knobs
from jaxdnn.engines.product.tiles import tile_operands
from jaxdnn.pointwise import functor

MOST_ACCUMULATORS = 192  # registers
LIGHT_ACCUMULATORS = 128  # that leave room for an epilogue's work, or for the addresses of a store without TMA
# What is left beside them for an epilogue's values, with 64 rows a warp group and with 128: what does not spill.
EPILOGUE_REGISTERS = {64: 56, 128: 12}
EPILOGUE_REGISTERS_OF_THREE = 16  # likewise, of three warp groups, whose threads have 160 registers and not 240
MOST_OF_THREE = 96  # beside which so much is left too
REDUCTION_REGISTERS = 24
LOOKUP_REGISTERS = {1: 24, 2: 80, 3: 80}  # of a table, by how many integers it is looked up by
# What does not spill beside the most accumulators, two warp groups taking turns: up to two 16-bit results of these
# operations, and of a row of 16-bit operands for each sum.
LIGHT_OPERATIONS = frozenset(("add", "sub", "mul", "neg", "abs", "max", "min", "convert", "tanh", "logistic"))
LIGHT_REGISTERS = 20
TURNS_REGISTERS = 32  # likewise beside LIGHT_ACCUMULATORS: three results, and a row for each of two sums [24]
ARITHMETIC = LIGHT_OPERATIONS - {"tanh", "logistic"}  # those of what is reduced over rows
ADDITIONS = frozenset(("add", "sub", "neg", "convert"))  # likewise, with one 16-bit operand of the result's shape
# Registers of the operands besides tiles, and of the results, that leave room for the most accumulators [19].
OTHERS_BESIDE_TILES, RESULTS_BESIDE_TILES = 5, 16


def accumulator_limit(product: Product, knobs: Sm90Knobs) -> int:
    """How many registers may hold accumulators."""
    if knobs.split_k > 1:
        return LIGHT_ACCUMULATORS  # a part's place in K takes registers too
    if product.is_plain and knobs.store == "tma":
        return MOST_ACCUMULATORS
    stored = list(map(result_registers, product.results))
    tiles = tile_operands(product) if knobs.fetch == "tma" else ()
    # Accumulators that are stored as they are leave one result after the other.
    work = sum(stored) if product.program.operations else max(stored)
    work += sum(operand_registers(operand, tile=i in tiles) for i, operand in enumerate(product.operands))
    work += REDUCTION_REGISTERS * len(product.reduced)
    three = knobs.consumers == 3
    light_in_turns = knobs.store == "tma" and knobs.schedule == "pingpong" and not three and is_light(product)
    if light_in_turns and work <= LIGHT_REGISTERS:
        return MOST_ACCUMULATORS
    if knobs.store != "direct" and not knobs.promotion and sums_rows(product):
        # By columns, a thread has sums of its own two rows of each 64, and of no others.
        few_sums = product.by_columns and knobs.schedule == "pingpong" and not three
        return MOST_ACCUMULATORS if few_sums else LIGHT_ACCUMULATORS - 64 * three
    if tiles and not three and not knobs.promotion and is_light_beside(product, tiles):
        return MOST_ACCUMULATORS if is_lightest_beside(product, tiles) else LIGHT_ACCUMULATORS
    if three and knobs.store == "tma" and not knobs.promotion and work <= EPILOGUE_REGISTERS_OF_THREE:
        return MOST_OF_THREE
    limit = (
        LIGHT_ACCUMULATORS - 64 * three + 64 * bool(knobs.promotion)
    )  # half of them are added to the others, and free then
    spare = EPILOGUE_REGISTERS_OF_THREE if three else EPILOGUE_REGISTERS[knobs.consumer_rows]
    if light_in_turns and not product.reduced:
        spare = max(spare, TURNS_REGISTERS)
    return limit - max(0, work - spare)


def operand_registers(operand: EpilogueOperand, *, tile: bool) -> int:
    """Registers that hold an operand's values for 32 columns of two rows, or 16 of a tile's, or what it is looked up
    with.
    """
    if tile:
        return 2 * np.dtype(operand.dtype).itemsize
    if operand.gathered:
        return LOOKUP_REGISTERS[len(operand.gathered)]
    rows = 2 if operand.broadcast in ("column", "full") else 1
    batched = int(operand.batch_stride != 0)
    if operand.broadcast in ("scalar", "column"):
        return rows + batched
    return batched + rows * (4 if operand.pairs and np.dtype(operand.dtype).itemsize < 4 else 8)


def result_registers(result: Matrix | Reduced) -> int:
    """Registers that a result's values wait in; those of one byte are packed in two steps."""
    return 24 if np.dtype(result.dtype).itemsize == 1 else 8


def is_light(product: Product) -> bool:
    """Whether the epilogue takes few registers besides those of its operands and results."""
    narrow = all(np.dtype(array.dtype).itemsize == 2 for array in (*product.operands, *product.results))
    if [operand.broadcast for operand in product.operands] == ["full"]:
        light = len(product.results) == 1 and ADDITIONS.issuperset(product.program.operations)
        return narrow and light and product.operands[0].pairs and not product.program.indexed
    broadcast = "column" if product.by_columns else "row"  # of values for each feature
    rows = all(operand.broadcast == broadcast for operand in product.operands)
    rows = rows and len(product.operands) <= len(product.b)
    light = LIGHT_OPERATIONS.issuperset(product.program.operations) and not product.program.indexed
    # The argument of a silu is needed twice, which spills where it is made of an operand too [13].
    silu = "logistic" in product.program.operations and product.operands and len(product.b) == 1
    # A tanh that is not part of a gelu takes twice its constants.
    return narrow and rows and light and not silu and "approximate_tanh(" not in functor(product.program).source


def is_light_beside(product: Product, tiles: Sequence[int]) -> bool:
    """Whether the epilogue takes few registers besides those of its tiles, of which few are read at once."""
    others = [operand for number, operand in enumerate(product.operands) if number not in tiles]
    few = all(operand.broadcast != "full" and not operand.gathered for operand in others)
    return few and not product.reduced and not is_long(product.program)


def is_lightest_beside(product: Product, tiles: Sequence[int]) -> bool:
    """Whether it leaves room for the most accumulators: with two 16-bit results, of 16-bit tiles and at most one row of
    16 bits, or of nothing but sums of tiles [19].
    """
    others = [operand for number, operand in enumerate(product.operands) if number not in tiles]
    few = len(others) <= 1 and not any(term for operand in others for term in operand.terms)
    few = few and sum(operand_registers(operand, tile=False) for operand in others) <= OTHERS_BESIDE_TILES
    narrow = all(np.dtype(product.operands[number].dtype).itemsize == 2 for number in tiles)
    sums = not others and ADDITIONS.issuperset(product.program.operations)
    return (sums or (narrow and few)) and sum(map(result_registers, product.results)) <= RESULTS_BESIDE_TILES


def sums_rows(product: Product) -> bool:
    """Whether the epilogue does little but reduce one or two results over the rows of what is stored, which leaves room
    for many accumulators [22]: not beside an operand.
    """
    light = ARITHMETIC.issuperset(product.program.operations) and not product.program.indexed
    axis = 2 if product.by_columns else 1
    over_rows = bool(product.reduced) and all(one.axes in ((axis,), (0, axis)) for one in product.reduced)
    stored = sum(map(result_registers, product.stored))
    few = not product.operands and len(product.reduced) <= 2 and stored <= RESULTS_BESIDE_TILES
    return light and over_rows and few
