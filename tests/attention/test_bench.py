"""The benchmark's calls compute what they say, jaxdnn's and the plain ones alike."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn.bench import attention
from jaxdnn.bench.attention import Call

DENSE = Call(2, 36, 36, 4, 4, 8, "float32")
CALLS = [
    DENSE,
    replace(DENSE, kind="causal", causal=True, key_heads=2),
    replace(DENSE, kind="windowed", causal=True, window=7),
    replace(DENSE, kind="packed", causal=True, documents=4),
    replace(DENSE, kind="biased", bias=True),
    replace(DENSE, kind="soft-capped", soft_cap=0.5),
    replace(DENSE, kind="causal float16", causal=True, dtype="float16"),
    replace(DENSE, kind="decoding", queries=1, key_heads=2),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.kind or "dense")
def test_both_compute_the_same(call):
    case = attention.case(call, gradient=True)
    assert case.sample is not None
    operands = case.operands(jax.random.key(0))
    for implementation in (case.jaxdnn, case.xla):
        results = jax.jit(implementation.run)(*implementation.prepare(*operands))
        for found, exact in case.sample(operands, results):
            np.testing.assert_allclose(found, exact, rtol=0, atol=16 * float(jnp.finfo(call.dtype).eps))
            assert exact.shape[1] == min(call.queries, 16)


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        ({}, 36 * 36),
        ({"causal": True}, 36 * 37 // 2),
        ({"causal": True, "window": 7}, 36 * 8 - 7 * 8 // 2),
        # 36 positions of documents of 1 to 8
        ({"causal": True, "documents": 8}, sum(n * (n + 1) // 2 for n in range(1, 9))),
        ({"documents": 8}, sum(n * n for n in range(1, 9))),
    ],
    ids=str,
)
def test_what_is_masked_counts_for_no_operations(changes, pairs):
    forward, both = (attention.case(replace(DENSE, **changes), gradient=gradient).flops for gradient in (False, True))
    assert forward == 2 * 2 * DENSE.batch * DENSE.heads * pairs * DENSE.head_size
    assert both == 3.5 * forward


def test_decoding_is_bounded_by_memory():
    case = attention.case(replace(DENSE, queries=1, key_heads=2), gradient=False)
    assert case.flops == 0
    assert case.bytes == 4 * 2 * 8 * (2 * 4 + 2 * 36 * 2)
    assert case.shape == "2 x 1:36 x 4:2 x 8"


def test_a_gpu_gets_calls_of_networks_too(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    cases = list(attention.cases())
    kinds = {case.call.partition("attention")[0].strip() for case in cases}
    assert kinds == {"", "causal", "windowed", "packed", "biased", "soft-capped", "decoding"}
    assert len({str(case) for case in cases}) == len(cases)
    # Sixteen thousand tokens in two thousand features
    dense = [case for case in cases if case.call == "attention forward" and case.dtype == "bfloat16"]
    assert {case.bytes for case in dense} == {4 * 2 * 2**14 * 2**11}
