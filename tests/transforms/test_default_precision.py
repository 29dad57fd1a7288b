"""As most users run JAX: without float64. Everything else in these tests runs with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checking.cases import F64, TABLE
from checking.compare import assert_close, engines
from checking.subprocesses import TESTS, run_python
from checking.transforms import vjp, with_cotangents

CASES = [case for case in (*TABLE.plain, *TABLE.deep) if F64 not in case.dtypes.values()]

CHILD = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
import jaxdnn
from checking.cases import AttentionCase, ConvolutionCase, MatmulCase, NormCase
from checking.compare import as_tuple
from checking.transforms import vjp, with_cotangents

assert not jax.config.jax_enable_x64
folder, engine, *cases = sys.argv[1:]
for i, case in enumerate(map(eval, cases)):
    first, *others = case.primals()
    wide = case.call(*(np.float64(array) for array in (first, *others)))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(wide))
    with jaxdnn.options(engine=engine):
        results = jax.jit(lambda *a: vjp(as_tuple(case.call), *a))(*with_cotangents(case))
        if first.size < 100:
            jax.jit(jax.hessian(lambda first: jnp.sum(jnp.sin(as_tuple(case.call)(first, *others)[0]))))(first)
    leaves = jax.tree.leaves(results)
    assert all(leaf.dtype != jnp.float64 for leaf in leaves)
    np.savez(f"{folder}/{i}.npz", *[np.asarray(leaf, np.float32) for leaf in leaves])
"""


@pytest.mark.parametrize("engine", dict.fromkeys(engine for case in CASES for engine in engines(case.op)))
def test_without_float64(engine, tmp_path):
    run_python(CHILD, str(tmp_path), engine, *map(repr, CASES), PYTHONPATH=str(TESTS))
    for i, case in enumerate(CASES):
        stored = list(np.load(tmp_path / f"{i}.npz").values())
        names = [*case.outputs.values(), *case.dtypes.values()]
        narrow = [array.astype(jnp.dtype(dtype)) for array, dtype in zip(stored, names, strict=True)]
        structure = jax.tree.structure((case.cotangents(), case.primals()))
        assert_close(jax.tree.unflatten(structure, narrow), vjp, case, with_cotangents)
