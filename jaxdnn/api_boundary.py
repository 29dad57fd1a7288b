"""`api_boundary`: what every public function does about a mistake in its call.

A keyword that it does not have is answered with the one that was meant. From an error, and from what caused it, the
frames inside of jaxdnn and of JAX are removed, as JAX removes its own, so that it ends where the user's code does;
JAX_TRACEBACK_FILTERING=off keeps them.
"""

import traceback
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from types import TracebackType
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

_HIDDEN = frozenset({"jaxdnn", "jax", "jaxlib", "contextlib", "dataclasses"})  # packages


def api_boundary(name: str, **meant: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates the public function `name`.

    `meant` holds keywords that it lacks and that users of other libraries try, with what to write in their place.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = list(signature(function).parameters.values())
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)

        @wraps(function)
        def bounded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                if not any_keyword and (unknown := kwargs.keys() - known):
                    raise TypeError(_unknown_keyword(name, min(unknown), known, meant))
                return function(*args, **kwargs)
            except Exception as error:
                if jax.config.jax_traceback_filtering != "off":  # type: ignore[attr-defined]
                    _hide_frames(error)
                raise

        return bounded

    return decorate


def _unknown_keyword(name: str, unknown: str, known: list[str], meant: dict[str, str]) -> str:
    close = get_close_matches(unknown, known, n=1)
    hint = meant.get(unknown) or (f"did you mean {close[0]}=?" if close else "")
    return f"{name}: there is no keyword {unknown}={'; ' * bool(hint)}{hint}; the keywords are {', '.join(known)}"


def _hide_frames(error: BaseException) -> None:
    """Leaves the user's frames alone in the tracebacks of an error and of its causes, of which those without any go."""
    error.__traceback__ = _visible(error.__traceback__)
    for link in ("__cause__", "__context__"):
        earlier = getattr(error, link)
        if earlier is not None:
            _hide_frames(earlier)
            if earlier.__traceback__ is None:
                suppressed = error.__suppress_context__
                setattr(error, link, None)
                error.__suppress_context__ = suppressed


def _visible(frames: TracebackType | None) -> TracebackType | None:
    kept = None
    for frame, line in reversed(list(traceback.walk_tb(frames))):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _HIDDEN:
            kept = TracebackType(kept, frame, frame.f_lasti, line)
    return kept
