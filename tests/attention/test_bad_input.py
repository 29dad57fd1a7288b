"""Bad input is a TypeError or a ValueError while tracing, and says what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn

Q, K = (jnp.ones(shape, jnp.float32) for shape in ((2, 5, 4, 8), (2, 7, 2, 8)))
SLOPES = jnp.ones(4, jnp.float32)


def call(query=Q, key=K, value=K, *arrays, **keywords):
    return lambda: jaxdnn.dot_product_attention(query, key, value, *arrays, **keywords)


BAD = {
    # arrays
    "heads that don't divide": (
        call(*(jnp.ones((2, 7, n, 8), jnp.float32) for n in (4, 3, 3))),
        ValueError,
        "query has 4 heads and key 3; query heads must be a multiple of key heads",
    ),
    "no key heads": (call(key=K[:, :, :0], value=K[:, :, :0]), ValueError, "query has 4 heads and key 0"),
    "head sizes": (call(query=Q[..., :4]), ValueError, "query and key must have the same head size"),
    "lengths of key and value": (call(value=K[:, :3]), ValueError, "key and value must have the same length"),
    "heads of key and value": (call(value=K[:, :, :1]), ValueError, "key and value .* the same heads"),
    "batch sizes": (call(query=Q[:1]), ValueError, r"the same batch size; got query float32\[1, 5, 4, 8\]"),
    "two dimensions": (call(query=Q[0, 0]), ValueError, r"query must have shape \(batch, length, heads"),
    "mixed dtypes": (call(query=Q.astype("bfloat16")), TypeError, "one dtype; got query bfloat16"),
    "integers": (call(*(x.astype(int) for x in (Q, K, K))), TypeError, "query must have one of the dtypes bfloat16"),
    "no array": (call(query=None), TypeError, "query must be an array"),
    # what is added to scores
    "bias that does not broadcast": (
        call(bias=jnp.ones((2, 4, 7, 5))),
        ValueError,
        r"bias must broadcast to \(batch, heads, queries, keys\), here \(2, 4, 5, 7\); got \(2, 4, 7, 5\)",
    ),
    "bias of key heads": (call(bias=jnp.ones((2, 1, 1))), ValueError, "bias must broadcast"),
    "five dimensions": (call(bias=jnp.ones((1, 1, 1, 1, 1))), ValueError, "bias must broadcast"),
    "boolean bias": (call(bias=jnp.ones((5, 7), bool)), TypeError, "which keys are visible is mask="),
    "sinks of key heads": (call(sinks=jnp.ones(2)), ValueError, r"sinks must have shape \(4,\); got \(2,\)"),
    "scale that is traced": (
        lambda: jax.jit(lambda s: call(scale=s)())(0.5),
        TypeError,
        "scale must be a real number, known when tracing; got .*; multiply query by what is an array, and pass scale=1",
    ),
    "cap of zero": (call(logits_soft_cap=0.0), ValueError, "logits_soft_cap must be positive and finite, .*or None"),
    "cap beyond all": (call(logits_soft_cap=float("inf")), ValueError, "must be positive and finite, .* got inf"),
    "cap whose reciprocal is none": (
        call(logits_soft_cap=1e-39),
        ValueError,
        "as it and its reciprocal are in float32",
    ),
    # masks
    "mask of floats": (
        call(mask=jnp.ones((5, 7))),
        TypeError,
        "mask must be boolean.* what is added to scores is bias=",
    ),
    "mask that does not broadcast": (call(mask=jnp.ones((4, 7), bool)), ValueError, "mask must broadcast"),
    "causal that is no bool": (call(is_causal=1), TypeError, "is_causal must be True or False"),
    "window below zero": (call(local_window_size=(-1, 2)), ValueError, "local_window_size must not be negative"),
    "window of three": (call(local_window_size=(1, 2, 3)), TypeError, r"a pair \(left, right\)"),
    "window of a float": (call(local_window_size=1.5), TypeError, "must be an int, or a pair"),
    "lengths of another shape": (
        call(key_value_seq_lengths=jnp.array([3])),
        ValueError,
        r"key_value_seq_lengths must have shape \(2,\), a length for each batch element; got \(1,\)",
    ),
    "lengths of floats": (call(query_seq_lengths=jnp.ones(2)), TypeError, "query_seq_lengths must be integers"),
    "segments of one length": (
        call(segment_ids=jnp.zeros(5, int)),
        ValueError,
        r"segment_ids of keys must have shape \(7,\) or \(2, 7\); got \(5,\); as one array",
    ),
    "segments beyond 32 bits": (
        call(Q, Q, Q, segment_ids=np.array([3, 2**32 - 1, 0, 3, 3], "uint32")),
        ValueError,
        "segment_ids must fit 32-bit integers; got values from 0 to 4294967295: number them anew",
    ),
    "segments of 64 bits": (
        call(Q, Q, Q, segment_ids=np.array([1, 2**32 + 1, 1, 1, 1])),
        ValueError,
        "segment_ids must fit 32-bit integers; got values from 1 to 4294967297",
    ),
    "positions that Python counts": (
        call(Q, Q, Q, is_causal=True, positions=([0, 2**32 - 1, 1, 1, 1], None)),
        ValueError,
        "positions must fit 32-bit integers; got values from 0 to 4294967295",
    ),
    "segments of queries alone": (
        call(segment_ids=(jnp.zeros(5, int), None)),
        ValueError,
        "segment_ids must be of queries and of keys",
    ),
    "three positions": (call(positions=(None, None, None)), ValueError, "a pair for queries and keys; got 3"),
    "positions of another batch": (
        call(positions=(jnp.zeros((3, 5), int), None)),
        ValueError,
        r"positions of queries must have shape \(5,\) or \(2, 5\)",
    ),
    "alignment of nothing": (
        call(causal_alignment="bottom_right"),
        ValueError,
        "says where a causal mask or a window lies, and there is none",
    ),
    "alignment and positions": (
        call(is_causal=True, causal_alignment="bottom_right", positions=(jnp.arange(5), None)),
        ValueError,
        "contradict each other",
    ),
    "unknown alignment": (
        call(is_causal=True, causal_alignment="lower_right"),
        ValueError,
        'must be "top_left" or "bottom_right"',
    ),
    # functions of scores
    "score_mod that changes the shape": (
        call(score_mod=lambda score, *_: jnp.stack([score, score])),
        ValueError,
        r"score_mod must return one score.*got float32\[2\]",
    ),
    "score_mod that returns two": (
        call(score_mod=lambda score, *_: (score, score)),
        ValueError,
        "must return one score",
    ),
    "score_mod that compares": (call(score_mod=lambda score, *_: score > 0), ValueError, r"one score.*got bool\[\]"),
    "score_mod of a traced array": (
        lambda: jax.jit(lambda t: call(score_mod=lambda score, *_: score * t)())(2.0),
        ValueError,
        "score_mod closes over an array that is being traced.* pass it in score_mod_operands",
    ),
    "mask_mod of a traced array": (
        lambda: jax.jit(lambda t: call(mask_mod=lambda *_: t > 0)())(2.0),
        ValueError,
        "mask_mod closes over an array that is being traced",
    ),
    "score_mod with too few parameters": (
        call(score_mod=lambda score: score),
        TypeError,
        r"score_mod is called as score_mod\(score, batch, head, query, key\)",
    ),
    "operands that it does not take": (
        call(score_mod=lambda a, b, c, d, e: a + b + c + d + e, score_mod_operands=[SLOPES]),
        TypeError,
        r"score_mod\(score, batch, head, query, key, \*operands\)",
    ),
    "operands of nothing": (call(score_mod_operands=[SLOPES]), ValueError, "1 score_mod_operands, and no score_mod"),
    "one operand for a sequence": (
        call(score_mod=lambda score, *_: score, score_mod_operands=SLOPES),
        TypeError,
        r"score_mod_operands must be a sequence of arrays; got float32\[4\]",
    ),
    "mask_mod that returns a score": (call(mask_mod=lambda *_: 1.0), ValueError, "whether one key is visible"),
    "no function": (call(mask_mod=True), TypeError, "mask_mod must be a function; got True"),
    # dropout
    "rate of one": (call(dropout_rate=1.0, dropout_rng=jax.random.key(0)), ValueError, "at least 0 and less than 1"),
    "rate below zero": (call(dropout_rate=-0.1), ValueError, "at least 0 and less than 1"),
    "no key": (call(dropout_rate=0.1), ValueError, r"needs dropout_rng=, a key such as jax.random.key\(0\)"),
    "two keys": (
        call(dropout_rate=0.1, dropout_rng=jax.random.split(jax.random.key(0))),
        ValueError,
        "dropout_rng must be one key",
    ),
    "a number for a key": (call(dropout_rate=0.1, dropout_rng=0.5), TypeError, "dropout_rng must be one key"),
    # others
    "unknown implementation": (call(implementation="flash"), ValueError, 'None, "xla" or "cudnn"; got \'flash\''),
    "torch's keyword": (call(attn_mask=None), TypeError, "did you mean mask="),
    "partial results of another shape": (
        lambda: jaxdnn.combine_attention((Q, Q[..., 0]), (Q[:1], Q[:1, ..., 0])),
        ValueError,
        "both outs must have one shape",
    ),
    "partial results of integers": (
        lambda: jaxdnn.combine_attention((jnp.ones((1, 1, 1), int), jnp.ones((1, 1))), (Q, Q[..., 0])),
        TypeError,
        r"first must be floating-point arrays out and log-sum-exp; got int",
    ),
    "partial results that are numbers": (
        lambda: jaxdnn.combine_attention((1.0, 1.0), (1.0, 1.0)),
        TypeError,
        "first must be floating-point arrays",
    ),
    "a partial result alone": (lambda: jaxdnn.combine_attention(Q, Q), TypeError, r"first must be a pair.*; got float"),
}


@pytest.mark.parametrize(("function", "kind", "words"), BAD.values(), ids=BAD)
def test_says_what_was_expected(function, kind, words):
    with pytest.raises(kind, match=words) as caught:
        function()
    assert str(caught.value).startswith(("dot_product_attention: ", "combine_attention: "))
