"""Sums that cancel, and the function that takes their place: `without_cancellation`."""

from dataclasses import replace

from jaxdnn.pointwise.builder import Builder
from jaxdnn.pointwise.program import Instruction, Program


def without_cancellation(program: Program) -> Program:
    """The program with a function, `one_plus_tanh`, for what cancels where a tanh is near 1 or -1.

    These are 1 + tanh(x), 1 - tanh(x) and y + y * tanh(x), of which gelu and its derivative are made.
    """
    instructions = program.instructions
    build, places = Builder(), list[int]()

    def argument_of_tanh(position: int) -> int | None:
        one = instructions[position]
        return places[one.arguments[0]] if one.operation == "tanh" else None

    def one_plus_tanh(instruction: Instruction) -> int | None:
        if instruction.operation not in ("add", "sub") or instruction.dtype not in ("float32", "float64"):
            return None
        subtracted = instruction.operation == "sub"
        pairs = (instruction.arguments,) if subtracted else (instruction.arguments, instruction.arguments[::-1])
        for one, other in pairs:
            x, factor = argument_of_tanh(other), None
            product = instructions[other]
            if not subtracted and product.operation == "mul" and one in product.arguments:
                x, factor = argument_of_tanh(product.arguments[product.arguments[0] == one]), places[one]
            elif instructions[one].operation != "literal" or instructions[one].literal != 1:
                continue
            if x is not None:
                x = build.operation("neg", x) if subtracted else x
                value = build.add(Instruction("one_plus_tanh", instruction.dtype, (x,)))
                return value if factor is None else build.operation("mul", factor, value)
        return None

    for instruction in instructions:
        place = one_plus_tanh(instruction)
        if place is None:
            arguments = tuple(places[argument] for argument in instruction.arguments)
            place = build.add(replace(instruction, arguments=arguments))
        places.append(place)
    kept, outputs = build.finish(tuple(replace(output, value=places[output.value]) for output in program.outputs))
    return replace(program, instructions=kept, outputs=outputs)
