"""Getting an instruction to the model as it is, past what a CLI would take for its own commands."""


def as_words(command: str, instruction: str) -> str:
    """`command`, with a space before an instruction on its stdin that begins with a slash.

    Its first word would be taken for one of the CLI's own commands ("/clear", "/init") and the
    instruction would never reach the model.
    """
    if instruction.startswith("/"):
        return f"{{ printf ' '; cat; }} | {command}"
    return command
