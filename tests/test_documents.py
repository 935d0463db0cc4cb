"""The documents are true: every folder and module is introduced, links lead somewhere."""

import ast
import re
from pathlib import Path

import yaml

from model.version import VERSION

ROOT = Path(__file__).parent.parent
PACKAGES = ("model", "service", "logitd", "benchmarks")
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")


def listed_folders() -> set[str]:
    """Folders of ARCHITECTURE.md's list: a fenced tree whose indentation is two spaces a level.
    A line may name several that stand beside each other."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = text.split("## Where things are", 1)[1].split("```\n", 1)[1].split("```", 1)[0]
    found: set[str] = set()
    parents: list[str] = []
    for line in tree.splitlines():
        del parents[(len(line) - len(line.lstrip())) // 2 :]
        names = re.findall(r"[\w.]+/", line[:25])
        found.update("".join([*parents, name]) for name in names)
        parents.append(names[0])
    return found


def code_folders() -> set[str]:
    """Folders that hold modules of ours, tests aside."""
    return {
        f"{path.parent.relative_to(ROOT)}/"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }


def test_every_folder_has_its_line() -> None:
    """A stranger finds the room by ARCHITECTURE.md, and no line leads to a room that is gone."""
    listed = listed_folders()
    assert code_folders() - listed == set(), "folders without a line in ARCHITECTURE.md"
    assert {name for name in listed if not (ROOT / name).is_dir()} == set()


def test_every_module_says_what_it_is() -> None:
    """`make map` prints these lines, so each has to stand alone."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            opening = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            assert opening, f"{path.relative_to(ROOT)} has no docstring"
            assert len(opening.splitlines()[0]) > 10, path


def test_links_between_documents_lead_somewhere() -> None:
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target:
                assert (ROOT / target).exists(), f"{name} links to {target}"


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", text, flags=re.MULTILINE)
    assert versions[0] == VERSION


def test_compose_publishes_on_this_machine_only() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    for service in compose["services"].values():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), port
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]


def test_the_container_leaves_time_to_drain() -> None:
    """The engine is stopped by --drain-timeout; compose must not kill it earlier."""
    from service.settings.serve import ServeSettings

    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    grace = int(compose["services"]["logitd"]["stop_grace_period"].removesuffix("s"))
    assert grace > ServeSettings.model_fields["drain_timeout"].default + 5
