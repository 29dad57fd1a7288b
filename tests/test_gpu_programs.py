"""What XLA makes of programs for GPUs that are not here: JAX's plugin for CUDA compiles them without a driver."""

import importlib
import re
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxdnn
from checking.calls import native_calls
from checking.sharding import collectives
from jaxdnn.bench import training
from jaxdnn.bench.matmul import plain_swiglu
from jaxdnn.bench.models import Model
from jaxdnn.bench.norm import plain_rms_norm

# What XLA wants to know of an H200.
H200 = """
gpu_device_info {
  name: "NVIDIA H200"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
BF16 = jnp.bfloat16


@pytest.fixture(scope="module")
def gpus():
    try:
        importlib.import_module("jax_plugins.xla_cuda13")
    except ImportError:
        pytest.skip("the packages jax-cuda13-plugin and jax-cuda13-pjrt are not installed")
    return topologies.get_topology_desc(platform="cuda", topology="1x1x4", target_config=H200).devices


def compiled(function, *types, **keywords):
    with jaxdnn.options(target="sm_90"):
        return jax.jit(function, **keywords).lower(*types).compile()


def types(gpus, *shapes):
    on = SingleDeviceSharding(gpus[0])
    return [jax.ShapeDtypeStruct(shape, BF16, sharding=on) for shape in shapes]


def moves(program, size):
    """Of at least so many elements: copies, and transposes, within fusions or not."""
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", program.as_text())
    return [dims for dims in found if prod(map(int, dims.split(","))) >= size]


def gradients(function, *arrays):
    out, pull_back = jax.vjp(function, *arrays)
    return out, pull_back(jax.tree.map(jnp.sin, out))


def activated(acc, bias, residual):
    return jax.nn.relu(acc + bias) + residual


def layer(x, weights, *operands):
    return jaxdnn.conv_general_dilated(x, weights, (1, 1), "SAME", operands=operands, epilogue=activated)


def test_a_chain_of_convolutions_costs_two_transposes(gpus):
    """Of images with their channels first, in the convolutions and among their epilogues' operands."""

    def chain(x, weights, bias):
        for _ in range(3):
            x = layer(x, weights, bias, x)
        return x

    image = (8, 64, 28, 28)
    program = compiled(chain, *types(gpus, image, (64, 64, 3, 3), (64, 1, 1)))
    assert native_calls(program.as_text()) == 3
    assert len(moves(program, prod(image))) == 2


def heads_first(*arrays):
    """As models have it that keep heads before positions: what comes of it goes on to a product of all heads."""
    turned = (jnp.swapaxes(one, 1, 2) for one in arrays)
    out = jnp.swapaxes(jaxdnn.dot_product_attention(*turned, is_causal=True), 1, 2)
    return jnp.swapaxes(out, 1, 2).reshape(out.shape[0], out.shape[2], -1)


PROGRAMS = {
    "x w^T": (
        lambda x, w: jaxdnn.dot_general(x, w, (((1,), (1,)), ((), ())), epilogue=jax.nn.gelu),
        [(512, 256), (384, 256)],
    ),
    "swiglu": (jaxdnn.gated_linear_unit, [(512, 256), (256, 384), (256, 384)]),
    "norm": (jaxdnn.rms_norm, [(512, 256), (256,)]),
    "attention": (
        partial(jaxdnn.dot_product_attention, is_causal=True),
        [(2, 256, 8, 64), (2, 256, 2, 64), (2, 256, 2, 64)],
    ),
    "heads first": (
        heads_first,
        [(2, 8, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64)],
    ),
    "convolution": (
        lambda x, w: jaxdnn.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        [(8, 28, 28, 64), (3, 3, 64, 64)],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_copied(gpus, name):
    function, shapes = PROGRAMS[name]
    program = compiled(partial(gradients, function), *types(gpus, *shapes))
    assert native_calls(program.as_text()) >= 2
    assert not moves(program, prod(shapes[0]) // 4)


def test_a_donated_sum_is_added_to_in_place(gpus):
    def add(a, b, c):
        return jaxdnn.matmul(a, b, c, epilogue=jnp.add, input_output_aliases={0: 0})

    shapes = (512, 256), (256, 384), (512, 384)
    program = compiled(add, *types(gpus, *shapes), donate_argnums=2)
    assert native_calls(program.as_text()) == 1
    assert program.memory_analysis().alias_size_in_bytes == 2 * prod(shapes[2])
    assert not moves(program, 1)


def test_layers_of_a_scan_are_compiled_once(gpus):
    def block(x, weights):
        scale, gate, up, down = weights
        return x + jaxdnn.matmul(jaxdnn.gated_linear_unit(jaxdnn.rms_norm(x, scale), gate, up), down), None

    def loss(x, *weights):
        return jnp.sum(jax.lax.scan(jax.checkpoint(block), x, weights)[0].astype(jnp.float32))

    shapes = (512, 256), (6, 256), (6, 256, 384), (6, 256, 384), (6, 384, 256)
    program = compiled(jax.grad(loss, range(5)), *types(gpus, *shapes))
    # A norm and two products; then the norm and a product again, six products for the gradients, the epilogue's and the
    # norm's derivative.
    assert native_calls(program.as_text()) == 13


def test_layers_that_are_computed_again_take_little_more_than_plain_ones(gpus):
    """Of what lies between the products of a layer, all that a kernel reads and writes is there at once."""

    def memory(norm, swiglu, matmul):
        @jax.checkpoint
        def block(x, scale, gate, up, down):
            return x + matmul(swiglu(norm(x, scale), gate, up), down)

        def loss(x, *layers):
            for layer in layers:
                x = block(x, *layer)
            return jnp.sum(x.astype(jnp.float32) ** 2)

        layer = (2048,), (2048, 5504), (2048, 5504), (5504, 2048)
        layers = [types(gpus, *layer) for _ in range(3)]
        program = compiled(jax.grad(loss, range(4)), *types(gpus, (8192, 2048)), *layers)
        return program.memory_analysis().temp_size_in_bytes

    plain = memory(plain_rms_norm, plain_swiglu, jnp.matmul)
    assert memory(jaxdnn.rms_norm, jaxdnn.gated_linear_unit, jaxdnn.matmul) <= 1.15 * plain


# Of the benchmark: what a step keeps for each token, in widths of the model and of what is between the products.
STEPS = {
    "Llama": (4, Model("Llama", length=2048, layers=4, width=2048, vocabulary=32_000), 6, 3),
    "GPT": (8, Model("GPT", length=1024, layers=6, width=1024, vocabulary=50_257), 8, 2),
}


@pytest.mark.parametrize("kind", STEPS)
def test_what_a_training_step_keeps(gpus, kind):
    """Of each layer: both norms, the sums before them, what attention reads and writes, and what lies between the
    feed-forward's products; keys, values and statistics find room among the results. Rows of tokens are not kept. All
    of this is there when the logits' gradient, in float32, becomes one in bfloat16.
    """
    batch, model, widths, hiddens = STEPS[kind]
    case = training.case(model, batch, "bfloat16")
    on = SingleDeviceSharding(gpus[0])
    operands = jax.eval_shape(case.operands, jax.random.key(0))
    operands = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=on), operands)
    program = compiled(case.jaxdnn.run, *operands)
    layer = 2 * (widths * model.width + hiddens * model.hidden)
    kept = batch * model.length * (model.layers * layer + (4 + 2) * model.vocabulary)
    assert program.memory_analysis().temp_size_in_bytes <= 1.001 * kept


def sent(text):
    """Bytes of the results of collectives, which these programs have of one kind."""
    assert collectives(text).keys() == {"all-reduce"}
    found = re.findall(r"= \(?(\w+)\[([\d,]+)\].* all-reduce(?:-start)?\(", text)
    return sum(int(re.sub(r"\D", "", dtype)) // 8 * prod(map(int, dims.split(","))) for dtype, dims in found)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_several_gpus_send_no_more_than_plain_programs(gpus, kind):
    """Columns, then rows of the products are split over two, the batch over two others."""
    mesh = Mesh(np.reshape(gpus, (2, 2)), ("data", "model"), axis_types=(kind, kind))
    layouts = {
        (1024, 256): P("data", None),
        (256, 512): P(None, "model"),
        (512, 256): P("model", None),
    }
    x, gate, down = (
        jax.ShapeDtypeStruct(shape, BF16, sharding=NamedSharding(mesh, spec)) for shape, spec in layouts.items()
    )

    def step(swiglu, matmul, x, gate, up, down):
        def loss(*weights):
            hidden = swiglu(x, *weights[:2])
            return jnp.sum(jnp.sin(matmul(hidden, weights[2]).astype(jnp.float32)))

        return jax.grad(loss, range(3))(gate, up, down)

    # What is summed over devices has to say how it then lies, where axes are explicit.
    summed = {"out_sharding": P("data", None)} if kind == AxisType.Explicit else {}
    our_matmul, plain_matmul = partial(jaxdnn.matmul, **summed), partial(jnp.matmul, **summed)
    with jax.set_mesh(mesh):
        ours = compiled(partial(step, jaxdnn.gated_linear_unit, our_matmul), x, gate, gate, down).as_text()
        plain = compiled(partial(step, plain_swiglu, plain_matmul), x, gate, gate, down).as_text()
    assert native_calls(ours) == 7
    assert ours.count("output_to_operand_aliasing") == 1, "the gate's derivative takes memory of its own on each device"
    assert sent(ours) <= sent(plain)
