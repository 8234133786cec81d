"""The command `polar`, and the composition root: the one place that may start both services.

Commands import what they need when they run, so that `polar --help` stays instant.
"""

import os
import sys
from collections.abc import Iterator
from importlib import import_module

import click

from polar_client.cli.services import gateway, server, up
from polar_client.cli.tasks import cancel, status, submit


class _LaterCommands(click.Group):
    """A group whose module is imported when one of its commands is needed."""

    def _group(self) -> click.Group:
        group: click.Group = getattr(import_module(f"polar_client.cli.{self.name}"), str(self.name))
        return group

    def list_commands(self, ctx: click.Context) -> list[str]:
        return self._group().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._group().get_command(ctx, cmd_name)


harness_commands = _LaterCommands(
    name="harness", help="Install and list the CLI agents that tasks can name as their harness."
)
engine_commands = _LaterCommands(
    name="engine", help="Look at a model server before a node uses it."
)
journal_commands = _LaterCommands(
    name="journal", help="Read, verify and rebuild recorded sessions."
)
COMMANDS = (
    up,
    server,
    gateway,
    submit,
    status,
    cancel,
    harness_commands,
    engine_commands,
    journal_commands,
)
ALIASES = {"serve_rollout": server, "serve_gateway": gateway}
"""Names that existing scripts use."""

FAILED, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130


class _Commands(click.Group):
    """Lists commands in the order in which people meet them, and aliases not at all."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [str(command.name) for command in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or ALIASES.get(cmd_name)


@click.group(
    name="polar",
    cls=_Commands,
    commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done; 1 it failed, or a session did not complete; 2 wrong usage or"
    " configuration; 3 the server cannot be reached; 130 interrupted. POLAR_DEBUG=1 shows tracebacks.",
)
@click.version_option(package_name="polar-rollout", message="%(prog)s %(version)s")
def polar() -> None:
    """Rollouts for reinforcement learning of language agents, from unmodified CLI harnesses."""


def main() -> None:
    """Run the command; every error leaves as one sentence on stderr and an exit status."""
    try:
        sys.exit(polar.main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(USAGE)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except Exception as error:
        if os.environ.get("POLAR_DEBUG"):
            raise
        for cause in _causes(error):
            click.echo(f"polar: {_sentence(cause)}", err=True)
        sys.exit(_exit_status(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What broke, without the groups that task groups wrap it in."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
    else:
        yield error


def _sentence(cause: BaseException) -> str:
    from polar_client.client import RolloutError

    if isinstance(cause, RolloutError) and cause.status == 401:
        return f"{cause} (--token-file, POLAR_TOKEN_FILE or POLAR_TOKEN)"
    if isinstance(cause, OSError) and cause.strerror and cause.filename is None:
        return cause.strerror
    return str(cause) or type(cause).__name__


def _exit_status(error: Exception) -> int:
    from polar_client.cli.tasks import TaskFileError
    from polar_client.client import RolloutError
    from polar_server.config import ConfigError

    causes = list(_causes(error))
    if any(isinstance(cause, ConfigError | TaskFileError) for cause in causes):
        return USAGE
    if any(isinstance(cause, RolloutError) and cause.unreachable for cause in causes):
        return UNREACHABLE
    return FAILED
