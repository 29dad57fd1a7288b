"""Which knobs of the direct norm kernels to try for a call, best first.

Numbers in brackets are those of "What was tried" in benchmarks/results/norm_kernels.md.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from jaxdnn.device import resident_clusters
from jaxdnn.engines.norm.direct.knobs import MAX_CLUSTER, NARROW_BYTES, NormKnobs, Room, vector_columns

MOST_CANDIDATES = 8
# Rows that are on their way into the L2 cache before a block wants them. Too many push each other out [10].
PREFETCH_BYTES = 4 << 20
LEAST_PREFETCHED = 2048  # bytes of a row
LONG_ROW, SKEWED_VECTOR = 3000, 4  # bytes of a skewed one, and columns that a thread reads of it at a time [22]
Join = Literal["cluster", "launches"]


def power_of_two(least: int) -> int:
    """The smallest power of two that is not smaller than `least`."""
    return 1 << max(0, least - 1).bit_length()


class Heuristic(Room):
    """Orders the configurations of one call.

    The memory system is fastest with about 64 KiB of reads in flight on each multiprocessor (less does not cover the
    latency, more slows the copy alone), and when blocks are scheduled in the order of the rows, not when a fixed set of
    blocks strides over them and drifts apart [1, 11].
    """

    def candidates(self) -> Iterator[NormKnobs]:
        found = self.forward_candidates() if self.forward else self.backward_candidates()
        return itertools.islice(dict.fromkeys(found), MOST_CANDIDATES)

    def clusters(self) -> list[int]:
        """Parts of a row in one launch: one if a block can hold it, more if not or if the rows are few."""
        splits = [1, 2, 4, MAX_CLUSTER] if self.target.compute_capability >= 90 else [1]
        splits = [count for count in splits if count == 1 or self.problem.columns >= 4096 * count]
        return list(dict.fromkeys([*(count for count in reversed(splits) if self.few(count)), *splits]))

    def few(self, splits: int) -> bool:
        """Whether rows in so many splits leave half of the device idle all the same."""
        return 2 * self.problem.rows * self.problem.groups * splits <= self.target.sm_count

    def layout(
        self, splits: int, elements: int, threads: int, join: Join = "cluster", widest: int = 32
    ) -> NormKnobs | None:
        """`elements` columns a thread, `widest` an access at most, in blocks of at least `threads`, if it can be."""
        vector = min(self.vector, elements, widest)
        columns = self.problem.columns
        each = -(-vector_columns(columns, vector) // (vector * splits))
        threads_per_row = power_of_two(-(-each * vector // elements))
        # Four neighbouring lanes, and a warp of a row in splits or a skewed one, even if that leaves a thread fewer
        # columns. Narrow accesses are few of a thread, and neighbours' where a warp has enough lanes [21].
        warp = splits > 1 or columns % vector
        narrow = vector * min(self.row_sizes) < NARROW_BYTES
        lanes = min(32, power_of_two(-(-each // 4))) if narrow else min(4, power_of_two(each))
        threads_per_row = max(threads_per_row, 32 if warp else lanes)
        if threads_per_row > 1024 or (splits - 1) * each * vector >= columns:
            return None
        rows = max(1, threads // threads_per_row) if splits == 1 else 1
        return NormKnobs(
            vector, -(-each // threads_per_row), threads_per_row, rows_per_block=rows, splits=splits, join=join
        )

    def forward_candidates(self) -> Iterator[NormKnobs]:
        # Parameters that outweigh the rows are kept for several of them, in a ring of four turns, or come from the L1
        # cache by the shortest way, `near` [9, 10].
        heavy = sum(self.parameter_sizes) > 2 * sum(self.row_sizes)
        size = max(self.row_sizes)
        if self.skewed and self.parameter_sizes:
            yield from self.skewed_candidates(64 // size)
        # float32 rows have 64 KiB in flight by themselves, others in a ring of four turns [14, 19].
        fillings = (self.long_ring(4), self.direct) if size < 4 else (self.direct, self.long_ring(4))
        launches = [knobs for filling in fillings for knobs in self.split(64 // size, filling)]
        for splits in self.clusters():
            many = splits > 1 and not self.few(splits)
            if many and splits == 2:
                yield from self.clusters_in_turns()
            if many and splits == 4:
                yield from launches
            row_bytes = size * self.problem.columns // splits
            # 64 bytes of a row a thread, four accesses in flight; more, or more threads, in rows that need it.
            choices = [(64, 512), (128, 512), (64, 1024), (128, 1024)]
            if many and splits > 2:
                choices = [(128, 512), (128, 1024)]
            for thread_bytes, most_threads in choices:
                if row_bytes > thread_bytes * most_threads:
                    continue
                elements = min(thread_bytes // size, thread_bytes // 4 * self.vector)
                direct = self.direct(self.layout(splits, elements, 256))
                if thread_bytes > 64:
                    if direct and direct.threads * direct.blocks_per_sm >= 1024:
                        yield direct
                    continue
                # Two turns with a ring in rows of 2 to 16 KiB, one turn in longer ones [5].
                ringed = len(self.row_sizes) == 1 and row_bytes >= 2048 and (heavy or row_bytes < 16384)
                turns = 4 if heavy and row_bytes >= 16384 else 2
                ring = self.ring(self.layout(splits, elements, 128), turns)
                if heavy and splits == 1 and row_bytes > 8192:
                    near = self.near(elements)
                    yield from [near] if near else []
                yield from (knobs for knobs in ([ring, direct] if ringed else [direct, ring]) if knobs)
        yield from launches

    def clusters_in_turns(self) -> Iterator[NormKnobs]:
        """Clusters that work through several rows, one after the other: fewer starts than with one row each [16].

        In pairs of blocks the next row is on its way in a ring. Where more blocks wait for each other, a second block
        on the multiprocessor works meanwhile; of rows that leave no room for one, the next row is on its way.
        """
        if len(self.row_sizes) > 1:
            return
        for splits, most_threads in ((2, 512), (4, 512), (MAX_CLUSTER, 512), (MAX_CLUSTER, 1024)):
            layouts = [self.layout(splits, size // max(self.row_sizes), 256) for size in (64, 128)]
            layout = next((layout for layout in layouts if layout and layout.threads <= most_threads), None)
            if layout is None or (most_threads == 1024) != (layout.threads == 1024):
                continue
            if splits == 2 and layout.threads == 512 and (turns := self.in_turns(layout, 1)) > 1:
                ring = self.ring(layout, turns)
                yield from [ring] if ring else []
            blocks = 1024 // layout.threads
            if (turns := self.in_turns(layout, blocks)) > 1:
                several = replace(layout, parameters="memory", blocks_per_sm=blocks, turns=turns)
                if blocks == 1:
                    several = self.within_shared(replace(several, stages=1))
                knobs = self.within_registers([several], blocks)
                yield from [knobs] if knobs and knobs.blocks_per_sm == blocks else []

    def in_turns(self, layout: NormKnobs, blocks_per_sm: int) -> int:
        """Up to four, a power of two, with which as many clusters as run at once take hardly longer than with one; one
        where each has two rows at most [24].
        """
        rows = self.problem.rows * self.problem.groups
        at_once = resident_clusters(layout.splits, self.target.sm_count) * blocks_per_sm
        if rows <= 2 * at_once:
            return 1
        rounds = {turns: turns * math.ceil(rows / (turns * at_once)) for turns in (4, 2, 1)}
        return next(turns for turns, taken in rounds.items() if taken <= 1.15 * rounds[1])

    def skewed_candidates(self, elements: int) -> Iterator[NormKnobs]:
        """Parameters of a skewed row come one at a time: they are kept for eight, where registers hold them [13], or
        come from the L1 cache with each of longer rows; and one parameter comes as soon as the row. Four columns at a
        time, of which fewer reach past a row than of eight [22].
        """
        row_bytes, *others = (size * self.problem.columns for size in self.row_sizes)
        widest = self.vector if others else SKEWED_VECTOR
        if len(self.parameter_sizes) == 1 and row_bytes >= LEAST_PREFETCHED and not others:
            direct = self.direct(self.layout(1, elements, 256, widest=widest))
            yield from [direct] if direct else []
        ring, near = self.long_ring(8)(self.layout(1, elements, 128, widest=widest)), self.near(elements)
        if ring is not None and ring.threads * ring.blocks_per_sm < 384:
            ring = None
        light = max(self.parameter_sizes) <= max(self.row_sizes) and not others
        first, second = (near, ring) if light and row_bytes >= LONG_ROW else (ring, near)
        yield from (knobs for knobs in (first, second) if knobs)

    def split(self, elements: int, complete: Callable[[NormKnobs | None], NormKnobs | None]) -> Iterator[NormKnobs]:
        """Rows over two launches, in splits for 256 threads."""
        splits = -(-self.problem.columns // (256 * elements))
        knobs = complete(self.layout(splits, elements, 256, "launches")) if splits > 1 else None
        if knobs is not None:
            yield knobs

    def direct(self, layout: NormKnobs | None) -> NormKnobs | None:
        """One turn, straight into registers, 1,024 threads on a multiprocessor."""
        if layout is None:
            return None
        layout = replace(layout, turns=1, blocks_per_sm=max(1, 1024 // layout.threads))
        variants = [layout, self.with_ahead(layout), replace(layout, parameters="memory")]
        if layout.vectors == 1 and self.parameter_sizes:
            # Threads of one access each need all the others in flight, and parameters take registers [15].
            variants = [replace(layout, parameters="memory", blocks_per_sm=max(1, 2048 // layout.threads)), *variants]
        variants = [variant for knobs in variants for variant in (self.with_prefetch(knobs), knobs)]
        return self.within_registers(variants, layout.blocks_per_sm)

    def near(self, elements: int) -> NormKnobs | None:
        """`direct`, with parameters read from the L1 cache without gaps, for many rows of at most 512 threads.

        Where each thread of a warp reads 32 neighbouring bytes, every access takes the cache twice as long as where it
        reads 16, next to its neighbour's.
        """
        widest = 16 // max(self.parameter_sizes)
        if self.skewed and len(self.row_sizes) == 1:
            widest = min(widest, SKEWED_VECTOR)
        layout = self.layout(1, elements, 256, widest=widest)
        if layout is None or layout.vector < widest or layout.threads > 512:
            return None
        layout = replace(layout, turns=1, blocks_per_sm=1024 // layout.threads)
        wave = self.target.sm_count * layout.blocks_per_sm * layout.rows_per_block
        ahead = self.with_ahead(layout)
        if not self.skewed and (self.problem.rows * self.problem.groups < 6 * wave or not ahead.ahead):
            return None
        return self.within_registers([self.with_prefetch(ahead), ahead], layout.blocks_per_sm)

    def with_ahead(self, layout: NormKnobs) -> NormKnobs:
        """Parameters from the L1 cache, two vectors before their use where they are wider than the rows [9]."""
        wider = self.words == 1 and max(self.parameter_sizes, default=0) > max(self.row_sizes)
        return replace(layout, parameters="memory", ahead=min(2, layout.vectors) if wider else 0)

    def with_prefetch(self, knobs: NormKnobs) -> NormKnobs:
        """Rows ahead for blocks of one turn, whose next row nothing else has asked for. A ring gains less [10]."""
        row_bytes = [size * self.problem.columns for size in self.row_sizes]
        if self.target.compute_capability < 90 or knobs.splits > 1 or self.words == 2:
            return knobs
        if min(row_bytes) < LEAST_PREFETCHED:
            return knobs
        return replace(knobs, prefetch=max(1, PREFETCH_BYTES // (sum(row_bytes) * knobs.rows_per_block)))

    def long_ring(self, most: int) -> Callable[[NormKnobs | None], NormKnobs | None]:
        """`ring` with up to so many turns, a power of two, as far as there are rows for all blocks."""

        def complete(layout: NormKnobs | None) -> NormKnobs | None:
            if layout is None:
                return None
            blocks = self.problem.rows * self.problem.groups * layout.splits // layout.rows_per_block
            turns = min(most, blocks // (self.target.sm_count * max(1, 512 // layout.threads)))
            return self.ring(layout, power_of_two(turns // 2 + 1)) if turns > 1 else None

        return complete

    def ring(self, layout: NormKnobs | None, turns: int) -> NormKnobs | None:
        """Several turns, two stages, 512 threads on a multiprocessor."""
        if layout is None or layout.vector * min(self.row_sizes) < 4:
            return None
        layout = replace(layout, turns=turns, stages=2, blocks_per_sm=max(1, 512 // layout.threads))
        return self.within_registers([self.within_shared(layout)], 1)

    def backward_candidates(self) -> Iterator[NormKnobs]:
        for strict in (True, False):
            for splits in self.clusters():
                for elements in (16, 8, 32):
                    knobs = self.backward(self.backward_layout(splits, elements // self.words), strict)
                    if knobs:
                        yield knobs
        # Two launches overtake clusters of four [12].
        yield from self.split(16 // self.words, self.backward)

    def backward_layout(self, splits: int, elements: int) -> NormKnobs | None:
        """Blocks of 256 threads, or of two rows of 256 [7]."""
        if self.skewed:
            return self.layout(splits, elements, 256, widest=4)  # eight columns take more registers to trim [13]
        layout = self.layout(splits, elements, 256)
        if layout and layout.threads_per_row == 256 and max(self.row_sizes) < 4:
            return self.layout(splits, elements, 512)
        return layout

    def backward(self, layout: NormKnobs | None, strict: bool = False) -> NormKnobs | None:
        """The first variant that fits, fastest first; if `strict`, with as many stages as it wants."""
        if layout is None or (layout.splits > 2 and layout.join == "cluster"):
            return None
        few = layout.vector * layout.vectors * self.words <= 8  # registers hold such a row at no cost
        layout = replace(layout, blocks_per_sm=max(1, (1024 if few else 512) // layout.threads))
        fewest = max(1, 512 // layout.threads)
        if layout.join == "launches" or layout.vector * min(self.row_sizes) < 4:
            variants = [layout, replace(layout, parameters="memory")]
            # Rows in flight beside the one at hand, where that has not 64 KiB on a multiprocessor by itself [14].
            wanted = self.staged(layout)
            if layout.join == "launches" and wanted.stages > 1:
                variants = [self.within_shared(wanted), *variants]
            return self.within_registers(variants, fewest)
        # A row that is read twice is widened four numbers at a time, which takes fewer registers than eight.
        shape = layout
        if layout.vector > 4:
            shape = replace(layout, vector=4, vectors=layout.vectors * layout.vector // 4)
        again = replace(shape, hold=False)
        variants = [layout, again, replace(again, parameters="shared"), replace(again, parameters="memory")]
        if (
            layout.splits == 1
            and not few
            and not self.skewed
            and (layout.threads_per_row >= 512 or max(self.row_sizes) >= 4)
        ):
            # In one large block, rows held in registers cost more than a second reading [8].
            variants = [*variants[1:3], layout, variants[3]]
        if layout.threads_per_row > 512:
            # 64 registers have no room for parameters [7].
            variants.sort(key=lambda knobs: knobs.parameters != "shared")
        for variant in variants:
            if variant.parameters == "shared" and not self.shareable(variant):
                continue
            wanted = self.staged(variant)
            knobs = self.within_registers([self.within_shared(wanted)], fewest)
            if (
                knobs
                and (knobs.stages or knobs.parameters != "shared")
                and (knobs.stages == wanted.stages or not strict)
            ):
                return knobs
        return None

    def staged(self, knobs: NormKnobs) -> NormKnobs:
        """Stages for 64 KiB in flight; one more where a long row keeps its stage busy for two passes [7]."""
        columns = knobs.split_columns * knobs.rows_per_block
        stage = sum(self.row_sizes) * columns * knobs.blocks_per_sm
        return replace(knobs, stages=min(4, max(1, 65536 // stage) + (not knobs.hold and columns > 8192)))
