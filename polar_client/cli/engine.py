"""`polar engine`: look at a model server as a node would before it uses it."""

import sys
from typing import TYPE_CHECKING

import anyio
import click
import msgspec
from rich.markup import escape
from rich.table import Table

from polar_client.cli.show import output
from polar_gateway.config import InferenceConfig

if TYPE_CHECKING:
    from polar_gateway.engines.base import EngineProbe


@click.group()
def engine() -> None:
    """Model servers: what they can do."""


@engine.command()
@click.argument("url")
@click.option(
    "--engine",
    "kind",
    type=click.Choice(["vllm", "sglang", "openai"]),
    default="vllm",
    show_default=True,
    help="What kind of server it is.",
)
@click.option(
    "--model", default="", help="Its name for the weights.  [default: the first it lists]"
)
@click.option("--api-key-env", help="Name of the variable that holds the server's bearer token.")
@click.option(
    "--token-route",
    type=click.Choice(["chat", "generate"]),
    default="chat",
    show_default=True,
    help="The route for prompts of ids that a node would prefer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def probe(
    url: str,
    kind: str,
    model: str,
    api_key_env: str | None,
    token_route: str,
    as_json: bool,
) -> None:
    """Ask the model server at URL what it can do, by a few short calls.

    Exits with status 1 where it lacks what training cannot do without, in words.
    """
    section = {
        "engine": kind,
        "base_url": url,
        "api_key_env": api_key_env,
        "token_route": token_route,
    }
    found = anyio.run(_probed, msgspec.convert(section, InferenceConfig), model)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        _show(found, url)
    if found.problems:
        sys.exit(1)


async def _probed(config: InferenceConfig, model: str) -> "EngineProbe":
    from polar_gateway.engines import open_engine

    opened = open_engine(config, model=model)
    try:
        return await opened.probe()
    finally:
        await opened.aclose()


def _show(found: "EngineProbe", url: str) -> None:
    console = output()
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows(found):
        table.add_row(name, escape(value))
    console.print(table)
    for sentence in found.notes:
        console.print(f"[yellow]note[/]  {escape(sentence)}", soft_wrap=True, highlight=False)
    for sentence in found.problems:
        console.print(f"[red]problem[/]  {escape(sentence)}", soft_wrap=True, highlight=False)
    verdict = "cannot" if found.problems else "can"
    console.print(f"What is sampled at {escape(url)} {verdict} be trained on.", highlight=False)


def rows(found: "EngineProbe") -> list[tuple[str, str]]:
    """The report line by line."""
    ends = [
        f"{token_id} {text}".strip()
        for token_id, text in zip(
            found.end_of_turn_ids,
            found.end_of_turn_texts or [""] * len(found.end_of_turn_ids),
            strict=True,
        )
    ]
    return [
        ("engine", f"{found.engine} {found.version}".strip()),
        ("model", found.model or "none"),
        ("context", f"{found.max_model_len} tokens" if found.max_model_len else "not told"),
        ("token ids", _yes(found.token_ids)),
        ("ids in streams", _yes(found.stream_ids)),
        ("prompts of ids", ", ".join(found.token_routes) or "no"),
        ("renders messages", found.renders),
        ("log probabilities", found.logprob_kind),
        ("ends of turns", ", ".join(ends) or "not told"),
        ("reasoning parser", _yes(found.reasoning_parser)),
        ("tool parser", _yes(found.tool_parser)),
        ("KV connector", _yes(found.kv_connector)),
        ("weight versions", _yes(found.weight_versions)),
        ("goes on after aborts", _yes(found.resumes)),
        ("takes orders to", ", ".join(found.controls) or "nothing"),
    ]


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "not known"}[value]
