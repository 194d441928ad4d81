"""The terminal of `gangq top`: a table in each tab, refreshed while it is looked at."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from gangq.cli import output, tables
from gangq.cli.output import seconds
from gangq.cli.tables import Column
from gangq.client import Client
from gangq.colours import colour_of
from gangq.errors import GangqError
from gangq.top.tabs import MOST, TABS, Row, Tab, summary

_LATE_S = 15.0
"""A tick that is older is shown as a fault."""


class Top(App[None]):
    """Tables of live things. `look` answers a `gangq` command (["show", "g7"]) as text."""

    TITLE = "gangq top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: 1; padding: 0 1; background: $panel; }
    #filter { display: none; border: none; height: 1; }
    #filter.open { display: block; }
    DataTable { height: 1fr; }
    Pages, Question { align: center middle; }
    Pages > VerticalScroll { width: 95%; height: 90%; border: round $primary; padding: 0 1; background: $surface; }
    Question > Static { width: auto; border: round $warning; padding: 1 2; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n), f"tab({n})", tab.title, show=False) for n, tab in enumerate(TABS, 1)),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse", show=False),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("enter", "open('show')", "Open"),
        Binding("e", "open('explain')", "Explain"),
        Binding("c", "cancel", "Cancel"),
        Binding("space", "hold", "Hold", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, client: Client, look: Callable[[Sequence[str]], str], *, every_s: float = 2.0) -> None:
        super().__init__()
        self._client = client
        self._look = look
        self._every_s = every_s
        self._held = False
        self._answer: tuple[Tab, list[Row]] = TABS[0], []
        self._names: list[str | None] = []
        self._wanted = ""
        self._sort: dict[str, tuple[int | None, bool]] = {tab.title: (None, False) for tab in TABS}

    def compose(self) -> ComposeResult:
        yield Static("", id="summary")
        with TabbedContent():
            for number, tab in enumerate(TABS, 1):
                with TabPane(f"{number} {tab.title}", id=f"tab-{number}"):
                    yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Input(placeholder="only rows that hold this text; Esc shows all", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        """Ask every few seconds. The first tab asks when it is activated."""
        self.set_interval(self._every_s, lambda: None if self._held else self._ask())

    @property
    def tab(self) -> Tab:
        """The one that is looked at."""
        return TABS[int(self.screen_stack[0].query_one(TabbedContent).active.removeprefix("tab-")) - 1]

    # -- Rows --------------------------------------------------------------------------------------------------

    @work(thread=True, exclusive=True)
    def _ask(self) -> None:
        tab = self.tab
        try:
            fleet, rows = self._client.execute(summary()), self._client.execute(tab.query())
        except GangqError as problem:
            self.call_from_thread(self._say, Text(str(problem), style="red"))
            return
        self.call_from_thread(self._answered, tab, fleet, rows)

    def _answered(self, tab: Tab, fleet: Row, rows: list[Row]) -> None:
        self._say(_in_one_line(fleet, held=self._held))
        self._answer = tab, rows
        self.draw()

    def _say(self, text: Text) -> None:
        self.screen_stack[0].query_one("#summary", Static).update(text)

    def draw(self) -> None:
        """Show the rows that were answered last, as they are sorted and filtered now; the cursor stays on its row."""
        tab, table = self.tab, self._table()
        asked, rows = self._answer
        rows = list(rows) if asked is tab else []
        if self._wanted:
            wanted = self._wanted.casefold()
            rows = [row for row in rows if wanted in " ".join(_texts(tab, row)).casefold()]
        by, backwards = self._sort[tab.title]
        if by is not None:
            rows.sort(key=lambda row: _key(tab.columns[by].cell(row)))
        if backwards:
            rows.reverse()
        before, at = self._chosen(), table.cursor_row
        self._names = [tab.named(row) for row in rows[:MOST]]
        _fill(table, tab.columns, [_texts(tab, row) for row in rows[:MOST]])
        if before is not None and before in self._names:
            at = self._names.index(before)
        table.move_cursor(row=min(at, max(0, len(self._names) - 1)), animate=False)
        table.border_subtitle = f"{MOST} of {len(rows)}: / filters" if len(rows) > MOST else ""

    def on_resize(self) -> None:
        """Show the columns that fit now."""
        self.draw()

    def _table(self) -> DataTable[Text]:
        pane = self.screen_stack[0].query_one(TabbedContent).active_pane
        assert pane is not None
        return pane.query_one(DataTable)

    def _chosen(self) -> str | None:
        row = self._table().cursor_row
        return self._names[row] if row < len(self._names) else None

    # -- Keys --------------------------------------------------------------------------------------------------

    def action_tab(self, number: int) -> None:
        """Look at another tab."""
        self.screen_stack[0].query_one(TabbedContent).active = f"tab-{number}"

    def on_tabbed_content_tab_activated(self) -> None:
        """Show nothing of the tab before, and ask for the rows of this one."""
        self.draw()
        self._table().focus()
        self._ask()

    def action_sort(self) -> None:
        """Sort by the next column; after the last as the database said."""
        by, backwards = self._sort[self.tab.title]
        following = 0 if by is None else by + 1
        self._sort[self.tab.title] = (following if following < len(self.tab.columns) else None, backwards)
        self.draw()
        by = self._sort[self.tab.title][0]
        self.notify(
            f"sorted by {self.tab.columns[by].title}" if by is not None else "in the usual order", timeout=2
        )

    def action_reverse(self) -> None:
        """Turn the order round."""
        by, backwards = self._sort[self.tab.title]
        self._sort[self.tab.title] = (by, not backwards)
        self.draw()

    def action_filter(self) -> None:
        """Open the line that is typed into."""
        line = self.screen_stack[0].query_one("#filter", Input)
        line.add_class("open")
        line.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        self._wanted = event.value
        self.draw()

    def on_input_submitted(self) -> None:
        """Go back to the table; the filter stays."""
        self._table().focus()

    def key_escape(self) -> None:
        """Show all rows again."""
        line = self.screen_stack[0].query_one("#filter", Input)
        line.value = ""
        line.remove_class("open")
        self._table().focus()

    def action_hold(self) -> None:
        """Stop refreshing, or go on."""
        self._held = not self._held
        self._ask()

    def action_open(self, command: str) -> None:
        """Open what a command says of the chosen row."""
        if (name := self._chosen()) is not None:
            self.push_screen(Pages(self._look([command, name])))

    def on_data_table_row_selected(self) -> None:
        """Open the row: the table itself takes the key."""
        self.action_open("show")

    def action_cancel(self) -> None:
        """Cancel the chosen job or gang, if that is confirmed."""
        name = self._chosen()
        if name is not None:
            self.push_screen(Question(f"Cancel {name}?"), lambda yes: self._cancel(name) if yes else None)

    def _cancel(self, name: str) -> None:
        self.notify(self._look(["cancel", name]).strip() or f"{name} is cancelled", markup=False)
        self._ask()


class Pages(ModalScreen[None]):
    """A text to scroll through."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "Back", priority=True)]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text.from_ansi(self._text))


class Question(ModalScreen[bool]):
    """Yes or no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,enter,q", "dismiss(False)", "No", priority=True),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(f"{self._text}  y / n", markup=False)


def answer_of(command: Callable[[Sequence[str]], None]) -> Callable[[Sequence[str]], str]:
    """Make a `look` of a function that runs a command and prints its answer."""

    def look(words: Sequence[str]) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                command(words)
            except GangqError as problem:
                output.write(str(problem))
        return said.getvalue()

    return look


def _in_one_line(fleet: Row, *, held: bool) -> Text:
    text = Text(" held " if held else "", style="reverse")

    def part(words: str, style: str = "") -> None:
        text.append("  " if text else "")
        text.append(words, style)

    part(f"{fleet['live']} workers")
    if fleet["silent"]:
        part(f"{fleet['silent']} silent", "yellow")
    part(f"GPUs {fleet['held']} held, {fleet['free']} free")
    if fleet["quarantined"]:
        part(f"{fleet['quarantined']} quarantined", "red")
    part(f"{fleet['running']} running")
    part(f"{fleet['waiting']} jobs and {fleet['waiting_gangs']} gangs waiting")
    if fleet["trips"]:
        part(f"{fleet['trips']} trips in the last hour", "red")
    age = fleet["tick_age_s"]
    if age is None or age > _LATE_S:
        part("no tick yet" if age is None else f"the last tick was {seconds(age)} ago", "red")
    return text


def _texts(tab: Tab, row: Row) -> list[str]:
    return [output.plain(column.cell(row)) for column in tab.columns]


def _fill(table: DataTable[Text], columns: Sequence[Column], texts: Sequence[Sequence[str]]) -> None:
    """Show these rows, with the columns that fit, as the command line's tables do."""
    titles = [column.title.replace("_", " ").upper() for column in columns]
    widths = [max(map(tables.width, of)) for of in zip(titles, *texts, strict=True)]
    # A cell has a blank on each side, and the table a scroll bar.
    shown = tables.fit(widths, texts, columns, table.size.width - 2 - table.styles.scrollbar_size_vertical)
    table.clear(columns=True)
    for i in shown:
        table.add_column(titles[i], width=widths[i])
    table.add_rows([_cell(columns[i], row[i], widths[i]) for i in shown] for row in texts)


def _cell(column: Column, text: str, most: int) -> Text:
    colour = colour_of(text) if column.title in tables.COLOURED else None
    text = tables.cut(text, most)
    justify = "right" if column.right or text.isdecimal() else "left"
    return Text(text, style=colour or "", justify=justify, no_wrap=True)  # type: ignore[arg-type]


def _key(value: Any) -> tuple[int, Any]:
    """Numbers before texts, and nothing last."""
    if value is None or value == "":
        return 2, ""
    return (0, value) if isinstance(value, (int, float)) else (1, output.plain(value))
