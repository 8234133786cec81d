from harness_adapters import skills


def test_the_skills_folder_of_the_configuration_becomes_the_tasks() -> None:
    command = skills.linked("cli -p", "/my skills", "/home/.cli")
    assert command == "ln -sfn '/my skills' /home/.cli/skills && cli -p"


def test_without_skills_the_command_stays_as_it_is() -> None:
    assert skills.linked("cli -p", None, "/home/.cli") == "cli -p"
