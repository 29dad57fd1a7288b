"""Cases of `dot_product_attention`: what a call is, and what it makes of its masks."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from checking import reference
from checking.cases.base import Case
from checking.cases.dtypes import F32, F64, SHORT
from checking.cases.modifiers import MASK_MODS, SCORE_MODS, WIDTHS


@dataclass(frozen=True, repr=False)
class AttentionCase(Case):
    """One call of `dot_product_attention`. Integers and masks are constants, functions of the case.

    Attributes:
      batch: None for arrays without one.
      queries, keys, heads, key_heads, size, value_size: sizes.
      dtype: of query, key, value and bias.
      bias: its shape, as letters: "b", "n", "t", "s" or "1" for each dimension; None for none.
      mask: likewise of a boolean array.
      sinks: whether there are any.
      causal, window, alignment: as the public function takes them.
      lengths: which lengths are given: "", "query", "key" or both, "query key".
      segments: likewise; padding is among them.
      positions: likewise.
      soft_cap: or None.
      score_mod, mask_mod: names.
      dropout: rate.
      residual: whether the log-sum-exp is returned.
      data: what the query holds: "normal", or "nan" in one row.
    """

    batch: int | None = 2
    queries: int = 5
    keys: int = 7
    heads: int = 2
    key_heads: int = 2
    size: int = 4
    value_size: int = 4
    dtype: str = F32
    bias: str | None = None
    mask: str | None = None
    sinks: bool = False
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    alignment: str = "top_left"
    lengths: str = ""
    segments: str = ""
    positions: str = ""
    soft_cap: float | None = None
    score_mod: str | None = None
    mask_mod: str | None = None
    dropout: float = 0.0
    residual: bool = False

    op = "attention"

    @property
    def dtypes(self) -> dict[str, str]:
        names = ["query", "key", "value", *["bias"] * bool(self.bias), *["sinks"] * self.sinks]
        count = len(SCORE_MODS[self.score_mod][1]) if self.score_mod else 0
        return dict.fromkeys(names, self.dtype) | {f"operand{i}": self.compute_dtype for i in range(count)}

    @property
    def compute_dtype(self) -> str:
        return F64 if self.dtype == F64 else F32

    @property
    def input_unit(self) -> float:
        """What factors of products are rounded to: on a GPU, those of float32 to tf32."""
        return (
            2.0**-11 if self.dtype == F32 and jax.default_backend() == "gpu" else float(jnp.finfo(self.dtype).eps) / 2
        )

    @property
    def score_unit(self) -> float:
        """By how much scores of two engines differ, relative to themselves: one may round float32 to tf32."""
        return self.input_unit if self.dtype == F32 and jax.default_backend() == "gpu" else 0.0

    @property
    def outputs(self) -> dict[str, str]:
        return {"out": self.dtype} | ({"log_sum_exp": self.compute_dtype} if self.residual else {})

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return 1 if self.batch is None else self.batch, self.heads, self.queries, self.keys

    def shape_of(self, name: str) -> tuple[int, ...]:
        batch = () if self.batch is None else (self.batch,)
        match name:
            case "query":
                return (*batch, self.queries, self.heads, self.size)
            case "key":
                return (*batch, self.keys, self.key_heads, self.size)
            case "value":
                return (*batch, self.keys, self.key_heads, self.value_size)
            case "out":
                return (*batch, self.queries, self.heads, self.value_size)
            case "log_sum_exp":
                return (*batch, self.queries, self.heads)
            case "bias":
                return self._over_scores(self.bias or "")
            case "sinks":
                return (self.heads,)
        sizes = SCORE_MODS[self.score_mod or ""][1][int(name.removeprefix("operand"))]
        return tuple(size if isinstance(size, int) else getattr(self, size) or 1 for size in sizes)

    def _over_scores(self, letters: str) -> tuple[int, ...]:
        sizes = dict(zip("bnts", self.scores, strict=True)) | {"1": 1}
        return tuple(sizes[letter] for letter in letters)

    def operand_values(self, name: str, values: np.ndarray) -> np.ndarray:
        if name == "query" and self.data == "nan":
            values = values.copy()
            values[..., self.queries // 2, 0, 0] = np.nan
        return values

    # ---- What is constant -------------------------------------------------------------------------------------------

    def _integers(self, name: str, low: int, high: int, *shape: int) -> np.ndarray:
        return np.random.default_rng(sum(map(ord, name))).integers(low, high, shape)

    def lengths_of(self, which: str) -> np.ndarray | None:
        """The lengths of "query" or "key": one of them is longer than the axis."""
        if which not in self.lengths.split():
            return None
        length = {"query": self.queries, "key": self.keys}[which]
        return np.array([(length + 3) if i % 3 == 2 else (length * (i + 1)) // 3 for i in range(self.scores[0])], int)

    def segments_of(self, which: str) -> np.ndarray | None:
        if not self.segments:
            return None
        length = {"query": self.queries, "key": self.keys}[which]
        ids = self._integers(f"segments of {which}", 0, 2, self.scores[0], length)
        return np.where(np.arange(length) % 4 == 3, -1, np.sort(ids, -1))

    def positions_of(self, which: str) -> np.ndarray | None:
        if which not in self.positions.split():
            return None
        length = {"query": self.queries, "key": self.keys}[which]
        return self._integers(f"positions of {which}", 0, length, self.scores[0], length)

    def mask_array(self) -> np.ndarray | None:
        if not self.mask:
            return None
        return self._integers("mask", 0, 4, *self._over_scores(self.mask)) > 0

    def dropout_rng(self) -> Any:
        return jax.random.key(7) if self.dropout else None

    # ---- The call ---------------------------------------------------------------------------------------------------

    @property
    def keywords(self) -> dict[str, Any]:
        """Of the public function, apart from the arrays that can be differentiated."""

        def pair(of: Any) -> Any:
            both = (of("query"), of("key"))
            return None if all(one is None for one in both) else both

        given = {
            "is_causal": self.causal,
            "local_window_size": self.window,
            "causal_alignment": self.alignment,
            "query_seq_lengths": self.lengths_of("query"),
            "key_value_seq_lengths": self.lengths_of("key"),
            "segment_ids": pair(self.segments_of),
            "positions": pair(self.positions_of),
            "mask": self.mask_array(),
            "logits_soft_cap": self.soft_cap,
            "dropout_rate": self.dropout,
            "dropout_rng": self.dropout_rng(),
            "return_residual": self.residual,
        }
        if self.score_mod:
            given["score_mod"] = SCORE_MODS[self.score_mod][0]
        if self.mask_mod:
            given |= {"mask_mod": MASK_MODS[self.mask_mod], "mask_mod_operands": [WIDTHS]}
        return given

    def call(self, *arrays: Any, **changes: Any) -> Any:
        named = dict(zip(self.operands, arrays, strict=True))
        operands = [named.pop(name) for name in self.operands if name.startswith("operand")]
        return jaxdnn.dot_product_attention(**named, score_mod_operands=operands, **(self.keywords | changes))

    def reference(self, rounding: Any, *arrays: Any) -> Any:
        return reference.attention(self, rounding, **dict(zip(self.operands, arrays, strict=True)))

    # ---- What the call means ----------------------------------------------------------------------------------------

    def visible(self) -> np.ndarray:
        """Which keys each query sees: (batch, heads, queries, keys), or what broadcasts to it."""
        batch, _, queries, keys = self.scores
        b, n, t, s = np.indices(self.scores)
        query, key = self._positions()
        rows, columns = (self.lengths_of(which) for which in ("query", "key"))
        there = np.ones(self.scores, bool)
        distance = key - query
        if self.alignment == "bottom_right":
            ends = [
                np.full(batch, size) if given is None else np.minimum(given, size)
                for given, size in ((rows, queries), (columns, keys))
            ]
            distance = distance - (ends[1] - ends[0])[b]
        if self.causal:
            there &= distance <= 0
        left, right = self.window or (None, None)
        if left is not None:
            there &= distance >= -left
        if right is not None:
            there &= distance <= right
        if rows is not None:
            there &= t < rows[b]
        if columns is not None:
            there &= s < columns[b]
        if self.segments:
            of_query, of_key = self.segments_of("query"), self.segments_of("key")
            there &= (of_query[b, t] == of_key[b, s]) & (of_query[b, t] >= 0)
        if self.mask:
            there &= np.broadcast_to(self.mask_array(), self.scores)
        if self.mask_mod == "stripes":
            there &= (query - key) % WIDTHS[n % 2] != 1
        if self.mask_mod == "prefix":
            there &= (key <= query) | (key < WIDTHS[b % 2])
        return there

    def modified(self, score: Any, *operands: Any) -> Any:
        """What `score_mod` makes of scores."""
        b, n, _, _ = np.indices(self.scores)
        return SCORE_MODS[self.score_mod or ""][0](score, b, n, *self._positions(), *operands)

    def _positions(self) -> tuple[np.ndarray, np.ndarray]:
        b, _, t, s = np.indices(self.scores)
        both = (self.positions_of("query"), t), (self.positions_of("key"), s)
        query, key = (places if given is None else given[b, places] for given, places in both)
        return query, key

    def kept(self) -> np.ndarray:
        """Dropout's factors: (batch, heads, queries, keys)."""
        batch, heads, queries, keys = self.scores
        with jax.ensure_compile_time_eval():
            seeds = np.asarray(jax.random.bits(self.dropout_rng(), (batch, heads, 2), "uint32"))
        words = philox(seeds[:, :, None, None], np.arange(queries)[:, None], np.arange(-(-keys // 4)))
        bits = words.reshape(batch, heads, queries, -1)[..., :keys]
        threshold = round(self.dropout * 2**32)
        return (bits >= threshold) / (1 - threshold / 2**32)

    def __str__(self) -> str:
        """The id of a test: "attention-2x5x2x4-7x2x4-bf16-causal"."""
        batch = [] if self.batch is None else [self.batch]
        parts = ["attention", "x".join(map(str, [*batch, self.queries, self.heads, self.size]))]
        parts.append("x".join(map(str, [self.keys, self.key_heads, self.value_size])))
        parts.append(SHORT[self.dtype])
        flags = ("sinks", "causal", "residual")
        parts += [name for name in flags if getattr(self, name)]
        words = ("bias", "mask", "window", "lengths", "segments", "positions", "soft_cap", "score_mod", "mask_mod")
        named = [
            *words,
            "dropout",
            *["alignment"] * (self.alignment != "top_left"),
            *["data"] * (self.data != "normal"),
        ]
        parts += [f"{name}:{getattr(self, name)}" for name in named if getattr(self, name)]
        return "-".join(parts).replace(" ", "")


def philox(seeds: np.ndarray, rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Philox4x32-10 with integers of 64 bits; four words for each counter (group, row, 0, 0)."""
    low = np.uint64(0xFFFFFFFF)
    shape = np.broadcast_shapes(seeds.shape[:-1], rows.shape, groups.shape)
    first, second = (seeds[..., i].astype(np.uint64) for i in range(2))
    counter = [np.broadcast_to(np.asarray(x, np.uint64), shape) for x in (groups, rows, 0, 0)]
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        counter = [(right >> 32) ^ counter[1] ^ first, right & low, (left >> 32) ^ counter[3] ^ second, left & low]
        first, second = (first + np.uint64(0x9E3779B9)) & low, (second + np.uint64(0xBB67AE85)) & low
    return np.stack(counter, -1)
