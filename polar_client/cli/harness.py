"""`polar harness`: install the CLI agents that tasks can name, and show which are there."""

import json
from pathlib import Path
from typing import Any

import click

import harness_adapters
from harness_adapters import npm

cache_option = click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Folder of the installed packs.  [default: $POLAR_CACHE/packs or ~/.cache/polar/packs]",
)


@click.group()
def harness() -> None:
    """The CLI agents that tasks can name as their harness."""


@harness.command()
@click.argument(
    "names", metavar="NAME...", nargs=-1, required=True, type=click.Choice(list(npm.PACKS))
)
@cache_option
def install(names: tuple[str, ...], cache: Path | None) -> None:
    """Put pinned copies of the harnesses NAME... into the cache folder.

    Needs npm. The folder of each is printed on stdout; what happens is told on stderr.
    """
    for name in dict.fromkeys(names):
        click.echo(npm.install(name, cache or npm.default_cache(), _say))


@harness.command("list")
@cache_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_(cache: Path | None, as_json: bool) -> None:
    """Show every harness, and whether the pack that it needs is installed."""
    adapters, problems = harness_adapters.load_adapters()
    for problem in problems:
        _say(problem)
    packs = {pack.name: pack for pack in npm.installed(cache or npm.default_cache())}
    rows = [_row(name, adapter.pack, packs) for name, adapter in adapters.items()]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    table = [("HARNESS", "VERSION", "STATE", "SIZE", "PATH"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        click.echo(line.rstrip())


@harness.command()
@click.argument("name", type=click.Choice(list(npm.PACKS)))
@cache_option
def path(name: str, cache: Path | None) -> None:
    """Print the folder of the installed harness NAME."""
    for pack in npm.installed(cache or npm.default_cache()):
        if pack.name == name:
            click.echo(pack.path)
            return
    raise npm.PackError(f"{name} is not installed; run: polar harness install {name}")


def _row(name: str, pack: str | None, packs: dict[str, npm.InstalledPack]) -> dict[str, Any]:
    found = packs.get(pack) if pack else None
    pinned = npm.PACKS.get(pack) if pack else None
    state = "needs no pack" if pack is None else "installed" if found else "not installed"
    return {
        "harness": name,
        "version": found.version if found else pinned.version if pinned else None,
        "state": state,
        "path": str(found.path) if found else None,
        "bytes": found.bytes if found else None,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    size = f"{row['bytes'] / 1e6:.0f} MB" if row["bytes"] is not None else ""
    return (row["harness"], row["version"] or "", row["state"], size, row["path"] or "")


def _say(line: str) -> None:
    click.echo(line, err=True)
