"""`Meaning`: what a jaxpr computes, as a key. Of two traces of one function, the jaxprs differ and this does not."""

import hashlib
import struct
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.linear_util import WrappedFun

# Rules of derivatives, which are parameters of these, are no part of what is computed; nor what transposes the last.
_RULED = ("custom_jvp_call", "custom_vjp_call", "custom_lin")


class Meaning:
    """What a jaxpr computes: equal to another's that computes the same, by the same operations.

    Attributes:
      held: of what only this trace has, so that nothing is kept for it: functions, random keys, arrays that are more
        than a number or not known yet. All but NumPy's arrays are equal to themselves alone.
      transposed: whether it is linear by a rule, `jax.custom_vjp`'s, that its transpose alone runs.
    """

    def __init__(self, jaxpr: ClosedJaxpr | Jaxpr) -> None:
        self.held: list[object] = []
        self.transposed = False
        self._key = self._jaxpr(jaxpr)
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Meaning) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return hashlib.sha256(repr(self._key).encode()).hexdigest()[:16]

    def _jaxpr(self, jaxpr: ClosedJaxpr | Jaxpr) -> Hashable:
        inner: Any = getattr(jaxpr, "jaxpr", jaxpr)  # which JAX 0.11 makes one type
        variables = [*inner.constvars, *inner.invars]
        types = [variable.aval for variable in variables]
        numbers = {variable: number for number, variable in enumerate(variables)}

        def read(atom: Any) -> Hashable:
            return (atom.aval, self._value(atom.val)) if isinstance(atom, Literal) else numbers[atom]

        equations = []
        for equation in inner.eqns:
            inputs = tuple(map(read, equation.invars))
            for variable in equation.outvars:
                numbers[variable] = len(numbers)
            made = tuple(variable.aval for variable in equation.outvars)
            equations.append((equation.primitive, inputs, made, self._parameters(equation)))
        consts = tuple(map(self._value, getattr(jaxpr, "consts", ())))
        return tuple(types), consts, tuple(equations), tuple(map(read, inner.outvars))

    def _parameters(self, equation: JaxprEqn) -> Hashable:
        ruled = equation.primitive.name in _RULED
        self.transposed |= equation.primitive.name == "custom_lin"
        parameters = equation.params.items()
        return tuple((name, self._value(value)) for name, value in parameters if not (ruled and _is_function(value)))

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            return self._jaxpr(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._value, value))
        if isinstance(value, (jax.Array, np.ndarray, np.generic)):
            known = not isinstance(value, Tracer) and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
            if known and np.size(value) == 1:
                array = np.asarray(value)
                return array.shape, array.dtype, array.tobytes()
            if isinstance(value, np.ndarray):  # which may be another by the next call, though it is the same
                self.held.append(value)
                return value.shape, value.dtype, hashlib.sha256(value.tobytes()).digest()
        elif isinstance(value, float):
            return struct.pack("d", value)  # which tells 0.0 from -0.0, and has a NaN equal to itself
        elif not _is_function(value) and isinstance(value, Hashable):
            return type(value), value
        self.held.append(value)
        return _Itself(value)


class _Itself:
    """Something that is equal to itself alone."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._held is other._held

    def __hash__(self) -> int:
        return id(self._held)

    def __repr__(self) -> str:
        return type(self._held).__name__


def _is_function(value: object) -> bool:
    return isinstance(value, WrappedFun) or (callable(value) and not isinstance(value, type))
