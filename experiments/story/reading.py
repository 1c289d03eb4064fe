"""Stories: requests with words, and the settings of one or several runs that serve them, in a TOML file.

    title = "Two requests, one pool"
    text = "What to look at."

    [settings]                      # of every run, by the names of flags
    block_size = 4
    num_gpu_blocks_override = 8
    max_model_len = 32

    [[runs]]                        # one each; without any, one run of the settings
    name = "vLLM"
    policy = "vllm-sosp23"          # besides, and in place of, the settings

    [[requests]]
    name = "A"
    arrival_s = 0                   # a step takes one second
    prompt = "the words of the prompt"
    output = "and of the output"    # outputs = ["...", "..."] for samples or beams

    [[captions]]
    run = "vLLM"                    # needed where there are several
    step = 2
    text = "A sentence before those of the program."

The stories of the package are such files, in the folder ``stories``. Words with equal prompts before them are equal tokens, so
a prefix cache finds them.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from difflib import get_close_matches
from importlib import resources
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from ...sim.config.settings import Settings, settings
from ...sim.types.errors import SettingError, UserError
from ...sim.types.user_files import text_of, toml_value
from .source import Source
from .story import CONFIG, MOST_SLOTS, MOST_WORDS, Caption, Story, StoryRequest

_TOY = {"model": "toy-opt", "policy": "vllm-sosp23"}
#: Settings that a story cannot show, and why.
_REFUSED = {
    "window": "a story shows the whole run; leave it out",
    "shared_prefix_tokens": "a story shows no pinned prefix; leave it out",
    **dict.fromkeys(("cost", "server", "step_scale"), "a step of a story takes one second; leave it out"),
    **dict.fromkeys(("ids", "leap"), "a story has ids and single steps anyway; leave it out"),
}


@checked_dataclass(frozen=True, kw_only=True, config=CONFIG)
class _File:
    """A TOML file; settings are checked by the simulator."""

    title: Annotated[str, Field(min_length=1)]
    text: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    runs: list[dict[str, Any]] = Field(default_factory=list)
    requests: Annotated[list[StoryRequest], Field(min_length=1, max_length=16)]
    captions: list[Caption] = Field(default_factory=list)


#: The fields of each table, and those of the file.
_FIELDS = {
    name: [field.name for field in fields(kind)]
    for name, kind in (("", _File), ("requests", StoryRequest), ("captions", Caption))
}
#: The stories of the package, in reading order.
_ORDER = (
    "first-prompt", "two-requests", "samples", "beams", "swap", "prefix-cache", "static-vs-continuous", "orca-chunks",
    "fig3",
)  # fmt: skip


def story_names() -> list[str]:
    """Names of the stories of the package, in reading order."""
    return list(_ORDER)


def story(name_or_path: str) -> Story:
    """The story of that name, or the one of a TOML file.

    Raises:
        UserError: There is none, or its file cannot be read.
        SettingError: A field of the file is unknown or cannot be; the text names file, field, value and remedy.
    """
    if name_or_path in _ORDER:
        text = resources.files(__package__).joinpath(f"stories/{name_or_path}.toml").read_text("utf-8")
        return read_story(text, f"{name_or_path}.toml")
    if not name_or_path.endswith(".toml"):
        near = get_close_matches(name_or_path, _ORDER, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise SettingError("story", name_or_path, f"one of {', '.join(_ORDER)}, or a TOML file{meant}")
    return read_story(text_of(name_or_path, "story"), name_or_path)


def read_story(text: str, file: str) -> Story:
    """The story of a TOML text.

    Args:
        file: Its name, for errors.

    Raises:
        SettingError: See ``story``.
    """
    source = Source(file, text)
    try:
        found = TypeAdapter(_File).validate_python(toml_value(text))
    except tomllib.TOMLDecodeError as error:
        # "Invalid value (at line 5, column 14)", or "(at end of document)".
        what, _, at = str(error).rstrip(")").partition(" (at ")
        raise UserError(f"{file}, {at}: is no TOML: {what}; correct it") from None
    except ValidationError as error:
        raise source.complaint(error, _FIELDS) from None
    except ValueError as error:
        raise UserError(f"{file}: is no TOML: {error}; correct it") from None
    runs = _runs(found, source)
    _check_requests(found.requests, source)
    for place, caption in enumerate(found.captions, start=1):
        if caption.run not in runs and not (caption.run is None and len(runs) == 1):
            raise source.error(f"captions[{place}].run", caption.run, f"one of {', '.join(runs)}")
    return Story(found.title, found.text, runs, tuple(found.requests), tuple(found.captions), source)


def _runs(found: _File, source: Source) -> dict[str, Settings]:
    runs: dict[str, Settings] = {}
    for place, own in enumerate(found.runs or [{}], start=1):
        where = {field: f"runs[{place}].{field}" for field in ("name", *own)}
        given = _TOY | found.settings | own
        name = given.pop("name", given["policy"])
        if not isinstance(name, str) or not name or name in runs:
            raise source.error(where["name"], name, "must be text that no other run has")
        for field, remedy in _REFUSED.items():
            if field in given:
                raise source.error(where.get(field, f"settings.{field}"), given[field], remedy)
        try:
            runs[name] = settings(**given)
        except SettingError as wrong:
            field = where.get(wrong.field, f"settings.{wrong.field}")
            raise source.error(field, wrong.value, wrong.remedy) from None
        size, blocks = runs[name].block_size, runs[name].num_gpu_blocks_override
        if not 1 <= (size or 0) * (blocks or 0) <= MOST_SLOTS:
            field = "num_gpu_blocks_override" if size else "block_size"
            remedy = f"give block_size and num_gpu_blocks_override, together at most {MOST_SLOTS:,} slots"
            raise source.error(where.get(field, f"settings.{field}"), blocks if size else size, remedy)
    return runs


def _check_requests(requests: list[StoryRequest], source: Source) -> None:
    for place, each in enumerate(requests):
        where, before = f"requests[{place + 1}]", requests[:place]
        if (each.output is None) == (each.outputs is None):
            output = None if each.output is None else " ".join(each.output)
            raise source.error(f"{where}.output", output, "give output or outputs, one of both")
        lengths = sorted({len(words) for words in each.samples})
        if len(lengths) > 1:
            raise source.error(f"{where}.outputs", lengths, "must have the same number of words each")
        if each.max_tokens is not None and each.max_tokens < lengths[0]:
            remedy = f"must be at least the {lengths[0]} words of the output"
            raise source.error(f"{where}.max_tokens", each.max_tokens, remedy)
        if before and each.arrival_s < before[-1].arrival_s:
            raise source.error(f"{where}.arrival_s", each.arrival_s, "list the requests in order of arrival")
        if each.name in [other.name for other in before]:
            raise source.error(f"{where}.name", each.name, "must be a name that no other request has")
    words = sum(len(each.prompt) + sum(map(len, each.samples)) for each in requests)
    if words > MOST_WORDS:
        raise source.error("requests", words, f"must have at most {MOST_WORDS:,} words together")
