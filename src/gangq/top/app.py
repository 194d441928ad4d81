"""The terminal of `gangq top`: a table in each tab, refreshed while it is looked at."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import cached_property
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Input, Static, TabbedContent, TabPane

from gangq.cli import output
from gangq.cli.output import seconds
from gangq.client import AsyncClient
from gangq.client.encoding import counted
from gangq.errors import GangqError
from gangq.private import DSN_VARIABLE
from gangq.top.table import Table
from gangq.top.tabs import MOST, TABS, Row, Tab, summary

_LATE_S = 15.0
"""A tick that is older is shown as a fault."""


class Line:
    """A row of a tab, and what it shows: made once, when it is looked at."""

    def __init__(self, tab: Tab, row: Row) -> None:
        self.tab, self.row = tab, row

    @cached_property
    def texts(self) -> list[str]:
        """The cells."""
        return [output.plain(column.cell(self.row)) for column in self.tab.columns]

    @cached_property
    def searched(self) -> str:
        """What a filter looks into."""
        return " ".join(self.texts).casefold()


class Top(App[None]):
    """Tables of live things, of the database `dsn`. What asks it never keeps the screen waiting."""

    TITLE = "gangq top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    TabbedContent { height: 1fr; }
    #summary { height: auto; padding: 0 1; background: $panel; }
    #filter { display: none; border: none; height: 1; }
    #filter.open { display: block; }
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

    def __init__(self, dsn: str, *, every_s: float = 2.0) -> None:
        super().__init__()
        self._dsn = dsn
        self._client = AsyncClient(dsn, max_size=1, connect_s=2)
        self._every_s = every_s
        self._held = False
        self._answer: tuple[Tab, list[Line]] = TABS[0], []
        self._names: list[str | None] = []
        self._wanted = ""
        self._sort: dict[str, tuple[int | None, bool]] = {tab.title: (None, False) for tab in TABS}

    def compose(self) -> ComposeResult:
        yield Static("", id="summary")
        with TabbedContent():
            for number, tab in enumerate(TABS, 1):
                with TabPane(f"{number} {tab.title}", id=f"tab-{number}"):
                    yield Table()
        yield Input(placeholder="only rows that hold this text; Esc shows all", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        """Ask every few seconds, once at a time. The first tab asks when it is activated."""
        self.set_interval(self._every_s, self._ask_again)

    async def on_unmount(self) -> None:
        """Close the connection."""
        await self._client.close()

    @property
    def _tables(self) -> Screen[object]:
        """The screen with the tabs, also while `Pages` or a `Question` lies above it."""
        return self.screen_stack[0]

    @property
    def tab(self) -> Tab:
        """The one that is looked at."""
        return TABS[int(self._tables.query_one(TabbedContent).active.removeprefix("tab-")) - 1]

    # -- Rows --------------------------------------------------------------------------------------------------

    def _ask_again(self) -> None:
        if not self._held and not any(one.group == "ask" and one.is_running for one in self.workers):
            self._ask()

    @work(exclusive=True, group="ask")
    async def _ask(self) -> None:
        tab = self.tab
        try:
            fleet, rows = await self._client.execute(summary()), await self._client.execute(tab.query())
        except GangqError as problem:
            self._say(Text(str(problem), style="red"))
        else:
            self._answered(tab, fleet, rows)

    def _answered(self, tab: Tab, fleet: Row, rows: list[Row]) -> None:
        self._say(_in_one_line(fleet, held=self._held))
        self._answer = tab, [Line(tab, row) for row in rows]
        self.draw()

    def _say(self, text: Text) -> None:
        self._tables.query_one("#summary", Static).update(text)

    def draw(self) -> None:
        """Show the rows that were answered last, as they are sorted and filtered now; the cursor stays on its row."""
        tab, table = self.tab, self._table()
        asked, lines = self._answer
        lines = list(lines) if asked is tab else []
        if self._wanted:
            wanted = self._wanted.casefold()
            lines = [line for line in lines if wanted in line.searched]
        by, backwards = self._sort[tab.title]
        if by is not None:
            key = tab.key(tab.columns[by])
            lines.sort(key=lambda line: _key(key(line.row)))
        if backwards:
            lines.reverse()
        before, at = self._chosen(), table.cursor
        seen = lines[:MOST]
        self._names = [tab.named(line.row) for line in seen]
        if before is not None and before in self._names:
            at = self._names.index(before)
        if len(lines) > MOST:
            note = f"{MOST} of {len(lines)}: / filters"
        elif not lines and asked is tab:
            note = f"No row holds {self._wanted!r}: Esc shows all." if self._wanted else tab.nothing
        else:
            note = ""
        table.show(tab.columns, [line.texts for line in seen], at, note)

    def _table(self) -> Table:
        pane = self._tables.query_one(TabbedContent).active_pane
        assert pane is not None
        return pane.query_one(Table)

    def _chosen(self) -> str | None:
        row = self._table().cursor
        return self._names[row] if row < len(self._names) else None

    # -- Keys --------------------------------------------------------------------------------------------------

    def action_tab(self, number: int) -> None:
        """Look at another tab."""
        self._tables.query_one(TabbedContent).active = f"tab-{number}"

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
        line = self._tables.query_one("#filter", Input)
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
        line = self._tables.query_one("#filter", Input)
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
            self.push_screen(Pages(self._dsn, command, name))

    def on_table_opened(self) -> None:
        """Open the row that was clicked."""
        self.action_open("show")

    def action_cancel(self) -> None:
        """Cancel the chosen job or gang, if that is confirmed."""
        if (name := self._chosen()) is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._cancel(name)

        self.push_screen(Question(f"Cancel {name}?"), answered)

    @work
    async def _cancel(self, name: str) -> None:
        said = await answer_of(self._dsn, "cancel", name)
        self.notify(said.strip() or f"{name} is cancelled", markup=False)
        self._ask()


class Pages(ModalScreen[None]):
    """What a command says, to scroll through. It can be left before the command has answered."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "Back", priority=True)]

    def __init__(self, dsn: str, *words: str) -> None:
        super().__init__()
        self._dsn, self._words = dsn, words

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(f"gangq {' '.join(self._words)} … Esc leaves it", markup=False)

    @work
    async def on_mount(self) -> None:
        """Show the answer when it comes."""
        self.query_one(Static).update(Text.from_ansi(await answer_of(self._dsn, *self._words)))


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


async def answer_of(dsn: str, *words: str) -> str:
    """Run a command of `gangq` and return what it says. It is a process of its own, killed when nobody waits for it
    any more.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "gangq", *words),
        env={**os.environ, DSN_VARIABLE: dsn},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    return said.decode(errors="replace")


def _in_one_line(fleet: Row, *, held: bool) -> Text:
    text = Text(" held " if held else "", style="reverse")

    def part(words: str, style: str = "") -> None:
        text.append("  " if text else "")
        text.append(words, style)

    part(counted(fleet["live"], "worker"))
    if fleet["silent"]:
        part(f"{fleet['silent']} silent", "yellow")
    part(f"GPUs {fleet['held']} held, {fleet['free']} free")
    if fleet["quarantined"]:
        part(f"{fleet['quarantined']} quarantined", "red")
    part(f"{fleet['running']} running")
    part(f"{counted(fleet['waiting'], 'job')}, {counted(fleet['waiting_gangs'], 'gang')} wait")
    if fleet["trips"]:
        part(f"{counted(fleet['trips'], 'trip')} in 1h", "red")
    age = fleet["tick_age_s"]
    if age is None or age > _LATE_S:
        part("no tick yet" if age is None else f"last tick {seconds(age)} ago", "red")
    return text


def _key(value: Any) -> tuple[int, Any]:
    """Numbers before texts, and nothing last."""
    if value is None or value == "":
        return 2, ""
    return (0, value) if isinstance(value, (int, float)) else (1, output.plain(value))
