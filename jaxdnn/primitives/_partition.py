"""How a call is split over devices: the dimensions that the op allows, along the axes of the mesh that arrays ask for.

What both operands have split and the op sums over is summed where it lies, and the sum scattered where the result is
wished split.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jaxdnn.spec import Spec

Types = Sequence[jax.ShapeDtypeStruct]


def partitioned_call(spec: Spec, whole: Mesh | None) -> Callable[..., tuple[jax.Array, ...]]:
    """The call as a function that the partitioner may split over devices, along the dimensions that the op allows.

    `whole` is the mesh that collectives name, where the partitioner's is but a part of it.
    """

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return spec.bind(*operands)

    def factors(operands: Types, results: Types) -> tuple[list[Any], list[Any], frozenset[str]]:
        named, whole = spec.factors(spec.signature(operands, results))
        levels = range(len(spec.batch))
        carries = spec.carries
        of_operands = [(*(f"b{i}" for i in levels if carries[name][i]), *named[name]) for name in spec.operands]
        return of_operands, [(*(f"b{i}" for i in levels), *named[name]) for name in spec.results], whole

    def rule(mesh: Mesh, operand_types: Sequence[Any], result_types: Sequence[Any]) -> SdyShardingRule:
        del mesh
        of_operands, of_results, unsplit = factors(*map(_typed, (operand_types, result_types)))
        # In the order in which they appear, as the rule's verifier wants them.
        ordered = dict.fromkeys(
            factor for array in (*of_operands, *of_results) for factor in array if factor in unsplit
        )
        return SdyShardingRule(tuple(of_operands), tuple(of_results), need_replication_factors=tuple(ordered))

    def partition(mesh: Mesh, operand_shapes: Types, result_shapes: Types) -> tuple[object, ...]:
        of_operands, of_results, unsplit = factors(operand_shapes, result_shapes)
        share = spec.share(spec.signature(operand_shapes, result_shapes))
        results = [*zip(of_results, result_shapes, strict=True)]
        # Where arrays ask for different things, what is summed over and split alike in all that have it comes first,
        # then what a result asks for. No axis of the mesh serves twice.
        kept = {factor for dimensions in of_results for factor in dimensions}
        splits = list(map(_splits, of_operands, operand_shapes))
        having = [*zip(of_operands, splits, strict=True)]
        alike = [
            {factor: names}
            for split in splits
            for factor, names in split.items()
            if factor not in kept and all(other.get(factor) == names for of, other in having if factor in of)
        ]
        axes: dict[str, tuple[str, ...]] = {}
        free = set(mesh.axis_names)
        for split in (*alike, *(_splits(*pair) for pair in results), *splits):
            for factor, wished in split.items():
                names = tuple(name for name in wished if name in free)
                if share is not None and names and factor not in unsplit and factor not in axes:
                    axes[factor] = names
                    free -= set(names)

        def sharding(dimensions: Sequence[str], scattered: Mapping[str, tuple[str, ...]]) -> NamedSharding:
            given = {**axes, **scattered}
            return NamedSharding(mesh, PartitionSpec(*(given.get(factor) for factor in dimensions)))

        def summed(dimensions: Sequence[str]) -> set[str]:
            return {name for factor, names in axes.items() if factor not in dimensions for name in names}

        def scattered(dimensions: Sequence[str], array: jax.ShapeDtypeStruct) -> dict[str, tuple[str, ...]]:
            """What a result asks for of the axes that it is summed over, where sizes are multiples of theirs."""
            sizes = dict(zip(dimensions, array.shape, strict=True))
            return {
                factor: names
                for factor, names in _splits(dimensions, array).items()
                if factor not in axes
                and summed(dimensions).issuperset(names)
                and sizes[factor] % math.prod(mesh.shape[name] for name in names) == 0
            }

        def total(partial_sum: jax.Array, dimensions: Sequence[str], scattered: Mapping[str, tuple[str, ...]]) -> Any:
            for factor, names in scattered.items():
                place = dimensions.index(factor)
                partial_sum = lax.psum_scatter(partial_sum, names, scatter_dimension=place, tiled=True)
            whole = summed(dimensions).difference(*scattered.values())
            return lax.psum(partial_sum, tuple(sorted(whole))) if whole else partial_sum

        scatters = [scattered(*pair) for pair in results]

        def shard(*operands: jax.Array) -> tuple[jax.Array, ...]:
            # A mesh of explicit axes around the call is none of a shard's business; JAX 0.11 would constrain the
            # shardings of the sum's own computation.
            with use_abstract_mesh(AbstractMesh((), ())):
                partial_sums = (share or spec).bind(*operands)
                return tuple(map(total, partial_sums, of_results, scatters))

        of_arguments = tuple(sharding(dimensions, {}) for dimensions in of_operands)
        return whole or mesh, shard, tuple(map(sharding, of_results, scatters)), of_arguments

    function = custom_partitioning(call)
    function.def_partition(partition, sharding_rule=rule)
    return function


def _splits(dimensions: Sequence[str], array: jax.ShapeDtypeStruct) -> dict[str, tuple[str, ...]]:
    """The axes of the mesh over which an array's dimensions are split."""
    pairs = zip(dimensions, array.sharding.spec, strict=False)  # type: ignore[union-attr]
    return {factor: names if isinstance(names, tuple) else (names,) for factor, names in pairs if names}


def _typed(types: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes of MLIR tensor types. A sharding rule needs no dtype."""
    return [jax.ShapeDtypeStruct(tuple(t.shape), jnp.float32) for t in types]
