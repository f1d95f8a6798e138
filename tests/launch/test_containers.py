"""The container recipes: their layers, what they install, and what gets into the image."""

import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.processes import output, python

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
DEFINITION = (ROOT / "apptainer.def").read_text()
# https://docs.docker.com/reference/dockerfile/
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR"}
NEEDED = {"pyproject.toml", "constraints.txt", "LICENSE", "README.md", "data_prep", "launch",
          "pipeline", "postnorm", "experiments", "configs"}  # fmt: skip


def instructions() -> list[tuple[str, str]]:
    """The steps of the Dockerfile, each with its arguments."""
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined]


def test_dependencies_come_before_code_and_the_user_owns_its_folder() -> None:
    steps = instructions()
    assert {name for name, _ in steps} <= INSTRUCTIONS
    words = [f"{name} {text}" for name, text in steps]
    [fetch] = [i for i, line in enumerate(words) if "--requirement requirements.txt" in line]
    assert words.index("COPY pyproject.toml constraints.txt ./") < fetch < words.index("COPY . .")
    [make] = [i for i, line in enumerate(words) if "--mode=1777 /work" in line]
    assert "--owner=postnorm" in words[make]
    assert make < words.index("WORKDIR /work")
    assert words.index("USER postnorm") > max(i for i, line in enumerate(words) if "RUN" in line)
    assert words[0] == "ARG VARIANT=cpu"
    assert {"FROM python:3.11-slim AS cpu", "FROM python:3.11-slim AS cuda", "FROM ${VARIANT}"} <= {
        *words
    }


@pytest.mark.smoke
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("recipe", [DOCKERFILE, DEFINITION], ids=["docker", "apptainer"])
def test_both_recipes_install_all_but_tools_for_developers(recipe: str) -> None:
    [program] = re.findall(r'python -c "(.*)" > requirements.txt', recipe)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    expected = {*project["dependencies"], *extras["train"], *extras["hf"]} - {"postnorm[train]"}
    assert set(python("-c", program).splitlines()) == expected
    assert "pip install --constraint constraints.txt --requirement requirements.txt" in recipe
    assert "pip install --no-deps --editable ." in recipe


def test_only_the_packages_get_into_the_image() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == NEEDED
    assert any(fnmatch.fnmatch("pipeline/use/__pycache__", rule) for rule in rules[1:])
    files = DEFINITION.partition("%files\n")[2].partition("\n\n")[0].splitlines()
    assert {line.split()[0] for line in files} == NEEDED
    assert all((ROOT / name).exists() for name in NEEDED)


def test_the_definition_has_its_sections() -> None:
    # https://apptainer.org/docs/user/main/definition_files.html
    head = [line for line in DEFINITION.splitlines() if line and not line.startswith("#")]
    assert head[:2] == ["Bootstrap: docker", "From: python:3.11-slim"]
    sections = re.findall(r"^%(\w+)$", DEFINITION, re.MULTILINE)
    assert sections == ["arguments", "files", "post", "environment", "runscript", "test"]
    arguments = set(re.findall(r"^    (\w+)=", DEFINITION.partition("%files")[0], re.MULTILINE))
    assert set(re.findall(r"{{ (\w+) }}", DEFINITION)) == arguments


@pytest.mark.usefixtures("processes")
def test_the_definition_is_filled_in_as_both_programs_do() -> None:
    """By the rules of internal/pkg/build/args, of which those of SingularityCE are stricter."""
    lines = DEFINITION.partition("%arguments\n")[2].partition("%files")[0].splitlines()
    defaults = dict(map(str.strip, line.split("=", 1)) for line in lines if line.strip())
    assert all(defaults.values()), "SingularityCE: missing value portion"
    for index in (defaults["TORCH_INDEX"], "https://download.pytorch.org/whl/cpu"):
        values = {**defaults, "TORCH_INDEX": index}
        filled = DEFINITION
        for name, value in values.items():
            filled = re.sub(r"{{\s*" + name + r"\s*}}", value, filled)
        post = filled.partition("%post\n")[2].partition("\n\n")[0]
        subprocess.run(["sh", "-n"], input=post, text=True, check=True)
        start = post[post.index("index=") : post.index("cd /opt")] + 'echo "$PIP_EXTRA_INDEX_URL"'
        assert output("sh", input=start, env={}).strip() == ("" if index == "none" else index)
