"""Any shell command as a harness: it finds the instruction three ways and the model by environment."""

import re
import shlex
from typing import ClassVar

import msgspec

from harness_adapters import events
from harness_adapters.base import AgentSpec, HarnessEnd, LaunchContext, LaunchPlan

PLACEHOLDER = re.compile(r"(?<!\$)\{instruction\}")
"""`${instruction}` is a variable of the shell and stays one."""

QUOTED = re.compile(r"""(?<!\$)(?:"\{instruction\}|\{instruction\}"|'\{instruction\}')""")
"""A single quote on one side only belongs to a nested `sh -c '...'`, in which the word works."""


class ShellSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The harness `shell` has no settings: its command is all there is to say."""


class Shell:
    """Adapter for `agent.custom_shell`. HOME stays the runtime's own, as the command expects it."""

    name: ClassVar[str] = "shell"
    pack: ClassVar[str | None] = None
    Settings: ClassVar[type[msgspec.Struct]] = ShellSettings

    def plan(self, agent: AgentSpec, context: LaunchContext) -> LaunchPlan:
        shell = agent.custom_shell
        if shell is None:
            raise ValueError("agent.custom_shell is required by the harness 'shell'")
        return LaunchPlan(
            command=_substituted(shell.command, context.instruction_path),
            env={
                "POLAR_INSTRUCTION_FILE": context.instruction_path,
                "POLAR_MODEL_NAME": context.model_name,
                **(shell.env or {}),
                **agent.env,
            },
            cwd=shell.cwd or context.workdir,
        )

    def ended(self, return_code: int | None, stdout_tail: bytes, stderr_tail: bytes) -> HarnessEnd:
        return events.by_status(self.name, return_code, stderr_tail)


def _substituted(command: str, instruction_path: str) -> str:
    """Put the instruction where `{instruction}` stands, as one word of the shell.

    The word reads the file, so that neither quotes in the instruction nor the limit on the length
    of `sh -c TEXT` (128 KiB) matter; a program that gets it as an argument has that limit itself.
    """
    if QUOTED.search(command):
        raise ValueError(
            "agent.custom_shell.command: write {instruction} without quotes around it; "
            "it is replaced by one quoted word"
        )
    return PLACEHOLDER.sub(lambda _: f'"$(cat {shlex.quote(instruction_path)})"', command)
