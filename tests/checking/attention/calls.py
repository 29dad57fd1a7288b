"""Small calls of `dot_product_attention`, and arrays for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from checking.attention import problems
from jaxdnn.planning.calls import find_calls

TF32 = 2.0**-10  # the distance of neighbours
CAUSAL = {"is_causal": True}
ALIGNED = CAUSAL | {"causal_alignment": "bottom_right"}
WINDOW = {"local_window_size": (40, 20)}
RESIDUAL = {"return_residual": True}


def call(sizes, heads=(2, 1), batch=1, dtype="bfloat16", **keywords):
    """The call of `dot_product_attention` for (queries, keys, head size, value's head size)."""
    arrays, named, function = attention(sizes, heads, batch, dtype, keywords)
    (found,) = find_calls(function, *arrays, **named)
    return found


def attention(sizes, heads, batch, dtype, keywords):
    """Its arrays, its named arrays, and the function of them, whose arrays may have their heads before positions."""
    queries, keys, size, value_size = sizes
    shapes = [(queries, heads[0], size), (keys, heads[1], size), (keys, heads[1], value_size)]
    heads_first = keywords.pop("heads_first", False)
    named = named_arrays(keywords, batch, queries, keys)

    def turned(array):
        return jnp.swapaxes(array, 1, 2) if heads_first else array

    def function(*vectors, **others):
        return jaxdnn.dot_product_attention(*map(turned, vectors), **others, **keywords)

    arrays = [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape in shapes]
    return [jax.eval_shape(turned, array) for array in arrays], named, function


def mapped(sizes, heads, dtype, **keywords):
    """Likewise of two batches of queries, mapped, that attend to the same keys and values."""
    queries, keys, size, value_size = sizes
    shapes = [(2, 1, queries, heads[0], size), (1, keys, heads[1], size), (1, keys, heads[1], value_size)]
    function = jax.vmap(functools.partial(jaxdnn.dot_product_attention, **keywords), in_axes=(0, None, None))
    (found,) = find_calls(function, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    assert found.problem.value.batch_stride == 0
    return found


def named_arrays(keywords, batch, queries, keys):
    """Those of a call's keywords that are arrays, which this takes from them."""
    arguments = ("sinks", "bias", "mask", "mask_mod_operands", "score_mod_operands", "key_value_seq_lengths")
    named = {name: keywords.pop(name) for name in arguments if name in keywords}
    for name in ("segment_ids", "positions"):
        if keywords.pop(name, False):
            named[name] = tuple(jax.ShapeDtypeStruct((batch, length), "int32") for length in (queries, keys))
    if keywords.pop("lengths", False):
        named |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), jax.ShapeDtypeStruct((batch,), "int32"))
    return named


def operand(name, type_, lengths):
    random = np.random.default_rng(len(name))
    if name in ("query_lengths", "key_lengths"):
        # Some, none, and all of the axis.
        return np.resize([lengths[name] // 2 + 3, 0, lengths[name]], type_.shape).astype("int32")
    if name == "query_offset":
        return random.integers(-60, 60, type_.shape, "int32")
    if name.endswith("segments"):  # documents one after the other, some of which nobody asks for, and padding
        ids = np.sort(random.integers(0, 3, type_.shape, "int32"), -1)
        ids[-1] = np.arange(type_.shape[-1]) // 50 % 3  # with others in between
        return np.where(np.arange(type_.shape[-1]) < type_.shape[-1] - 9, ids, -1)
    if name.endswith("positions"):
        found = np.sort(random.integers(0, 400, type_.shape, "int32"), -1)
        # Of one element in order, so far apart that ends of blocks of 64 and 48 are as far as the band allows.
        found[0] = np.arange(type_.shape[-1]) + (13 if "query" in name else 0)
        return found
    if type_.dtype == bool:  # neighbours that are all visible, or invisible, or some
        row, column = np.ogrid[: type_.shape[-2], : type_.shape[-1]]
        others = np.arange(np.prod(type_.shape[:-2])).reshape(*type_.shape[:-2], 1, 1)
        kind = (row // 150 + column // 130 + others) % 3
        return (kind == 0) | (kind == 1) & (random.random(type_.shape) < 0.3)
    if name == "batch_index":
        return np.arange(type_.shape[0], dtype=type_.dtype)
    if name == "seeds":
        return random.integers(0, 2**32, type_.shape, "uint32")
    if np.issubdtype(type_.dtype, np.integer):
        return np.sort(random.integers(3, 9, type_.shape, type_.dtype), -1)  # documents one after the other
    return random.standard_normal(type_.shape).astype(type_.dtype)


def arrays(one):
    lengths = {"query_lengths": one.problem.query_length, "key_lengths": one.problem.key_length}
    return [operand(name, type_, lengths) for name, type_ in one.signature.operands.items()]


def check(one, operands, found):
    """Against the problem, in float64. Weights are rounded to 16 bits, or to tf32, and so is their sum of values."""
    wanted = problems.run(one.problem, operands, list(one.signature.results.values()))
    dtype = one.problem.query.dtype
    tolerance, of_log = 3 * float(jnp.finfo(dtype).eps), 1e-5
    if dtype == "float32":
        tolerance, of_log = 3 * TF32, TF32  # of scores too
    for name, got, want in zip(one.spec.results, found, wanted, strict=True):
        bound = tolerance * max(1, float(np.max(np.abs(want), initial=0, where=np.isfinite(want))))
        rtol, atol = (1e-6, of_log) if "log" in name else (0, bound)
        np.testing.assert_allclose(np.float64(got), want, rtol=rtol, atol=atol, err_msg=name)


def bias(*shape, dtype="bfloat16"):
    return {"bias": jax.ShapeDtypeStruct(shape, dtype)}


def slopes(score, batch, head, query, key):
    """ALiBi's."""
    del batch
    return score - jnp.exp2(-4.0 * (head + 1)) * abs(query - key)


def dropping(score, batch, head, query, key):
    """Scores of -infinity and one row that is not finite."""
    del batch
    return jnp.where((query + key) % 3 == 0, -jnp.inf, jnp.where((query == 7) & (head == 1), jnp.inf, score))


def stripes(batch, head, query, key, width):
    """Different for each head, with rows that see nothing."""
    del batch
    return ((query - key) % width[head] < 2) & (query % 5 != 3)


def same_document(batch, head, query, key, documents):
    """Two lookups for each score."""
    del head
    return documents[batch, query] == documents[batch, key]


def mask(*shape):
    return {"mask": jax.ShapeDtypeStruct(shape, "bool")}


DROPOUT = {"dropout_rate": 0.6, "dropout_rng": jax.random.key(0)}


def everything(length):
    return {"segment_ids": True, "score_mod": slopes, **bias(1, 1, length, length), **mask(1, 1, length, length)}


WIDTHS = (jax.ShapeDtypeStruct((2,), "int32"),)
DOCUMENTS = (jax.ShapeDtypeStruct((2, 200), "int32"),)
SINKS = {"sinks": jax.ShapeDtypeStruct((2,), "float32")}
# Masks that are more than arithmetic of coordinates.
MASKED = {
    "mask": call((150, 300, 64, 64), (4, 2), 2, **mask(2, 1, 150, 300), **RESIDUAL),
    "mask of keys, causal": call((130, 141, 32, 32), (2, 1), 2, **mask(2, 1, 1, 141), **CAUSAL, **RESIDUAL),
    "mask of heads": call((75, 200, 64, 64), (2, 2), 2, **mask(1, 2, 75, 200), **bias(1, 2, 75, 200)),
    "stripes": call((130, 200, 64, 64), (2, 1), mask_mod=stripes, mask_mod_operands=WIDTHS, lengths=True, **RESIDUAL),
    "documents": call((200, 200, 64, 64), (2, 2), 2, mask_mod=same_document, mask_mod_operands=DOCUMENTS, **RESIDUAL),
    "segments": call((200, 300, 64, 64), (2, 1), 2, segment_ids=True, **RESIDUAL),
    "segments, causal": call((300, 300, 32, 32), (2, 1), 2, segment_ids=True, **CAUSAL, **RESIDUAL),
    "positions": call((200, 300, 64, 64), (2, 1), 2, positions=True, **WINDOW, **RESIDUAL),
    "positions, lengths": call((100, 140, 64, 64), (2, 1), 2, positions=True, lengths=True, **CAUSAL, **SINKS),
    "everything": call((200, 200, 64, 64), (2, 1), 2, **everything(200), **DROPOUT, **CAUSAL, **SINKS, **RESIDUAL),
}
