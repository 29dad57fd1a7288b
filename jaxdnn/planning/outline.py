"""What `explain` and `autotune` say: headings with what is under them, as text in a terminal and HTML in a notebook."""

import html
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

_INDENT = 2


@dataclass(frozen=True)
class Outline:
    """A heading and what is under it, each a line or an outline of its own.

    Attributes:
      title: the heading.
      parts: what is under it.
      folded: whether a notebook hides the parts until the heading is clicked; a terminal shows them all.
    """

    title: str
    parts: "tuple[Outline | str, ...]" = ()
    folded: bool = False

    def text(self, width: int) -> str:
        """Indented by depth, and no line longer than `width`."""
        return "\n".join(_lines(self, width, 0))

    def html(self) -> str:
        """Headings fold."""
        if not self.parts:
            return _block(self.title)
        parts = "".join(_block(part) if isinstance(part, str) else part.html() for part in self.parts)
        return (
            f"<details{'' if self.folded else ' open'}><summary>{html.escape(self.title)}</summary>"
            f"<div style='margin-left:1.5em'>{parts}</div></details>"
        )


class Outlined:
    """Something that shows as an outline."""

    def outline(self) -> Outline:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.outline().text(shutil.get_terminal_size().columns)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.outline().html()


def _lines(part: Outline | str, width: int, depth: int) -> Iterator[str]:
    indent = " " * _INDENT * depth
    yield from textwrap.wrap(
        part if isinstance(part, str) else part.title,
        width,
        initial_indent=indent,
        subsequent_indent=indent + " " * 2 * _INDENT,
        break_on_hyphens=False,
    )
    if isinstance(part, Outline):
        for inner in part.parts:
            yield from _lines(inner, width, depth + 1)


def _block(line: str) -> str:
    return f"<div>{html.escape(line)}</div>"
