"""Products under `jax.checkpoint`: to its policies, JAX's own and the user's, each is what JAX computes it by."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, Saveable
from jax.extend.core import JaxprEqn, Var

from jaxdnn.spec import MultilinearSpec


def checkpointed(
    policy: Callable[..., Any], unknown: Sequence[bool], there: Sequence[bool], equation: JaxprEqn
) -> tuple[JaxprEqn | None, JaxprEqn | None, Sequence[bool], Sequence[bool], list[Var]]:
    """The rule by which the equation of a product is divided into what runs forward and what backward.

    Where that is to be saved, what is are the results that the others can be made of: of a fused call, whose derivative
    wants accumulators, these and not the epilogue of them.

    Args:
      policy: what to do with the results of a primitive.
      unknown: of each operand, whether the backward pass alone has it.
      there: of each operand, whether the backward pass has it without its being saved.
      equation: the product.

    Returns:
      What runs forward, and what backward; `unknown` and `there` of each result; what is saved for what runs backward.
    """
    spec: MultilinearSpec = equation.params["spec"]
    names = (*spec.operands, *spec.results)
    variables: dict[str, Any] = dict(zip(names, (*equation.invars, *equation.outvars), strict=True))
    everywhere, nowhere = [True] * len(spec.results), [False] * len(spec.results)
    absent = [variables[name] for name, is_there in zip(spec.operands, there, strict=True) if not is_there]
    if any(unknown):
        return None, equation, everywhere, everywhere, absent
    primitive, parameters = spec.seen
    answer = policy(primitive, *(x.aval for x in equation.invars[:2]), **parameters)
    offloads = isinstance(answer, Offloadable)
    if not offloads and answer is not True and answer is not Saveable:
        return equation, equation, nowhere, everywhere, absent

    again, made_of, made = spec.remade or (None, (), ())
    kept = [name for name in spec.results if name not in made]
    rest = [name for name in made_of if name not in kept]

    def remade(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        of = dict(zip((*kept, *rest), arrays, strict=True))
        return again.bind(*(of[name] for name in made_of)) if again else ()

    of_kept, of_rest, of_made = ([variables[name] for name in names] for names in (kept, rest, made))
    saved = [x for x in of_rest if x in absent]
    if not offloads:
        backward = _equation(remade, [*of_kept, *of_rest], of_made, equation) if again else None
        return equation, backward, nowhere, [name in made for name in spec.results], [*of_kept, *saved]

    spaces = jax.memory.Space
    host, device = (spaces.Host if kind == "pinned_host" else spaces.Device for kind in (answer.dst, answer.src))

    def offloaded(*operands: jax.Array) -> tuple[jax.Array, ...]:
        results = spec.bind(*operands)
        of = dict(zip(spec.results, results, strict=True))
        return *results, *jax.device_put([of[name] for name in kept], host)

    def loaded(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        reloaded = jax.device_put(arrays[: len(kept)], device)
        return *reloaded, *remade(*reloaded, *arrays[len(kept) :])

    sent = [Var(x.aval.update(memory_space=host)) for x in of_kept]
    forward = _equation(offloaded, equation.invars, [*equation.outvars, *sent], equation)
    backward = _equation(loaded, [*sent, *of_rest], [*of_kept, *of_made], equation)
    return forward, backward, nowhere, everywhere, [*sent, *saved]


def _equation(function: Callable[..., Any], inputs: Sequence[Any], results: Sequence[Var], at: JaxprEqn) -> JaxprEqn:
    """What `function` does to these variables, in the place of the equation `at`."""
    with at.ctx.manager:
        (equation,) = jax.make_jaxpr(jax.jit(function))(*(x.aval for x in inputs)).eqns
    return equation.replace(invars=list(inputs), outvars=list(results), source_info=at.source_info, ctx=at.ctx)
