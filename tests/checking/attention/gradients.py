"""Small calls of `dot_product_attention`'s gradients, arrays for them, and functions of their scores."""

import jax
import jax.numpy as jnp
import numpy as np

from checking.attention import problems
from checking.attention.calls import TF32, attention, operand
from jaxdnn.planning.calls import find_differentiated_calls


def hiding(score, batch, head, query, key):
    """Scores of -infinity, of whole rows, too."""
    del batch
    return jnp.where(((query + key) % 3 == 0) | (query == 7) & (head == 1), -jnp.inf, 2 * score)


def shifted(score, batch, head, query, key):
    """Infinite at the first query that isn't there."""
    del batch, head, key
    return score + 1 / (130 - query)


def scaled(score, batch, head, query, key, scale):
    """One number in two places."""
    del batch, head
    return score * scale - scale**2 * abs(query - key)


SCALE = (jax.ShapeDtypeStruct((), "float32"),)


class Gradients:
    """The forward and the backward call of `dot_product_attention`, differentiated by some of its operands.

    `sizes` are queries, keys, head size and value's head size; "f" in `by` stands for what functions of scores load.
    """

    def __init__(self, sizes, heads=(2, 1), batch=1, dtype="bfloat16", by="qkv", **keywords):
        vectors, named, function = attention(sizes, heads, batch, dtype, keywords)

        def called(query, key, value, *others):
            all_three = zip("qkv", (query, key, value), strict=True)
            vectors = [array if name in by else jax.lax.stop_gradient(array) for name, array in all_three]
            given = jax.tree.unflatten(jax.tree.structure(named), others)
            for name in {"bias", "score_mod_operands"} & {*given} if "f" not in by else ():
                given[name] = jax.lax.stop_gradient(given[name])
            return function(*vectors, **given)

        self.forward, self.backward = find_differentiated_calls(called, *vectors, *jax.tree.leaves(named))
        self.problem = self.backward.problem

    def operands(self, **given):
        """Of the backward call: random ones but for those that are `given`, and the results of the forward one."""
        problem = self.problem
        random = np.random.default_rng(0)
        lengths = {"query_lengths": problem.query_length, "key_lengths": problem.key_length}
        found = {}
        for name, type_ in self.backward.signature.operands.items():
            if jnp.issubdtype(type_.dtype, jnp.floating):
                found[name] = random.standard_normal(type_.shape).astype(type_.dtype)
            else:
                found[name] = operand(name, type_, lengths)
        found |= given
        types = self.forward.signature.results
        results = problems.run(
            self.forward.problem, [found[name] for name in self.forward.signature.operands], list(types.values())
        )
        found |= {name: result.astype(types[name].dtype) for name, result in zip(types, results, strict=True)}
        return [found[name] for name in self.backward.signature.operands]

    def results(self):
        """Arrays for them."""
        return [np.zeros(type_.shape, type_.dtype) for type_ in self.backward.signature.results.values()]

    def check(self, operands, found, problem=None):
        """Against the problem, or a variant of it, in float64. Weights and scores' gradients are rounded to 16 bits or
        tf32.
        """
        types = self.backward.signature.results
        wanted = problems.run(problem or self.problem, operands, found)
        dtype = self.problem.query.dtype
        tolerance = 3 * (TF32 if dtype == "float32" else float(jnp.finfo(dtype).eps))
        for name, got, want in zip(types, found, wanted, strict=True):
            bound = 1e-5 if name == "d_sinks" and dtype != "float32" else tolerance
            bound *= max(1, float(np.max(np.abs(want), initial=0)))
            np.testing.assert_allclose(np.float64(got), want, rtol=0, atol=bound, err_msg=name)
