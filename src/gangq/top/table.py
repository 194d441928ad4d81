"""The table of a tab: rows of one line, a cursor on one of them, and titles that stay.

It makes only the lines that are seen, and each at once. A `DataTable` renders every cell by itself and again after
any change: 30 lines cost it 40 ms of processor time, and this one 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size, Spacing
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from gangq.cli import tables
from gangq.cli.tables import Column
from gangq.colours import colour_of

_GAP = Segment("  ")


class Table(ScrollView, can_focus=True):
    """Shows what `show` was given, with the columns that fit, as the command line's tables do."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"titles", "odd", "even", "cursor", "note"}
    DEFAULT_CSS = """
    Table {
        height: 1fr;
        .titles { text-style: bold; background: $panel; color: $foreground; }
        .odd { background: $surface; color: $foreground; }
        .even { background: $surface-lighten-1; color: $foreground; }
        .cursor { background: $block-cursor-blurred-background; color: $block-cursor-blurred-foreground; }
        .note { color: $text-muted; }
        &:focus .cursor { background: $block-cursor-background; color: $block-cursor-foreground; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "by(-1)", show=False),
        Binding("down", "by(1)", show=False),
        Binding("pageup", "by_pages(-1)", show=False),
        Binding("pagedown", "by_pages(1)", show=False),
        Binding("home,ctrl+home", "to(0)", show=False),
        Binding("end,ctrl+end", "to(-1)", show=False),
    ]

    class Opened(Message):
        """The row of the cursor was clicked."""

    def __init__(self) -> None:
        super().__init__()
        self.cursor = 0
        self.texts: Sequence[Sequence[str]] = ()
        self._columns: Sequence[Column] = ()
        self._note = ""
        self._titles: Sequence[str] = ()
        self._widths: list[int] = []
        self._shown: list[int] = []

    def show(self, columns: Sequence[Column], texts: Sequence[Sequence[str]], cursor: int, note: str) -> None:
        """Show these rows, the cursor on one of them, and `note` below."""
        self._columns, self.texts, self._note = columns, texts, note
        self._titles = [column.title.replace("_", " ").upper() for column in columns]
        self._fit()
        self.action_to(min(cursor, max(0, len(texts) - 1)))

    def on_resize(self) -> None:
        """Show the columns that fit now."""
        self._fit()

    def _fit(self) -> None:
        self._widths = [max(map(tables.width, of)) for of in zip(self._titles, *self.texts, strict=True)]
        # A blank on each side, and a scroll bar.
        room = self.size.width - 2 - self.styles.scrollbar_size_vertical
        self._shown = tables.fit(self._widths, self.texts, self._columns, room)
        wide = sum(self._widths[i] + 2 for i in self._shown)
        self.virtual_size = Size(wide, 1 + len(self.texts) + bool(self._note))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line of the screen: the titles, a row, the note or nothing."""
        x, above = self.scroll_offset
        row = above + y - 1
        if y == 0:
            strip, look = self._line(self._titles), "titles"
        elif row < len(self.texts):
            strip = self._line(self.texts[row], coloured=row != self.cursor)
            look = "cursor" if row == self.cursor else "even" if row % 2 else "odd"
        else:
            said = self._note if row == len(self.texts) else ""
            strip, look = Strip([Segment(f" {said}")]), "note"
        return strip.crop_extend(x, x + self.size.width, None).apply_style(
            self.get_component_rich_style(look)
        )

    def _line(self, texts: Sequence[str], *, coloured: bool = False) -> Strip:
        parts = [Segment(" ")]
        for i in self._shown:
            column, most = self._columns[i], self._widths[i]
            text = tables.cut(texts[i], most)
            colour = colour_of(texts[i]) if coloured and column.title in tables.COLOURED else None
            blanks = " " * (most - tables.width(text))
            text = blanks + text if column.right else text + blanks
            parts += [Segment(text, Style.parse(colour) if colour else None), _GAP]
        return Strip(parts)

    def action_by(self, rows: int) -> None:
        """Move the cursor by so many rows."""
        self.action_to(max(0, min(self.cursor + rows, len(self.texts) - 1)))

    def action_by_pages(self, pages: int) -> None:
        """Move the cursor by so many screens."""
        self.action_by(pages * max(1, self.size.height - 1))

    def action_to(self, row: int) -> None:
        """Move the cursor to a row, -1 to the last, and scroll to it; the note is seen with the last."""
        self.cursor = row if row >= 0 else max(0, len(self.texts) - 1)
        self.refresh()
        lines = 2 if self._note and self.cursor == len(self.texts) - 1 else 1
        seen = Region(round(self.scroll_x), self.cursor + 1, 1, lines)
        self.scroll_to_region(seen, animate=False, spacing=Spacing(top=1), force=True)

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to what is clicked; open it where the cursor is already."""
        row = event.y - 1 + self.scroll_offset.y
        if not event.y or row >= len(self.texts):
            return
        if row == self.cursor:
            self.post_message(self.Opened())
        self.action_to(row)
