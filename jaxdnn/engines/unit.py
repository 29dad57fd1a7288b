"""The entry point of a kernel: its parameters, the call that it fills in with them, and what it is launched with; and
what each step of a plan adds to the plan's unit.

Kernels take one structure, `call`, by reference; an entry point has the driver's plain parameters instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from jaxdnn.plan import Argument, Launch, Plan, Scalar, TensorMap

WIDTH = 120  # columns of a generated line


@dataclass(frozen=True)
class Parameter:
    """A parameter of an entry point: its declaration, the field of the call that it sets, its argument.

    An argument that is a plain number is written into the code.
    """

    ctype: str
    name: str
    field: str
    argument: Argument | int


def map_parameter(name: str, field: str, argument: TensorMap) -> Parameter:
    """A tensor map."""
    return Parameter("const __grid_constant__ jaxdnn::TensorMap", name, field, argument)


def numbers(ctype: str = "int", **values: int) -> list[Parameter]:
    """Integers of the call."""
    dtype = "int64" if ctype == "long long" else "int32"
    return [Parameter(ctype, name, name, Scalar(dtype, value)) for name, value in values.items()]


def signature_text(kernel: str, found: Sequence[Parameter]) -> str:
    """The entry point's name and parameters, up to the opening brace."""
    passed = (f"{parameter.ctype} {parameter.name}" for parameter in found if not isinstance(parameter.argument, int))
    return f"{kernel}({', '.join(passed)}) {{\n"


def entry_text(kernel: str, call: str, bounds: str, found: Sequence[Parameter], name: str = "") -> str:
    """An entry point, named `name` if not as the kernel, that fills in the kernel's call, of the type `call`."""

    def value(parameter: Parameter) -> str:
        if isinstance(parameter.argument, int):
            return str(parameter.argument)
        return f"{'&' if isinstance(parameter.argument, TensorMap) else ''}{parameter.name}"

    return (
        f'extern "C" __global__ void __launch_bounds__({bounds})\n'
        + signature_text(name or kernel, found)
        + f"    {call} call;\n"
        + filled(f"call.{parameter.field} = {value(parameter)};" for parameter in found)
        + f"    jaxdnn::{kernel}(call);\n}}\n"
    )


def filled(statements: Iterable[str]) -> str:
    """Statements, as many on a line as fit."""
    lines: list[str] = []
    for statement in statements:
        if lines and len(lines[-1]) + 1 + len(statement) <= WIDTH:
            lines[-1] += f" {statement}"
        else:
            lines.append(f"    {statement}")
    return "".join(f"{line}\n" for line in lines)


def arguments(found: Sequence[Parameter]) -> tuple[Argument, ...]:
    """What an entry point is launched with."""
    return tuple(parameter.argument for parameter in found if not isinstance(parameter.argument, int))


Constant = bool | int | str


def struct_text(
    name: str,
    types: Mapping[str, str],
    constants: Mapping[str, Constant],
    defaults: tuple[str, Mapping[str, Constant]] = ("", {}),
) -> str:
    """What a kernel is compiled with: types, and flags, integers and named values.

    What equals one of the `defaults`, which are the members of a struct of the kernel's header, is left to that.
    """
    base, given = defaults

    def ctype(item: tuple[str, Constant]) -> str:
        return {bool: "bool", int: "int"}.get(type(item[1]), "auto")

    def declared(item: tuple[str, Constant]) -> str:
        return f"k{item[0]} = {str(item[1]).lower() if isinstance(item[1], bool) else item[1]}"

    lines = [filled(f"using {key} = {value};" for key, value in types.items())]
    stated = [item for item in constants.items() if given.get(item[0]) != item[1]]
    for kind, items in groupby(stated, ctype):
        line = f"    static constexpr {kind} "
        for number, one in enumerate(map(declared, items)):
            if number and len(line) + len(one) + 3 > WIDTH:
                lines.append(f"{line};\n")
                line = f"    static constexpr {kind} {one}"
            else:
                line += f", {one}" if number else one
        lines.append(f"{line};\n")
    return f"struct {name}{f' : {base}' if base else ''} {{\n" + "".join(lines) + "};\n"


def shared_memory_text(call: str, needed: int) -> str:
    """Has the compiler compare the bytes of shared memory that the plan gives a kernel with its own count."""
    return f'static_assert({call}::kSharedBytes == {needed}, "the plan and the kernel disagree about shared memory");\n'


def includes(headers: Iterable[str]) -> str:
    """The first lines of a unit."""
    return "".join(f'#include "{header}"\n' for header in headers)


@dataclass(frozen=True)
class Stage:
    """What one step of a plan adds to it: headers, text, launches, and sizes of scratch buffers."""

    headers: tuple[str, ...] = ()
    text: str = ""
    launches: tuple[Launch, ...] = ()
    scratch: tuple[int, ...] = ()

    def plan(self, arch: str) -> Plan:
        """The plan that has this step alone."""
        return Plan(includes(self.headers) + self.text, arch, self.launches, self.scratch)


def joined(stages: Sequence[Stage]) -> Stage:
    """The stages as one, in order."""
    headers = dict.fromkeys(header for stage in stages for header in stage.headers)
    return Stage(
        tuple(headers),
        "".join(stage.text for stage in stages),
        tuple(launch for stage in stages for launch in stage.launches),
        tuple(size for stage in stages for size in stage.scratch),
    )
