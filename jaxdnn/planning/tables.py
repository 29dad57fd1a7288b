"""Tables that show as text in a terminal and as HTML in a notebook."""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as RichTable


class Table:
    """Something that shows as one or more titled tables with the same columns."""

    columns: ClassVar[tuple[str, ...]]

    def tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """Title and rows of each table; a cell may have several lines."""
        raise NotImplementedError

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.measure import Measurement  # here, since importing jaxdnn must not cost it
        from rich.table import Table as RichTable

        for title, rows in self.tables():
            table = RichTable(title=title, title_justify="left", show_lines=True)
            for column in self.columns:
                table.add_column(column)
            for row in rows:
                table.add_row(*row)
            if not rows:
                yield f"{title}: no call of jaxdnn"
            elif Measurement.get(console, options.update(width=10**4), table).maximum <= options.max_width:
                yield table
            else:
                yield self._narrow(title, rows)

    def _narrow(self, title: str, rows: Sequence[Sequence[str]]) -> "RichTable":
        """A record for each row, a line for each cell that is not empty."""
        from rich.table import Table as RichTable

        table = RichTable(title=title, title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            for column, cell in zip(self.columns, row, strict=True):
                if cell:
                    table.add_row(column, cell.replace("\n", "; "))
            table.add_section()
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=200, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            opening, closing = f"<{tag} style='text-align:left'>", f"</{tag}>"
            escaped = (html.escape(cell).replace("\n", "<br>") for cell in cells)
            return f"<tr>{''.join(opening + cell + closing for cell in escaped)}</tr>"

        return "".join(
            f"<table><caption>{html.escape(title)}</caption>{line(self.columns, 'th')}"
            f"{''.join(line(row, 'td') for row in rows)}</table>"
            for title, rows in self.tables()
        )
