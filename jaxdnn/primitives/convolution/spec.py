"""What a convolution is: `ConvolutionSpec`. Everything about its epilogue is `FusedSpec`'s.

The three arrays of a convolution stand in one relation (`Window`), and each direction computes one of them from the two
others. So the gradient in an operand is the call whose result that operand's array is, with the same windows: there is
nothing else to say about transposition.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec

from jaxdnn.engines.convolution.problem import ROLES, Convolution, Role, Tensor, Window
from jaxdnn.engines.product.problem import Matrix, Product
from jaxdnn.plan import Operand
from jaxdnn.primitives._define import MultilinearOp, bind
from jaxdnn.primitives.convolution import axes as of
from jaxdnn.primitives.convolution.reference import convolved, lax_parameters
from jaxdnn.primitives.fused.dtypes import allows_rounding, gradient_dtype
from jaxdnn.primitives.fused.sharding import explicit_sharding, partitioned
from jaxdnn.primitives.fused.spec import FusedSpec
from jaxdnn.spec import Signature, Typed

_FACTORS: Mapping[Role, tuple[Role, Role]] = {
    "image": ("filter", "output"),
    "filter": ("image", "output"),
    "output": ("image", "filter"),
}


@dataclass(frozen=True, repr=False)
class ConvolutionSpec(FusedSpec):
    """epilogue(one array of a convolution, from the two others, operands...).

    Channels come last: image [n, places, groups * c], filter [window, c, groups * k], output [n, places, groups * k],
    each with the mapped axes that it carries in front.

    Attributes:
      result: the array that is computed. a and b are the others, in the order of `ROLES`.
      windows: one for each spatial dimension.
      group: the channels c and k of a group; None if all are one group.
      mapped_levels: for each mapped axis, whether image, filter and output carry it.
      precision: as JAX has it in its canonical form.
    """

    op = "convolution"
    problems = (Convolution, Product)

    result: Role = "output"
    windows: tuple[Window, ...] = ()
    group: tuple[int, int] | None = None
    mapped_levels: tuple[of.Carried, ...] = ()
    precision: Any = None

    @property
    def title(self) -> str:
        return {"output": "convolution", "image": "convolution dgrad", "filter": "convolution wgrad"}[self.result]

    @property
    def factor_roles(self) -> Mapping[str, Role]:
        """Which arrays a and b are."""
        return dict(zip("ab", _FACTORS[self.result], strict=True))

    @property
    def exact(self) -> bool:
        """Whether float32 operands may not be rounded to tf32."""
        return not allows_rounding(self.precision)

    # ------------------------------------------------------------ axes

    @property
    def mapped_axes(self) -> tuple[of.Axis, ...]:
        """The mapped axes, outermost first."""
        return of.mapped_axes(self.mapped_levels)

    def axes(self, role: Role) -> tuple[of.Axis, ...]:
        """The axes of an array, in order."""
        return of.axes_of(role, self.mapped_axes, len(self.windows))

    def sizes(self, operands: Mapping[str, Typed]) -> dict[of.Axis, int]:
        """The size of every axis but spatial ones."""
        found: dict[of.Axis, int] = {}
        for name, role in self.factor_roles.items():
            shape, axes = jnp.shape(operands[name]), self.axes(role)
            # Groups and channels share the last dimension.
            found |= {axis: size for axis, size in zip(axes[:-2], shape[:-1], strict=True) if axis[0] != "s"}
            last = axes[-1]
            found[last] = shape[-1] if self.group is None else self.group["ck".index(last[0])]
            found["g", 0] = 1 if self.group is None else shape[-1] // found[last]
        return found

    def shape_of(self, role: Role, sizes: Mapping[of.Axis, int]) -> tuple[int, ...]:
        """The shape of an array, from the sizes of axes."""
        sizes = {**sizes, **{("s", i): getattr(window, role) for i, window in enumerate(self.windows)}}
        *front, groups, channels = (sizes[axis] for axis in self.axes(role))
        return (*front, groups * channels)

    def shape(self, operands: Mapping[str, Typed]) -> tuple[int, ...]:
        return self.shape_of(self.result, self.sizes(operands))

    @property
    def _joining(self) -> int:
        """How many mapped axes, the last ones, are no more than further images."""
        found = 0
        for axis, _ in reversed(self.mapped_axes):
            if axis != "n":
                break
            found += 1
        return found

    @property
    def groups(self) -> tuple[int, int, int]:
        mapped = sum(carried[ROLES.index(self.result)] for carried in self.mapped_levels)
        batch = mapped - (0 if self.result == "filter" else self._joining)
        return batch, mapped - batch + 1 + len(self.windows), 1

    # ------------------------------------------------------------ meaning

    def multiply(self, a: jax.Array, b: jax.Array, dtype: str) -> jax.Array:
        sizes = self.sizes({"a": a, "b": b})
        result = self.shape_of(self.result, sizes)
        if 0 in (*a.shape, *b.shape, *result):
            return _nothing(a, b, result, dtype)

        def product(*arrays: jax.Array) -> jax.Array:
            return convolved(self, dict(zip(self.factor_roles.values(), arrays, strict=True)), dtype)

        sharding = self.sharding or self.told((a, b))
        # Axes are joined, and images cut, in ways that have no type where axes of a mesh are explicit.
        return product(a, b) if sharding is None else partitioned(product, sharding)(a, b)

    def mapped_product(self, axes: Mapping[str, int | None]) -> tuple[Self, Mapping[str, int]]:
        carried = {role: axes[name] is not None for name, role in self.factor_roles.items()}
        if not any(carried.values()):  # the epilogue's operands alone
            carried[self.factor_roles["a"]] = True
        carried[self.result] = True
        level = (carried["image"], carried["filter"], carried["output"])
        places = {name: 0 for name, role in self.factor_roles.items() if carried[role]}
        return self.replace(mapped_levels=(level, *self.mapped_levels)), places

    def transpose_product(
        self, name: str, wanted: ShapedArray, cotangent: jax.Array, operands: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        other = "b" if name == "a" else "a"
        dtype = gradient_dtype(operands[other].dtype)
        arrays = {self.result: cotangent.astype(dtype), self.factor_roles[other]: operands[other].astype(dtype)}
        gradient = self.plain(wanted.dtype.name).replace(
            result=self.factor_roles[name], sharding=explicit_sharding(wanted)
        )
        factors = {name: arrays[role] for name, role in gradient.factor_roles.items()}
        return {name: bind(gradient, factors)["y"]}

    # ------------------------------------------------------------ planning

    def product_factors(self) -> tuple[Mapping[str, tuple[str, ...]], tuple[str, ...], frozenset[str], frozenset[str]]:
        def named(role: Role) -> tuple[str, ...]:
            *front, _, (last, _) = self.axes(role)
            own = {axis: f"{role}_{axis[1]}" for axis in front if axis[0] == "s"}
            return (*(own.get(axis) or f"{axis[0]}_{axis[1]}" for axis in front), channels[last])

        # A device has whole groups. Where each channel is one, any device may have any; else all have all.
        whole = {f"{role}_{i}" for role in ROLES for i in range(len(self.windows))}
        channels = {"c": "c_0", "k": "k_0"}
        if self.group is not None:
            channels = {letter: "g_0" if self.group == (1, 1) else f"g_{letter}" for letter in "ck"}
            whole |= {"c_0", "k_0", "g_c", "g_k"}
        dimensions = {name: named(role) for name, role in self.factor_roles.items()}
        y = named(self.result)
        summed = {factor for factors in dimensions.values() for factor in factors} - {*y} - whole
        return dimensions, y, frozenset(summed), frozenset(whole)

    def told(self, arrays: Sequence[jax.Array]) -> NamedSharding | None:
        """The sharding of the result on explicit axes of a mesh, where those of a and b tell; JAX knows those of images
        alone. Places are split as the ones that they come from, where their number allows.
        """
        placed = [explicit_sharding(jax.typeof(array)) for array in arrays]
        sharding = next((one for one in placed if one is not None), None)
        if sharding is None:
            return None

        def labels(role: Role) -> list[Any]:
            *front, _, (channels, _) = self.axes(role)
            own = [(role, axis) if role == "filter" and axis[0] == "s" else axis for axis in front]
            return [*own, "g" if self.group == (1, 1) else channels]

        split: dict[Any, Any] = {}
        for one, role in zip(placed, self.factor_roles.values(), strict=True):
            pairs = zip(labels(role), () if one is None else one.spec, strict=False)
            split |= {label: names for label, names in pairs if names is not None}
        result = labels(self.result)
        shape = self.shape(dict(zip("ab", arrays, strict=True)))
        used = [name for names in split.values() for name in _names(names)]
        if split.keys() - {*result} or len({*used}) < len(used):
            return None
        sizes = dict(sharding.mesh.shape_tuple)
        counts = [prod(sizes[name] for name in _names(split.get(label))) for label in result]
        fitting = (size % count == 0 for size, count in zip(shape, counts, strict=True))
        spec = (split.get(label) if fits else None for label, fits in zip(result, fitting, strict=True))
        return sharding.update(spec=PartitionSpec(*spec))

    @property
    def seen(self) -> tuple[Any, Mapping[str, Any]]:
        return lax.conv_general_dilated_p, lax_parameters(self)

    def flops(self, signature: Signature) -> int:
        meetings = prod(int((window.meetings >= 0).sum()) for window in self.windows)
        mapped = next(iter(signature.results.values())).shape[: len(self.batch)]
        return 2 * meetings * prod((*mapped, *self.sizes(self._unmapped(signature)).values()))

    def _unmapped(self, signature: Signature) -> Mapping[str, Typed]:
        """The types of a and b without the axes that the reference maps."""
        types = {name: (signature.operands[name], sum(self.carries[name])) for name in self.factor_roles}
        return {name: jax.ShapeDtypeStruct(type_.shape[count:], type_.dtype) for name, (type_, count) in types.items()}

    def problem(self, signature: Signature) -> Convolution | Product | str:
        if signature.reason:
            return signature.reason
        sizes = self.sizes(self._unmapped(signature))
        shape = self.shape_of(self.result, sizes)
        if 0 in shape:  # though what it is reduced to may have some
            return "the result has no elements"
        fused = self.fused_problem(signature, shape)
        if isinstance(fused, str):
            return fused
        levels = self.mapped_axes
        joining = levels[len(levels) - self._joining :]
        batch = [axis for axis in levels[: len(levels) - self._joining] if sizes[axis] != 1]
        if any(not of.LETTERS[letter][ROLES.index(self.result)] for letter, _ in batch):
            return "a mapped axis is summed over"
        tensors = [self._tensor(name, role, signature, batch) for name, role in self.factor_roles.items()]
        if reasons := [tensor for tensor in tensors if isinstance(tensor, str)]:
            return reasons[0]
        program, operands, results = fused
        a, b = (tensor for tensor in tensors if isinstance(tensor, Tensor))
        count, n = prod(sizes[axis] for axis in batch), prod(sizes[axis] for axis in (*joining, ("n", 0)))
        if self.group is None and all(window.pointwise for window in self.windows):
            rows = n * prod(window.image for window in self.windows)
            return self._product(count, rows, sizes["c", 0], sizes["k", 0], a, b, *fused)
        return Convolution(
            result=self.result,
            batch=count,
            n=n,
            groups=sizes["g", 0],
            c=sizes["c", 0],
            k=sizes["k", 0],
            windows=self.windows,
            a=a,
            b=b,
            program=program,
            results=results,
            operands=operands,
            exact=self.exact,
        )

    def _product(
        self, batch: int, rows: int, c: int, k: int, a: Tensor, b: Tensor, program: Any, operands: Any, results: Any
    ) -> Product:
        """A convolution whose windows are single places: the places of all images are rows, their channels columns."""
        sizes = {"image": (rows, c), "filter": (c, k), "output": (rows, k)}
        matrices = {
            role: Matrix(tensor.buffer, tensor.dtype, *sizes[role], sizes[role][1], tensor.batch_stride)
            for role, tensor in zip(self.factor_roles.values(), (a, b), strict=True)
        }
        left: Role = "output" if self.result == "image" else "image"
        (right,) = matrices.keys() - {left}
        m, n, summed = {"output": (rows, k, c), "image": (rows, c, k), "filter": (c, k, rows)}[self.result]
        return Product(
            m=m,
            n=n,
            k=summed,
            batch=batch,
            a=matrices[left],
            b=(matrices[right],),
            program=program,
            results=results,
            operands=operands,
            a_transposed=self.result == "filter",
            b_transposed=self.result == "image",
            exact=self.exact,
        )

    def _tensor(self, name: str, role: Role, signature: Signature, batch: Sequence[of.Axis]) -> Tensor | str:
        """One of the arrays that are multiplied, or why it has no single stride along the batch."""
        array = signature.operands[name]
        *front, _, last = self.axes(role)
        strides = {axis: prod(array.shape[i + 1 :]) for i, axis in enumerate(front)}
        strides |= {last: 1, ("g", 0): 0 if self.group is None else self.group["ck".index(last[0])]}
        carried = [axis in strides for axis in batch]
        if any(carried) and not all(carried):
            return f"{role} carries some of the mapped axes and not others"
        return Tensor(
            buffer=Operand(signature.operand_index(name)),
            dtype=array.dtype.name,
            batch_stride=strides.get(batch[-1], 0) if batch else 0,
            n_stride=strides.get(("n", 0), 0),
            spatial_strides=tuple(strides["s", i] for i in range(len(self.windows))),
            group_stride=strides["g", 0],
            c_stride=strides.get(("c", 0), 0),
            k_stride=strides.get(("k", 0), 0),
        )


def _names(part: Any) -> tuple[str, ...]:
    """The axes of a mesh that a dimension is split over."""
    return part if isinstance(part, tuple) else () if part is None else (part,)


def _nothing(a: jax.Array, b: jax.Array, shape: Sequence[int], dtype: str) -> jax.Array:
    """Sums without terms; they vary over the same axes of a mesh as other sums of the arrays' elements."""
    zero = jnp.sum(a[(slice(0, 0),) * a.ndim]) * jnp.sum(b[(slice(0, 0),) * b.ndim])
    return jnp.broadcast_to(zero.astype(dtype), shape)


convolution = MultilinearOp(ConvolutionSpec)
