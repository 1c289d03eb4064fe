"""Words of a command line, as a shell splits them and fills in its variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ...sim.types.user_files import json_value

#: ``$NAME``, ``${NAME}``, ``${NAME:-default}``, and Kubernetes' ``$(NAME)``.
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|\((\w+)\)|(\w+))")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_MODULE = "vllm.entrypoints.openai.api_server"


def split(text: str) -> list[str]:
    """The words of a text, with lines joined by backslashes, and without comments.

    Raises:
        ValueError: A quote is left open.
    """
    return shlex.split(text.replace("\\\r\n", " ").replace("\\\n", " "), comments=True)


def line_words(text: str) -> list[str]:
    """The words of a pasted line: of a command, of a JSON array such as Docker's CMD, or of the script of a ``bash -c``.

    Raises:
        ValueError: A quote is left open.
    """
    try:
        words = list(map(str, json_value(text))) if text.lstrip().startswith("[") else split(text)
    except ValueError:
        words = split(text)
    return [each for word in words for each in (split(word) if _is_script(word) else [word])]


def _is_script(word: str) -> bool:
    return first_argument(word.split()) is not None


def first_argument(words: Sequence[str]) -> int | None:
    """Index of the word behind ``vllm serve`` or the module of its server; None without either."""
    for place, (word, after) in enumerate(pairwise(words)):
        if word.rsplit("/", 1)[-1] == "vllm" and after == "serve" or word == "-m" and after == _MODULE:
            return place + 2
    return None


def assigned(words: Sequence[str]) -> dict[str, str]:
    """Variables that a shell assigns, or a container gets, in these words."""
    parts = (word.removesuffix(";").partition("=") for word in words if ASSIGNMENT.fullmatch(word))
    return {name: value for name, _, value in parts}


def filled(word: str, environment: Mapping[str, str]) -> str:
    """A word with the values of its variables, or their defaults; others stay."""

    def value(found: re.Match[str]) -> str:
        default = found[0] if found[2] is None else found[2]
        return environment.get(found[1] or found[3] or found[4], default)

    return VARIABLE.sub(value, word)
