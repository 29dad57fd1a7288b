"""shard_map with its check of replication, under Auto and Explicit axes, whole and partially manual meshes."""

import functools

import jax
import pytest
from jax.sharding import AxisType

import jaxdnn
from checking.cases import TABLE
from checking.compare import as_tuple, assert_close, runs
from checking.sharding import placed


def arguments(case):
    return case.primals(), case.tangents(), case.cotangents()


def derivatives(function, primals, tangents, cotangents):
    """Forward and reverse mode, a hessian-vector product, and forward over reverse through the parameters."""

    def gradient(*primals):
        return jax.vjp(function, *primals)[1](cotangents)

    return {
        "vjp": (function(*primals), gradient(*primals)),
        "jvp": jax.jvp(function, primals, tangents)[1],
        "jvp of vjp": jax.jvp(gradient, primals, tangents)[1],
        "vjp of vjp": jax.vjp(gradient, *primals)[1](primals),
    }


def check_sharded(mesh, case, in_specs, out_spec, engine, **keywords):
    function = jax.shard_map(as_tuple(case.call), in_specs=in_specs, out_specs=out_spec, **keywords)
    specs = (in_specs, in_specs, (out_spec,) * len(case.outputs))
    with jax.set_mesh(mesh), jaxdnn.options(engine=engine):
        given = [placed(mesh, *pair) for pair in zip(specs, arguments(case), strict=True)]
        actual = jax.jit(functools.partial(derivatives, function))(*given)
    assert_close(actual, derivatives, case, arguments)


each_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
each_case = pytest.mark.parametrize(("case", "in_specs", "out_spec", "engine"), runs(TABLE.manual, on="cpu"))


@each_case
@each_kind
def test_rows(cpus, kind, case, in_specs, out_spec, engine):
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(kind,), devices=cpus)
    check_sharded(mesh, case, in_specs, out_spec, engine)


@each_case
@each_kind
def test_partially_manual(cpus, kind, case, in_specs, out_spec, engine):
    """One mesh axis is manual, the other still belongs to the partitioner (Auto) or to the types (Explicit)."""
    mesh = jax.make_mesh((2, 2), ("rows", "model"), axis_types=(AxisType.Auto, kind), devices=cpus)
    check_sharded(mesh, case, in_specs, out_spec, engine, axis_names={"rows"})
