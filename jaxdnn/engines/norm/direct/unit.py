"""The plan that the direct norm engine's knobs make: translation unit, launches and scratch."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from jaxdnn.device import Target, resident_clusters
from jaxdnn.engines.norm.direct.knobs import STREAMED, NormKnobs, collapsed, read, vector_columns
from jaxdnn.engines.norm.problem import Rows
from jaxdnn.engines.unit import (
    Parameter,
    arguments,
    entry_text,
    includes,
    numbers,
    shared_memory_text,
    signature_text,
    struct_text,
)
from jaxdnn.plan import Launch, Scalar, Scratch

MAX_GRID = 2**31 - 1
REDUCE_THREADS = 1024  # kReduceThreads in norm/direct/reduce.cuh
Step = Literal["whole", "measure", "apply"]


class Call:
    """A norm call under given knobs: what `build` turns into a plan."""

    def __init__(self, knobs: NormKnobs, problem: Rows, target: Target) -> None:
        self.knobs, self.target = knobs, target
        self.problem = collapsed(problem)
        self.arrays = problem.arrays
        self.forward = not problem.backward
        self.direction = "forward" if self.forward else "backward"
        self.active = problem.active
        self.read = read(problem)
        self.streamed = [name for name in self.read if name in STREAMED]
        self.compute = self.problem.compute_dtype
        # Columns of each part, a multiple of the vector; the last part may be shorter.
        vectors = -(-vector_columns(self.problem.columns, knobs.vector) // knobs.vector)
        self.slice = -(-vectors // knobs.splits) * knobs.vector
        self.sums_over_splits = self.forward or "x" in self.active
        self.check()

    def check(self) -> None:
        knobs, columns = self.knobs, self.problem.columns
        if self.skewed:
            self.check_skewed()
        if self.slice > knobs.split_columns or (knobs.splits - 1) * self.slice >= columns:
            raise ValueError(
                f"direct norm: {knobs.splits} splits of {knobs.split_columns} columns don't fit a row of {columns}"
            )
        if knobs.stages and not self.copyable(*self.streamed):
            raise ValueError("direct norm: stages need accesses of at least 4 bytes; expected stages = 0")
        if knobs.parameters == "shared" and (not knobs.stages or not self.copyable("scale", "bias")):
            raise ValueError("direct norm: parameters = 'shared' needs stages and accesses of at least 4 bytes")
        if not self.forward and (knobs.ahead or knobs.prefetch):
            raise ValueError("direct norm: ahead and prefetch are knobs of the forward pass; expected 0")
        if knobs.prefetch:
            self.check_prefetch()
        if knobs.cluster > 1 and self.target.compute_capability < 90:
            raise ValueError(f"direct norm: {self.target.name} has no clusters; expected join = 'launches'")
        if (needed := max(map(self.shared_memory, self.steps))) > self.target.shared_memory:
            raise ValueError(
                f"direct norm: these knobs need {needed} bytes of shared memory, and a block of "
                f"{self.target.name} has {self.target.shared_memory}"
            )

    def check_prefetch(self) -> None:
        if self.target.compute_capability < 90:
            raise ValueError(f"direct norm: {self.target.name} has no bulk prefetch; expected prefetch = 0")
        if not self.knobs.turns:
            raise ValueError("direct norm: prefetch needs blocks in the order of the rows; expected turns > 0")

    def check_skewed(self) -> None:
        knobs, problem = self.knobs, self.problem
        reason = f"vector is {knobs.vector}, no divisor of the {problem.columns} columns, which needs"
        if problem.columns < knobs.vector:
            raise ValueError(f"direct norm: {reason} at least as many columns")
        if knobs.threads_per_row < 32:
            raise ValueError(f"direct norm: {reason} whole warps; got threads_per_row = {knobs.threads_per_row}")
        if knobs.parameters == "shared":
            raise ValueError(f"direct norm: {reason} parameters in registers or memory; got 'shared'")
        if problem.groups > 1 and problem.rows * problem.columns % knobs.vector:
            raise ValueError(f"direct norm: {reason} groups of a multiple of the vector; expected vector = 1")

    def itemsize(self, name: str) -> int:
        return self.arrays[name].itemsize

    def copyable(self, *names: str) -> bool:
        """Whether cp.async can copy these operands: 4, 8 or 16 bytes at a time."""
        return all(self.knobs.vector * self.itemsize(name) >= 4 for name in names if name in self.read)

    @property
    def skewed(self) -> bool:
        """Whether rows begin between vectors."""
        return self.problem.columns % self.knobs.vector != 0

    @property
    def period(self) -> int:
        """Turns after which rows begin at the same element of a vector again, if a block has more than one."""
        if self.turns == 1:
            return 1
        rows = self.knobs.vector // math.gcd(self.problem.columns, self.knobs.vector)
        return rows // math.gcd(rows, self.knobs.rows_per_block)

    @property
    def whole(self) -> int:
        """Vectors of each thread that lie before the last column in every row and split, however skewed."""
        knobs = self.knobs
        last = self.problem.columns - (knobs.splits - 1) * self.slice
        return min(knobs.vectors, last // (knobs.vector * knobs.threads_per_row))

    @property
    def exact(self) -> bool:
        """Whether every thread has the same number of columns."""
        return self.knobs.splits * self.knobs.split_columns == self.problem.columns

    @property
    def steps(self) -> tuple[Step, ...]:
        """Of the kernel's, one a launch."""
        split = self.knobs.splits > 1 and self.knobs.join == "launches" and self.sums_over_splits
        return ("measure", "apply") if split else ("whole",)

    def row_size(self, step: Step) -> int:
        """Bytes of a column that a step reads of a row."""
        if step == "apply" and "residual" in self.read:
            return self.itemsize("sum")
        return sum(self.itemsize(name) for name in self.streamed if step != "measure" or name != "d_sum")

    def shared_memory(self, step: Step) -> int:
        """What the kernel's own `kSharedBytes` says, which the unit asserts."""
        knobs = self.knobs
        compute = np.dtype(self.compute).itemsize
        slots = max(1, knobs.threads_per_row // 32) * knobs.cluster
        # norm/direct/forward.cuh, kMoments; the two sums of norm/direct/backward.cuh
        paired = not self.forward or (self.exact and knobs.threads_per_row * knobs.cluster <= 1024)
        values = 2 if self.problem.centered and paired else 1
        sums = 2 * values * knobs.rows_per_block * slots * compute if slots > 1 else 0
        sums += 16 if knobs.cluster > 1 else 0  # barriers of its two phases
        ring = knobs.stages * knobs.split_columns * knobs.rows_per_block * self.row_size(step)
        combine = 0
        if not self.forward and {"scale", "bias"} & {*self.active}:
            narrow = knobs.threads_per_row < 32
            partials = knobs.threads // 32 if narrow else knobs.rows_per_block
            combine = partials * knobs.split_columns * compute if partials > 1 or narrow else 0
        parameters = [self.itemsize(name) for name in self.read if name in ("scale", "bias")]
        places = knobs.split_columns * knobs.rows_per_block * sum(parameters) if knobs.parameters == "shared" else 0
        return -(-sums // 16) * 16 + places + max(ring, combine)

    @property
    def turns(self) -> int:
        """The knob, raised where a grid would be too small for all rows."""
        knobs, problem = self.knobs, self.problem
        most = MAX_GRID // (knobs.splits * problem.groups) * knobs.rows_per_block  # rows of one turn of all blocks
        return knobs.turns and max(knobs.turns, -(-problem.rows // most))

    @property
    def blocks_per_group(self) -> int:
        """Thread blocks, times `splits`, that share the rows of one group."""
        knobs, problem = self.knobs, self.problem
        if self.turns:
            return -(-problem.rows // (knobs.rows_per_block * self.turns * self.period)) * self.period
        needed = -(-problem.rows // knobs.rows_per_block)
        usable = knobs.cluster * resident_clusters(knobs.cluster, self.target.sm_count)
        most = usable * knobs.blocks_per_sm // (knobs.splits * problem.groups)
        return min(needed, max(1, most // self.period) * self.period)

    # ------------------------------------------------------------------------------------------------------ arguments

    def array(self, name: str) -> list[Parameter]:
        """An operand's pointer and, when there are several groups, its stride."""
        array = self.arrays[name]
        parameters = [Parameter(f"const jaxdnn::{array.dtype}*", name, name, array.buffer)]
        if self.problem.groups > 1:
            parameters += numbers("long long", **{f"{name}_stride": array.group_stride})
        return parameters

    def result(self, name: str) -> Parameter:
        array = self.arrays[name]
        return Parameter(f"jaxdnn::{array.dtype}*", name, name, array.buffer)

    def sum_type(self, name: str) -> str:
        """Of the sums that a block writes: the gradient's itself if the block has all of a group's rows."""
        return self.arrays[name].dtype if self.blocks_per_group == 1 and name in self.arrays else self.compute

    def scratch(self, name: str, index: int) -> Parameter:
        return Parameter(f"jaxdnn::{self.compute}*", name, name, Scratch(index))

    def sizes(self) -> list[Parameter]:
        rows = numbers("long long", rows=self.problem.rows)
        return rows + numbers(columns=self.problem.columns, slice=self.slice, blocks_per_group=self.blocks_per_group)

    def factors(self) -> list[Parameter]:
        values = {"inverse_columns": 1 / self.problem.columns, **dict(self.problem.factors)}
        ctype = f"jaxdnn::{self.compute}"
        return [Parameter(ctype, name, name, Scalar(self.compute, value)) for name, value in values.items()]

    # ------------------------------------------------------------------------------------------------------- the unit

    def config(self) -> str:
        """The text of the `Config` structure: types first, then constants."""
        knobs, active = self.knobs, self.active
        of = {name: array.dtype for name, array in self.arrays.items()}
        x = of["x"]
        types = {"X": x, "Scale": of.get("scale", x), "Compute": self.compute}
        flags = {"Centered": self.problem.centered, "Grouped": self.problem.groups > 1, "Scale": "scale" in of}
        if self.forward:
            types |= {"Y": of["y"], "Bias": of.get("bias", x)}
            types |= {"Residual": of.get("residual", x), "Sum": of.get("sum", x)}
            flags |= {"Bias": "bias" in of, "Residual": "residual" in of}
            flags |= {"StoreSum": "sum" in of, "Statistics": "rstd" in of}
        else:
            types |= {"Y": of["d_y"]}
            flags |= {f"D{name.capitalize()}": f"d_{name}" in self.read for name in ("sum", "mean", "rstd")}
            flags |= {"DX": "x" in active, "DScale": "scale" in active, "DBias": "bias" in active}
            flags |= {"Hold": knobs.hold}
            types |= {"ScaleSum": self.sum_type("d_scale"), "BiasSum": self.sum_type("d_bias")}
        flags |= {"ScaleOffset": "scale" in of and dict(self.problem.factors)["scale_offset"] != 0}
        flags |= {"Exact": self.exact, "Skewed": self.skewed}
        constants = {
            "Vector": knobs.vector,
            "Vectors": knobs.vectors,
            "Whole": self.whole,
            "ThreadsPerRow": knobs.threads_per_row,
            "RowsPerBlock": knobs.rows_per_block,
            "Splits": knobs.splits,
            "Cluster": knobs.cluster,
            "Turns": self.turns,
            "Period": self.period,
            "Stages": knobs.stages,
            "Ahead": knobs.ahead,
            "Prefetch": knobs.prefetch,
            "Parameters": f"jaxdnn::Place::{knobs.parameters}",
        }
        return struct_text("Config", {name: f"jaxdnn::{dtype}" for name, dtype in types.items()}, constants | flags)

    def launch(self, step: Step, parameters: list[Parameter]) -> tuple[str, Launch]:
        """The entry point and the launch of one step ("whole", "measure" or "apply")."""
        knobs = self.knobs
        header = f"norm_{self.direction}"
        kernel = header if step == "whole" else f"{header}_{step}"
        call = f"jaxdnn::Norm{self.direction.capitalize()}"
        config = step.capitalize()
        x = "    using X = Config::Sum;\n" if step == "apply" and "residual" in self.read else ""
        text = (
            f"struct {config} : Config {{\n{x}    static constexpr jaxdnn::Step kStep = jaxdnn::Step::{step};\n}};\n"
            f"{shared_memory_text(f'{call}<{config}>', self.shared_memory(step))}\n"
            + entry_text(header, f"{call}<{config}>", f"{knobs.threads}, {knobs.blocks_per_sm}", parameters, kernel)
        )
        launch = Launch(
            kernel=kernel,
            arguments=arguments(parameters),
            grid=(self.problem.groups * self.blocks_per_group * knobs.splits, 1, 1),
            block=(knobs.threads, 1, 1),
            cluster=(knobs.cluster, 1, 1),
            shared_memory=self.shared_memory(step),
        )
        return text, launch

    def reduction(self, partials: list[Parameter]) -> tuple[str, Launch]:
        """The entry point and the launch that add the blocks' partial sums of the parameters' gradients."""
        parameters, body = [], []
        for row, partial in enumerate(partials):
            result = self.result(f"d_{partial.name.removesuffix('_sum')}")
            parameters += [partial, result]
            body.append(
                f"    if (blockIdx.y == {row}) "
                f"jaxdnn::sum_partials({partial.name}, {result.name}, columns, blocks_per_group, lanes);\n"
            )
        parameters += [p for p in self.sizes() if p.name in ("columns", "blocks_per_group")]
        # More than fill the device would only add waves of blocks, each a load's latency and its barriers.
        room = self.target.sm_count * 2 * REDUCE_THREADS // (self.problem.groups * self.problem.columns * len(partials))
        lanes = 1 << max(1, min(32, self.blocks_per_group, room)).bit_length() - 1
        parameters += numbers(lanes=lanes)
        text = (
            f'extern "C" __global__ void __launch_bounds__({REDUCE_THREADS})\n'
            + signature_text("norm_reduce", parameters)
            + "".join(body)
            + "}\n"
        )
        tiles = -(-self.problem.columns // (REDUCE_THREADS // lanes))
        launch = Launch(
            kernel="norm_reduce",
            arguments=arguments(parameters),
            grid=(self.problem.groups * tiles, len(partials), 1),
            block=(REDUCE_THREADS, 1, 1),
        )
        return text, launch

    def build(self) -> tuple[str, tuple[Launch, ...], tuple[int, ...]]:
        """The unit, the launches and the sizes of the scratch buffers."""
        problem = self.problem
        compute = np.dtype(self.compute).itemsize
        split = len(self.steps) > 1
        scratch: list[int] = []
        splits: list[Parameter] = []
        if split:
            splits = [self.scratch("moments" if self.forward else "sums", 0)]
            scratch = [problem.groups * problem.rows * self.knobs.splits * 2 * compute]

        inputs = [p for name in self.read for p in self.array(name)]
        partials: list[Parameter] = []  # of the parameters' gradients, by block
        alone: list[Parameter] = []  # those of a block that is a group's only one
        if self.forward:
            results = [self.result(array.name) for array in problem.results]
        else:
            results = [self.result("d_x")] if "x" in self.active else []
            for name in (name for name in ("scale", "bias") if name in self.active):
                if self.blocks_per_group == 1:
                    alone.append(replace(self.result(f"d_{name}"), name=f"{name}_sum", field=f"{name}_sum"))
                    continue
                partials.append(self.scratch(f"{name}_sum", len(scratch)))
                scratch.append(problem.groups * self.blocks_per_group * problem.columns * compute)

        sums = [*alone, *partials]
        common = [*splits, *self.sizes(), *self.factors()]
        if not split:
            steps = [self.launch("whole", [*inputs, *results, *sums, *common])]
        else:
            added = [p for p in results if self.forward and p.name == "sum"]
            # The second step normalizes what the first one wrote, when that is a sum.
            again = inputs
            if added:
                again = [replace(added[0], ctype=f"const {added[0].ctype}", name="x", field="x")]
                again += [p for p in inputs if not p.name.startswith(("x", "residual"))]
                if problem.groups > 1:
                    again += numbers("long long", x_stride=self.arrays["sum"].group_stride)
            kept = [p for p in results if p not in added]
            steps = [
                self.launch("measure", [*inputs, *added, *common]),
                self.launch("apply", [*again, *kept, *sums, *common]),
            ]
        if partials:
            steps.append(self.reduction(partials))
        headers = [f"norm/direct/{self.direction}.cuh", *(["norm/direct/reduce.cuh"] if partials else [])]
        unit = f"// {problem.title}\n{includes(headers)}\n{self.config()}\n" + "\n".join(text for text, _ in steps)
        return unit, tuple(launch for _, launch in steps), tuple(scratch)
