"""`polar journal`: read, verify and rebuild what a node has recorded of a session."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.markup import escape
from rich.table import Table

from polar_client.cli.show import output

if TYPE_CHECKING:
    from builders.records import Completion
    from polar_gateway.capture.inspection import Inspected

file_argument = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))

HEADINGS = (
    "#",
    "call",
    "kind",
    "after",
    "as",
    "asked with",
    "policy",
    "prompt",
    "of it new",
    "sampled",
    "end",
    "findings",
)
NUMBERS = ("#", "after", "prompt", "of it new", "sampled")


@click.group()
def journal() -> None:
    """The record of a session's model calls."""


@journal.command()
@file_argument
def verify(file: Path) -> None:
    """Check that the journal FILE is whole.

    So must be the tensors that it refers to. Exits with status 1 where it is not, in words; what comes before is good all the same.
    """
    from polar_gateway.capture.inspection import calls_in_the_end, inspected

    found = inspected(file)
    records, calls = len(found.contents.records), calls_in_the_end(found.contents)
    for problem in found.problems:
        click.echo(f"{file}: {problem}", err=True)
    state = "whole" if not found.problems else "not whole"
    click.echo(f"{file}: {state}; {_count(records, 'record')}, {_count(calls, 'call')} to the end")
    if found.problems:
        sys.exit(1)


@journal.command()
@file_argument
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON, one a line.")
def show(file: Path, as_json: bool) -> None:
    """Show the calls in the journal FILE.

    In the order in which they were asked. Where it is not whole, that is said on stderr and what
    comes before is shown.
    """
    from polar_gateway.capture.inspection import readable

    found = _inspected(file)
    if as_json:
        contents = found.contents
        for record, place in zip(contents.records, contents.places, strict=True):
            click.echo(msgspec.json.encode(readable(record, place)))
    else:
        _show(found)


@journal.command()
@file_argument
@click.option("--builder", default="prefix_merging", show_default=True, help="Which one builds.")
@click.option("--config", default="{}", help="Its configuration, a JSON object.")
@click.option(
    "-o",
    "--output",
    "where",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the trajectory there.  [default: stdout]",
)
def build(file: Path, builder: str, config: str, where: Path | None) -> None:
    """Build the traces of the journal FILE anew.

    As JSON, checked, and without a reward, which no journal knows. A journal that is not whole is built as far as it
    goes; that is said on stderr.
    """
    from polar_gateway import stages

    session = _inspected(file).session
    for finding in session.findings:
        click.echo(f"{file}: {finding}", err=True)
    trajectory = stages.built(builder, _object(config), session)
    encoded = msgspec.json.encode(trajectory)
    if where is None:
        click.echo(encoded)
    else:
        where.write_bytes(encoded)


def _inspected(file: Path) -> "Inspected":
    """What there is of a journal; what is wrong with it is told on stderr."""
    from polar_gateway.capture.inspection import inspected

    found = inspected(file)
    if not found.contents.records:
        raise click.ClickException(f"{file}: {'; '.join(found.problems)}")
    for problem in found.problems:
        click.echo(f"{file}: {problem}", err=True)
    return found


def _object(config: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(config, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(str(error), param_hint="--config") from error


def _show(found: "Inspected") -> None:
    session, console = found.session, output()
    console.print(f"[bold]session {escape(session.session_id)}[/]", highlight=False)
    facts = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (
        ("task", session.task_id or "none"),
        ("ends of turns", ", ".join(map(str, session.end_of_turn_ids)) or "not told"),
        ("state", "sealed" if found.sealed else "not sealed"),
        ("findings", ", ".join(session.findings) or "none"),
    ):
        facts.add_row(name, escape(value))
    console.print(facts)
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in NUMBERS else "left")
    for completion in session.completions:
        table.add_row(*map(escape, row(completion)))
    console.print(table)


def row(completion: "Completion") -> list[str]:
    """One call in words: its number, name and kind, whose answer it goes on from and by what that
    was told, how and of which weights it was asked, its tokens, its end and what is wrong with it."""
    from polar_gateway.capture.inspection import ended

    previous = completion.previous
    told: list[str] = [] if completion.attached is None else [completion.attached]
    if completion.continued_tokens is not None:
        told.append(f"{completion.continued_tokens} tokens")
    if completion.ambiguous:
        told.append("ambiguous")
    return [
        str(completion.index),
        completion.completion_id,
        completion.kind,
        "" if previous is None else str(previous.index),
        ", ".join(told),
        completion.mode,
        completion.policy_version or "",
        str(completion.prompt_length),
        str(len(completion.tail)),
        str(len(completion.sampled_ids)),
        ended(completion),
        ", ".join(completion.findings),
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
