"""Getting an instruction to the model as it is, past what a CLI would take for its own commands."""

import re

COMMAND = "instruction"
"""Name of the custom command that holds an instruction for a CLI of Gemini's family."""

_MENTION = re.compile(r"@[^\s,;!?()\[\]{}]")

_FILLED_IN = ("{{args}}", "!{", "@{")


def as_words(command: str, instruction: str) -> str:
    """`command`, with a space before an instruction on its stdin that begins with a slash.

    Its first word would be taken for one of the CLI's own commands ("/clear", "/init") and the
    instruction would never reach the model.
    """
    if instruction.startswith("/"):
        return f"{{ printf ' '; cat; }} | {command}"
    return command


def wants_command(instruction: str) -> bool:
    """Whether a CLI of Gemini's family gets `instruction` whole only as a custom command.

    Those look for "@path" in a prompt, and where a path exists they rewrite the prompt and put the
    files' contents after it. The text of a custom command is left alone, but for placeholders of
    its own, so that an instruction with such a placeholder is better off on stdin.
    """
    return bool(_MENTION.search(instruction)) and not any(
        mark in instruction for mark in _FILLED_IN
    )


def as_command(command: str) -> str:
    """`command`, run with the custom command COMMAND as its prompt; its stdin is not read."""
    return f"{{ cat > /dev/null; printf /{COMMAND}; }} | {command}"
