"""The flags of ``vllm serve`` by release: those of the installed vLLM from its parser, those of older ones from their source.

    cd tests && python -m real_vllm.flags FOLDER...     writes experiments/vllm_serve/facts/flags.json anew

A folder holds the files of one release (``arg_utils.py``, ``cli_args.py`` and ``config`` of a wheel of ``vllm-<release>``), and is named
by it. Of a release without its parser, flags are the constants that ``add_argument`` is called with, and the fields of the front end's
class; one is a switch where the annotation of its field, or its action, is of a boolean.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from fragmeter.experiments.vllm_serve.flags import FILE

SWITCH, VALUE, VALUES = "switch", "value", "values"
_BOOLEAN = re.compile(r"(Optional\[)?bool\]?( \| None)?")
_ONE_WORD = re.compile(r"-[A-Za-z]+")
#: Actions of flags that start nothing.
_HELP = {"help", "version"}
Flags = dict[str, tuple[str, list[str]]]
"""Kind and other spellings (without dashes) of each flag."""


def installed() -> Flags:
    """The flags of the installed vLLM."""
    from fragmeter.sim.real_vllm.core import BarePlatform  # isort: skip  # before any of vLLM

    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with mock.patch.object(BarePlatform, "device_type", "cuda"):
        parser = make_arg_parser(FlexibleArgumentParser())
    found: Flags = {}
    for action in parser._actions:
        names = [name.lstrip("-") for name in action.option_strings if not name.startswith("--no-")]
        if names and action.dest not in _HELP:
            longest = next(name.lstrip("-") for name in action.option_strings if name.startswith("--"))
            found[longest] = _kind(action), [name for name in names if name not in (longest, opposite(longest))]
    return found


def opposite(name: str) -> str:
    """The spelling that turns a switch off beside ``--no-...``: ``disable-x`` of ``enable-x``, and the other way round."""
    for one, other in (("enable-", "disable-"), ("disable-", "enable-")):
        if name.startswith(one):
            return other + name.removeprefix(one)
    return name


def _kind(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return SWITCH
    return VALUES if action.nargs in ("+", "*") else VALUE


def of_source(folder: Path) -> Flags:
    """The flags of an older release."""
    booleans = dict(_fields(folder))
    found: Flags = {}
    for path in (*folder.rglob("*/arg_utils.py"), *folder.rglob("*/cli_args.py"), *folder.rglob("*/cli/serve.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                longest = next((each[2:] for each in names if each.startswith("--")), None)
                if longest is not None:
                    found[longest] = (
                        _kind_of_call(node, longest, booleans),
                        [
                            each.lstrip("-")
                            for each in names
                            if each.lstrip("-") != longest and not each.startswith("--no-")
                        ],
                    )
            elif isinstance(node, ast.ClassDef) and node.name in ("FrontendArgs", "BaseFrontendArgs"):
                for field, kind in _annotated(node):
                    found.setdefault(field.replace("_", "-"), (kind, []))
    return found


def _kind_of_call(call: ast.Call, name: str, booleans: dict[str, str]) -> str:
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if "store_true" in keywords.get("action", "") or "Bool" in keywords.get("action", ""):
        return SWITCH
    if keywords.get("nargs", "").strip("'") in ("+", "*"):
        return VALUES
    # **group_kwargs["field"]
    fields = re.findall(r"""\[['"](\w+)['"]\]""", keywords.get(None, ""))
    return booleans.get((fields or [name.replace("-", "_")])[0], VALUE) if None in keywords else VALUE


def _fields(folder: Path) -> Iterator[tuple[str, str]]:
    """Fields of all classes of the configuration, each with its kind."""
    for path in (*folder.rglob("*/config/*.py"), *folder.rglob("vllm/config.py"), *folder.rglob("*/arg_utils.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield from _annotated(node)


def _annotated(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            text = ast.unparse(each.annotation)
            if text.startswith("ClassVar"):
                continue
            kind = (
                SWITCH
                if _BOOLEAN.fullmatch(text)
                else VALUES
                if re.match(r"(Optional\[)?list\[", text, re.I)
                else VALUE
            )
            yield each.target.id, kind


def release_of(folder: Path) -> tuple[int, int, int]:
    """The release that a folder is named by."""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)$", folder.name)
    assert found is not None, folder
    return int(found[1]), int(found[2]), int(found[3])


def table(releases: dict[tuple[int, int], Flags]) -> dict[str, object]:
    """All flags, each with its first and its last release; null for the last of all."""
    ordered = sorted(releases)
    flags = {}
    for name in sorted({name for found in releases.values() for name in found}):
        having = [release for release in ordered if name in releases[release]]
        kind, _ = releases[having[-1]][name]
        last = None if having[-1] == ordered[-1] else _text(having[-1])
        flags[name] = [_text(having[0]), last, kind]
    spellings = {
        other: name for release in ordered for name, (_, others) in releases[release].items() for other in others
    }
    return {
        "releases": [_text(release) for release in ordered],
        "flags": flags,
        "spellings": dict(sorted(spellings.items())),
    }


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


if __name__ == "__main__":
    import vllm

    major, minor = map(int, vllm.__version__.split(".")[:2])
    # The last patch release of each.
    folders = {release_of(folder)[:2]: folder for folder in sorted(map(Path, sys.argv[1:]), key=release_of)}
    every = {release: of_source(folder) for release, folder in folders.items()} | {(major, minor): installed()}
    lines = json.dumps(table(every), indent=0)
    FILE.write_text(re.sub(r"\[\n\"([^]]*)\n\]", lambda found: '["' + found[1].replace("\n", " ") + "]", lines) + "\n")
