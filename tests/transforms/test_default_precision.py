"""As most users run JAX: without float64. Everything else in these tests runs with it."""

import jax.numpy as jnp
import numpy as np
import pytest

from checking.cases import BF16, F32, NormCase
from checking.compare import assert_close, engines
from checking.subprocesses import TESTS, run_python
from checking.transforms import vjp, with_cotangents

CASES = [
    NormCase("layer_norm", (3, 17), scale=F32, bias=F32, statistics=True),
    NormCase("rms_norm", (9, 48), x=BF16, scale=F32, residual=BF16),
]

CHILD = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
import jaxdnn
from checking.cases import NormCase
from checking.compare import as_tuple
from checking.transforms import vjp, with_cotangents

assert not jax.config.jax_enable_x64
assert jaxdnn.layer_norm(np.ones((2, 8))).dtype == jnp.float32
for i, case in enumerate(map(eval, sys.argv[3:])):
    with jaxdnn.options(engine=sys.argv[2]):
        results = jax.jit(lambda *a: vjp(as_tuple(case.call), *a))(*with_cotangents(case))
        if case.rows * case.columns < 100:
            jax.hessian(lambda x: jnp.sum(jnp.sin(as_tuple(case.call)(x, *case.primals()[1:])[0])))(case.primals()[0])
    leaves = jax.tree.leaves(results)
    assert all(leaf.dtype != jnp.float64 for leaf in leaves)
    np.savez(f"{sys.argv[1]}/{i}.npz", *[np.asarray(leaf, np.float32) for leaf in leaves])
"""


@pytest.mark.parametrize("engine", engines())
def test_without_float64(engine, tmp_path):
    run_python(CHILD, str(tmp_path), engine, *map(repr, CASES), PYTHONPATH=str(TESTS))
    for i, case in enumerate(CASES):
        stored = list(np.load(tmp_path / f"{i}.npz").values())
        names = [*case.outputs.values(), *case.dtypes.values()]
        narrow = [array.astype(jnp.dtype(dtype)) for array, dtype in zip(stored, names, strict=True)]
        split = len(case.outputs)
        assert_close((tuple(narrow[:split]), tuple(narrow[split:])), vjp, case, with_cotangents)
