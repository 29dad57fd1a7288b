"""Options of a call, and what the environment sets.

Options enter a primitive's spec when it is traced. They live in a context that JAX's caches know, so that a function
which is already jitted is traced again under other options.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from inspect import isasyncgenfunction, isclass, iscoroutinefunction, isgeneratorfunction
from types import EllipsisType
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import jax

from jaxdnn import _native
from jaxdnn.api_boundary import api_boundary

P = ParamSpec("P")
R = TypeVar("R")

Autotune = Literal["off", "cached", "on"]

logger = logging.getLogger("jaxdnn")


@dataclass(frozen=True)
class Options:
    """How engines are chosen; the fields are `options`'s arguments. Part of every spec, and therefore hashable."""

    engine: str | None = None
    knobs: tuple[tuple[str, object], ...] = ()
    deterministic: bool = True
    autotune: Autotune = "off"
    sm_count: int | None = None
    workspace_limit: int | None = None
    target: str | None = None
    fallback: bool = True

    def __post_init__(self) -> None:
        def check(name: str, valid: bool, expected: str) -> None:
            if not valid:
                raise ValueError(f"options: {name} must be {expected}; got {getattr(self, name)!r}")

        check("engine", self.engine is None or isinstance(self.engine, str), "an engine's name or None")
        check("deterministic", isinstance(self.deterministic, bool), "True or False")
        check("fallback", isinstance(self.fallback, bool), "True or False")
        check("autotune", self.autotune in get_args(Autotune), f"one of {get_args(Autotune)}")
        check("sm_count", self.sm_count is None or _is_count(self.sm_count, 1), "a positive int or None")
        check(
            "workspace_limit",
            self.workspace_limit is None or _is_count(self.workspace_limit, 0),
            "a number of bytes (an int, at least 0) or None",
        )
        check(
            "target",
            self.target is None
            or (isinstance(self.target, str) and re.fullmatch("sm_[1-9][0-9]*", self.target) is not None),
            'a compute capability such as "sm_90" or None',
        )
        for name, value in self.knobs:
            if not isinstance(value, (bool, int, float, str)):
                raise TypeError(f"options: knob {name} must be an int, a bool or a str; got {value!r}")
        if self.knobs and self.engine is None:
            raise ValueError("options: knobs belong to one engine; name it with engine=")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_context = jax.make_user_context(Options())


def current_options() -> Options:
    """The options in force, as the innermost `options` context set them."""
    return _context.value


class _Entered(threading.local):
    """The blocks of one `options` object that a thread is in."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []


class options:  # noqa: N801 - used as a function
    """Sets how engines are chosen for the calls traced inside a `with` block, or inside a function that it decorates.

    Arguments left out keep the value of the enclosing block. `options(...).set_global()` sets them for the whole
    process, for calls outside of any block. An object that is used in none of these ways does nothing, and warns.

    Args:
      engine: the only engine to use (`python -m jaxdnn doctor` lists the names), also where another one takes less
        time; None lets the engine table decide. It must be one of the platform that a call is compiled for.
      knobs: a dict of that engine's knobs to set by name; the others keep the heuristic's value.
      deterministic: whether results must be bitwise equal from run to run; engines that don't promise it are passed
        over, but for the last resort, "xla", which has flags of its own for that.
      autotune: "off" uses the heuristic, "cached" the configuration that `autotune` found fastest, if there is one
        and the other options allow it, "on" measures when there is none.
      sm_count: how many streaming multiprocessors kernels may plan for; None means all of them.
      workspace_limit: the most scratch bytes that one call may use; configurations that need more are passed over, and
        an engine that has no other. On the CPU the process keeps up to 128 MiB of it for later calls.
      target: the GPU to compile for when none is here, or when exporting for another one: "sm_80", "sm_90", ...
      fallback: False leaves calls to native engines, also where XLA's kernels take less time, and turns "no native
        engine serves this call" into an error that holds every engine's reason.

    Raises:
      TypeError: an option's name is unknown, or a knob is no number, bool or string.
      ValueError: an option's value is not allowed, or knobs are given without engine.

    Example:
      >>> import jax.numpy as jnp, jaxdnn
      >>> with jaxdnn.options(engine="xla"):
      ...     y = jaxdnn.rms_norm(jnp.ones((2, 8)))
      >>> @jaxdnn.options(fallback=False)
      ... def fused(x):
      ...     return jaxdnn.rms_norm(x)
      >>> jaxdnn.options(sm_count=None).set_global()
    """

    _used = True  # until it is known to be complete

    @api_boundary("options")
    def __init__(
        self,
        *,
        engine: str | EllipsisType | None = ...,
        knobs: Mapping[str, bool | int | float | str] | EllipsisType | None = ...,
        deterministic: bool | EllipsisType = ...,
        autotune: Autotune | EllipsisType = ...,
        sm_count: int | EllipsisType | None = ...,
        workspace_limit: int | EllipsisType | None = ...,
        target: str | EllipsisType | None = ...,
        fallback: bool | EllipsisType = ...,
    ) -> None:
        given = {
            "engine": engine,
            "deterministic": deterministic,
            "autotune": autotune,
            "sm_count": sm_count,
            "workspace_limit": workspace_limit,
            "target": target,
            "fallback": fallback,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not ...}
        if isinstance(knobs, Mapping) and all(isinstance(name, str) for name in knobs):
            changes["knobs"] = tuple(sorted(knobs.items()))
        elif knobs is not None and knobs is not ...:
            raise TypeError(f"options: knobs must be a dict of names and values; got {knobs!r}")
        elif "engine" in changes:
            changes["knobs"] = ()
        self._changes = changes
        self._applied_to(current_options())  # raises for a bad value here, where the user wrote it
        self._entered = _Entered()
        self._used = False

    def __enter__(self) -> Options:
        self._used = True
        value = self._applied_to(current_options())
        context = _context(value)
        context.__enter__()
        self._entered.contexts.append(context)
        return value

    def __exit__(self, *exception: object) -> None:
        self._entered.contexts.pop().__exit__(*exception)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function under these options."""
        self._used = True
        runs_later = (isclass, isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)
        if not callable(function) or any(kind(function) for kind in runs_later):
            raise TypeError(
                "options: what it decorates must be a function whose body runs when it is called, no generator, "
                f"coroutine or class; got {function!r}. Write `with jaxdnn.options(...):` in its body"
            )

        @wraps(function)
        def under_options(*args: P.args, **kwargs: P.kwargs) -> R:
            with _context(self._applied_to(current_options())):
                return function(*args, **kwargs)

        return under_options

    def set_global(self) -> None:
        """Sets these options for the whole process: all threads, outside of `with` blocks."""
        self._used = True
        _context.set_global(self._applied_to(_context.get_global()))

    def __del__(self) -> None:
        if not self._used and not sys.is_finalizing():
            written = ", ".join(f"{name}={value!r}" for name, value in self._changes.items() if value != ())
            warnings.warn(
                f"options({written}) had no effect; write `with jaxdnn.options(...):`, decorate a function with it, or "
                "call options(...).set_global()",
                RuntimeWarning,
                stacklevel=2,  # the line that dropped it
            )

    def _applied_to(self, current: Options) -> Options:
        return replace(current, **self._changes)


_LOG_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}


def configure_logging() -> None:
    """Applies JAXDNN_LOG and JAXDNN_LOG_FILE to the package's logger and to the native runtime."""
    name = os.environ.get("JAXDNN_LOG", "").lower()
    if name in ("", "off"):
        return
    if name not in _LOG_LEVELS:
        print(f"jaxdnn: JAXDNN_LOG must be off, info or debug; got {name!r}, and logging stays off", file=sys.stderr)
        return
    path = os.environ.get("JAXDNN_LOG_FILE", "")
    try:
        _native.set_log(1 if name == "info" else 2, path)
    except RuntimeError as error:
        print(f"jaxdnn: JAXDNN_LOG_FILE must be a file to write to: {error}; the log goes to stderr", file=sys.stderr)
        path = ""
        _native.set_log(1 if name == "info" else 2, path)
    handler = logging.FileHandler(path, delay=True) if path else logging.StreamHandler()
    handler.setFormatter(logging.Formatter("jaxdnn: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(_LOG_LEVELS[name])
    logger.propagate = False
