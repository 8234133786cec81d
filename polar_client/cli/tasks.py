"""The commands that talk to a server: submit, status, cancel."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from polar_client.client import RolloutClient
    from polar_server.protocol import TaskStatus


class TaskFileError(Exception):
    """A task file cannot be read; the message names the file."""


def connection_options(command: Any) -> Any:
    """--url, --token-file and --config: where the server is, and how to be let in."""
    for option in (
        click.option(
            "--url",
            "--rollout-url",
            envvar="POLAR_URL",
            help="The server's address [http://127.0.0.1:8080].",
        ),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path, dir_okay=False),
            help="File that holds the server's token; POLAR_TOKEN and POLAR_TOKEN_FILE work too.",
        ),
        click.option(
            "-c",
            "--config",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            help="Topology file of the deployment, to take address and token file from.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--wait", is_flag=True, help="Follow the task until it has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON, and nothing else.")
@connection_options
def submit(
    file: Path, wait: bool, as_json: bool, url: str | None, token_file: Path | None, config: Path | None
) -> None:
    """Submit the task in FILE (JSON or YAML; - reads standard input).

    With --wait, exits 0 if every session completed and 1 if one did not.
    """
    import anyio

    document = read_task(file)
    complete = anyio.run(_submit, document, wait, as_json, url, token_file, config)
    if not complete:
        raise SystemExit(1)


@click.command()
@click.argument("task_id", metavar="[TASK]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all traces for a TASK.")
@connection_options
def status(
    task_id: str | None, as_json: bool, url: str | None, token_file: Path | None, config: Path | None
) -> None:
    """Show TASK, or the server's nodes and tasks."""
    import anyio

    anyio.run(_status, task_id, as_json, url, token_file, config)


@click.command()
@click.argument("task_id", metavar="TASK")
@connection_options
def cancel(task_id: str, url: str | None, token_file: Path | None, config: Path | None) -> None:
    """Cancel TASK; its sessions are stopped and reported."""
    import anyio

    anyio.run(_cancel, task_id, url, token_file, config)


def read_task(file: Path) -> dict[str, Any]:
    """The document in a JSON or YAML file, as it stands there. Raises TaskFileError."""
    import msgspec
    import yaml

    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except OSError as error:
        raise TaskFileError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{file} is not UTF-8 text: {error}") from error
    try:
        document = msgspec.json.decode(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (msgspec.DecodeError, yaml.YAMLError) as error:
        raise TaskFileError(f"{file} is neither JSON nor YAML: {error}") from error
    if not isinstance(document, dict):
        raise TaskFileError(f"{file} must hold one task, a mapping; it holds {document!r:.60}")
    return document


async def _submit(
    document: dict[str, Any],
    wait: bool,
    as_json: bool,
    url: str | None,
    token_file: Path | None,
    config: Path | None,
) -> bool:
    async with _client(url, token_file, config) as client:
        submitted = await client.submit(document)
        if not wait:
            _print(submitted if as_json else f"task {submitted.task_id} is {submitted.status}")
            return True
        agent = document.get("agent") or {}
        label = agent.get("harness") or agent.get("import_path") or "session"
        try:
            ended = await _follow(client, submitted.task_id, label)
        except BaseException:
            click.echo(
                f"no longer waiting; `polar status {submitted.task_id}` shows the task,"
                f" `polar cancel {submitted.task_id}` ends it",
                err=True,
            )
            raise
        if as_json:
            _print(ended)
        else:
            _print_ended(ended, label)
        return _complete(ended)


async def _status(
    task_id: str | None, as_json: bool, url: str | None, token_file: Path | None, config: Path | None
) -> None:
    from polar_client.cli.show import output, overview, session_table
    from polar_client.client import ENDED

    async with _client(url, token_file, config) as client:
        if task_id is None:
            server = await client.rollout_status()
            if as_json:
                _print(server)
            else:
                output().print(*overview(server), sep="\n")
            return
        if as_json:
            _print(await client.status(task_id))
            return
        task = await client.status(task_id, include=())
        if task.status in ENDED:
            _print_ended(await client.status(task_id), "session")
        else:
            done = f"{task.completed_sessions} of {task.total_sessions} sessions have ended"
            click.echo(f"task {task.task_id} is {task.status}: {done}\n")
            output().print(session_table(task.sessions))


async def _cancel(
    task_id: str, url: str | None, token_file: Path | None, config: Path | None
) -> None:
    async with _client(url, token_file, config) as client:
        task = await client.cancel(task_id)
    click.echo(f"task {task.task_id} is {task.status}")


async def _follow(client: "RolloutClient", task_id: str, label: str) -> "TaskStatus":
    from rich.console import Console

    from polar_client.cli.show import Progress

    with Progress(Console(stderr=True), {task_id: label}) as progress:
        async for task in client.watch(task_id):
            progress.update(task)
    return await client.status(task_id)


def _client(url: str | None, token_file: Path | None, config: Path | None) -> "RolloutClient":
    from polar_client.client import RolloutClient, find_token
    from polar_server.config import load_topology

    token = find_token(token_file)
    if url is None or config is not None:
        rollout = load_topology(config).rollout
        url = url or rollout.reachable_url
        # A server's own token is for that server alone, never for whatever --url names.
        if token is None and rollout.token_path.exists():
            token = find_token(rollout.token_path)
    return RolloutClient(url, token=token)


def _complete(task: "TaskStatus") -> bool:
    from polar_client.client import session_results

    ended = session_results(task.results)
    return len(ended) == task.total_sessions and all(one.status == "COMPLETED" for one in ended)


def _print(answer: Any) -> None:
    import msgspec

    click.echo(answer if isinstance(answer, str) else msgspec.json.encode(answer))


def _print_ended(task: "TaskStatus", label: str) -> None:
    from polar_client.cli.show import output, result_table, summarize
    from polar_client.client import session_results

    rows = [
        (f"{label} {number}", summarize(result))
        for number, result in enumerate(session_results(task.results), start=1)
    ]
    click.echo(f"task {task.task_id} is {task.status}\n")
    output().print(result_table(rows))
    for name, row in rows:
        if row.error:
            click.echo(f"{name}: {row.error}", err=True)
    if task.result_paths:
        click.echo("\nresults, on the server:")
    for path in task.result_paths:
        click.echo(f"  {path}")
