"""Plans, and the calls that engines leave to the next one, which must not change unnoticed."""

import os
import textwrap
from pathlib import Path

import pytest

from checking.calls import calls_of, refusal
from checking.cases import BF16, F16, F32, F64, TABLE, AttentionCase, NormCase
from checking.cases.convolution import convolution
from checking.cases.dtypes import E4M3
from checking.cases.matmul import product
from checking.targets import TARGETS
from jaxdnn.engines.table import ENGINES

GOLDEN = Path(__file__).parents[1] / "golden"
NATIVE = [pytest.param(engine, id=f"{engine.family}-{engine.name}") for engine in ENGINES if engine.family != "any"]


def same_as_golden(name, text):
    """Compares with tests/golden/`name`; JAXDNN_UPDATE_GOLDEN=1 writes it, to be read before it is committed."""
    path = GOLDEN / name
    if os.environ.get("JAXDNN_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} changed; if on purpose, run with JAXDNN_UPDATE_GOLDEN=1 and read it"


PLANNED = [
    NormCase("layer_norm", (16_384, 4096), x=BF16, scale=BF16, bias=BF16),
    NormCase("rms_norm", (32_768, 1024), x=BF16, scale=F32, residual=BF16),
    NormCase("layer_norm", (4096, 16_384), x=BF16, scale=F32, bias=F32),
    NormCase("rms_norm", (4096, 16_384), x=F32, scale=F32),
    NormCase("layer_norm", (1_048_576, 128), x=F32, scale=F32, bias=F32),
    NormCase("rms_norm", (7, 262_144), x=BF16, scale=BF16),
    NormCase("layer_norm", (1000, 13), x=BF16, scale=F32, bias=F32, statistics=True),
    NormCase("layer_norm", (512, 512), x=F64, scale=F64, bias=F64),
    product((8192, 4096), (4096, 14_336), BF16, epilogue="bias gelu", extras=(((14_336,), BF16),)),
    product((8192, 4096), (4096, 14_336), BF16).replace(kind="gated_linear_unit"),
    product((16, 8192), (8192, 8192), BF16),
    product((4096, 4096), (4096, 4096), E4M3, out_dtype=BF16),
    product((4096, 4096), (4096, 4096), F32, precision="highest"),
    product((4096, 128, 64), (4096, 64, 128), BF16),
    product((1000, 1000), (1000, 1000), F16, epilogue="largest"),
    product((512, 512), (512, 512), F64),
    convolution((256, 56, 56, 64), (3, 3, 64, 64), BF16, padding="SAME"),
    convolution(
        (256, 14, 14, 256), (3, 3, 256, 256), BF16, padding="SAME", epilogue="bias gelu", extras=(((256,), BF16),)
    ),
    convolution((256, 56, 56, 256), (1, 1, 256, 512), BF16, strides=(2, 2)),
    convolution((256, 224, 224, 3), (7, 7, 3, 64), BF16, strides=(2, 2), padding=((3, 3), (3, 3))),
    convolution((128, 224, 224, 3), (16, 16, 3, 768), BF16, strides=(16, 16)),
    convolution((128, 14, 14, 1024), (3, 3, 32, 1024), BF16, padding="SAME", groups=32),
    convolution((32, 56, 56, 256), (3, 3, 16, 256), BF16, padding="SAME", groups=16, rhs_dilation=(2, 2)),
    convolution((128, 28, 28, 256), (3, 3, 8, 256), BF16, padding="SAME", groups=32),
    convolution((128, 56, 56, 96), (7, 7, 1, 96), BF16, padding="SAME", groups=96),
    convolution((256, 56, 56, 144), (3, 3, 1, 144), BF16, padding="SAME", groups=144),
    convolution((8, 4096, 4096), (4, 1, 4096), BF16, padding=((3, 0),), groups=4096),
    convolution((32, 28, 28, 128), (3, 3, 128, 128), F32, padding="SAME", precision="highest"),
    AttentionCase(2, 8192, 8192, 16, 16, 128, 128, BF16),
    AttentionCase(2, 8192, 8192, 32, 8, 128, 128, BF16, causal=True, residual=True),
    AttentionCase(16, 1024, 1024, 32, 32, 64, 64, F16, window=(256, 0), lengths="query key"),
    AttentionCase(2, 512, 8192, 128, 128, 192, 128, BF16, causal=True, alignment="bottom_right"),
    AttentionCase(1, 4096, 4096, 8, 4, 256, 256, BF16, soft_cap=50.0),
    AttentionCase(32, 512, 512, 32, 32, 64, 64, BF16, bias="1nts"),
    AttentionCase(2, 1, 32_768, 32, 8, 128, 128, BF16, lengths="key"),
]


def calls_for(engine, cases):
    """Cases and their calls of the engine's problem, or of none that could be it, numbered."""
    for case in cases:
        own = [call for call in calls_of(case) if engine.problem in call.spec.problems]
        own = [call for call in own if isinstance(call.problem, (str, engine.problem))]
        yield from ((case, number, call) for number, call in enumerate(own))


def planned(engine, call, target):
    reason = refusal(engine, call, target)
    if reason:
        return f"{engine.name} on {target.arch}: {reason}\n"
    config = next(iter(engine.configurations(call.problem, target)))
    plan = engine.build(config, call.problem, target)
    lines = [f"{engine.name} on {target.arch}: {config}"]
    for launch in plan.launches:
        sizes = f"grid {launch.grid} block {launch.block} cluster {launch.cluster}"
        lines.append(
            f"    {launch.kernel}: {sizes}, {launch.shared_memory} bytes shared, {len(launch.arguments)} arguments"
        )
    return "\n".join([*lines, f"    workspace {plan.workspace}"]) + "\n"


@pytest.mark.parametrize("engine", NATIVE)
def test_golden_plans(engine):
    text = ""
    for case, _, call in calls_for(engine, PLANNED):
        text += f"{call.spec.title} {case}\n"
        for target in TARGETS[engine.platform]:
            text += textwrap.indent(planned(engine, call, target), "    ")
    same_as_golden(f"plans_{engine.family}_{engine.name}.txt", text)


@pytest.mark.parametrize("engine", NATIVE)
def test_golden_coverage(engine):
    """Which rows of the table an engine leaves to the next one, and why: coverage must not shrink unnoticed."""
    lines = []
    for case, number, call in calls_for(engine, (*TABLE.every, *TABLE.empty)):
        for target in TARGETS[engine.platform]:
            reason = refusal(engine, call, target)
            if reason:
                lines.append(f"{target.arch} {case} {call.spec.title} {number}: {reason}\n")
    same_as_golden(f"coverage_{engine.family}_{engine.name}.txt", "".join(lines))
