"""Giving a CLI the skills of a task."""

import shlex


def linked(command: str, skills_path: str | None, config_dir: str) -> str:
    """`command`, once the folder `skills` of the CLI's configuration is the task's; as it is where
    there are none. The configuration's folder must be there."""
    if not skills_path:
        return command
    link = shlex.join(["ln", "-sfn", skills_path, f"{config_dir}/skills"])
    return f"{link} && {command}"
