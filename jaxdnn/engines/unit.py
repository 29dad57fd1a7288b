"""The entry point of a kernel: its parameters, the call that it fills in with them, and what it is launched with.

Kernels take one structure, `call`, by reference; an entry point has the driver's plain parameters instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxdnn.plan import Argument, Scalar, TensorMap


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
        + "".join(f"    call.{parameter.field} = {value(parameter)};\n" for parameter in found)
        + f"    jaxdnn::{kernel}(call);\n}}\n"
    )


def arguments(found: Sequence[Parameter]) -> tuple[Argument, ...]:
    """What an entry point is launched with."""
    return tuple(parameter.argument for parameter in found if not isinstance(parameter.argument, int))


def struct_text(name: str, types: Mapping[str, str], constants: Mapping[str, bool | int | str | list[str]]) -> str:
    """What a kernel is compiled with: types, and flags, integers, named values and lists of named integers."""

    def constant(key: str, value: bool | int | str | list[str]) -> str:
        match value:
            case bool():
                return f"bool k{key} = {str(value).lower()}"
            case int():
                return f"int k{key} = {value}"
            case str():
                return f"auto k{key} = {value}"
            case list():
                return f"int k{key}[] = {{{', '.join(value) or 0}}}"

    lines = [f"using {key} = {value};" for key, value in types.items()]
    lines += [f"static constexpr {constant(*item)};" for item in constants.items()]
    return f"struct {name} {{\n" + "".join(f"    {line}\n" for line in lines) + "};\n"
