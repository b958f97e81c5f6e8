"""How commands answer: JSON for programs, tables for people, one sentence and exit code 1 for what was refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from core.errors import without_secrets

if TYPE_CHECKING:
    from rich.table import Table

#: How wide a table is that nobody's terminal bounds, characters: no line of it is folded.
PIPE_WIDTH = 240
#: A cell that must stay on one line, or it is misread.
_NUMBER = re.compile(r"[0-9.-]+")

#: The option that every command has which prints data.
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def one(value: Any, json: bool, sentence: str) -> None:
    """One thing: as an object, or as a sentence."""
    click.echo(_json(value) if json else _visible_lines(sentence))


def many(values: Sequence[Any], json: bool, columns: Sequence[str]) -> None:
    """Several things: as a list of objects, or as a table."""
    if json:
        click.echo(_json(values))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(_table([_fields(value) for value in values], columns))


def details(value: Any, json: bool) -> None:
    """One thing, whole: as an object, or a line for each field."""
    if json:
        click.echo(_json(value))
        return
    fields = _fields(value)
    width = max(map(len, fields)) + 2
    for name, cell in fields.items():
        told = ", ".join(map(str, cell)) if isinstance(cell, list | tuple) else cell
        if isinstance(cell, dict):
            told = "; ".join(f"{key} {_plain(one)}" for key, one in cell.items())
        click.echo(f"{name.replace('_', ' '):{width}}{_cell(told if told != '' else None)}")


def _plain(value: Any) -> str:
    return ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    from rich.table import Table
    from rich.text import Text  # what a name says in brackets is no markup

    table = Table(box=None, header_style="bold")
    for column in columns:
        number = all(_NUMBER.fullmatch(_cell(row[column])) for row in rows)
        heading = column.removesuffix("_tokens").replace("_", " ")
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row[column])) for column in columns))
    return table


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Turn refusals of these kinds into a sentence and exit code 1. A key that was typed for its id is cut short: what
    commands say is often kept."""
    try:
        yield
    except kinds as e:
        raise click.ClickException(_visible_lines(without_secrets(str(e)))) from None


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _fields(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else msgspec.structs.asdict(value)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:%Y-%m-%d %H:%M}" if isinstance(value, datetime) else visible(str(value))


def _visible_lines(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))


def visible(text: str) -> str:
    """Names are anybody's: what would steer a terminal, or turn its writing round, is spelled out."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
