"""Stories: requests with words, the runs that serve them, and the frames of these runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from ...reports.story.cast import Cast
from ...reports.story.frames import Frame, frames_of
from ...sim import Settings, Workload
from ...sim.recording.steps import record
from ...sim.types.errors import UserError
from ...sim.types.ticks import from_seconds
from ...sim.workload.content import PromptContent
from .one_second_step import OneSecondStep
from .source import Source

#: What a reader can follow: words of all requests, slots of a pool.
MOST_WORDS, MOST_SLOTS = 1_000, 1_024


def _words(text: object) -> object:
    """Words of a text of a file; in Python also as a tuple."""
    words = tuple(text.split()) if isinstance(text, str) else text
    if not isinstance(words, tuple) or not words:
        raise ValueError("must be text with a word or more")
    return words


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
CONFIG = ConfigDict(extra="forbid")


@checked_dataclass(frozen=True, kw_only=True, config=CONFIG)
class StoryRequest:
    """A request.

    Attributes:
        name: Shown in front of all that it holds.
        arrival_s: Arrival, in seconds, which are steps.
        prompt, output: Words; a word is a token.
        outputs: Words of each of several samples or beams, of one length, in place of ``output``.
        max_tokens: Declared longest output; by default the length of the output.
    """

    name: Annotated[str, Field(min_length=1, max_length=12)]
    arrival_s: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)] = 0.0
    prompt: Words
    output: Words | None = None
    outputs: Annotated[tuple[Words, ...], Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST_SLOTS)] | None = None

    @property
    def samples(self) -> tuple[Words, ...]:
        """Words of each of its sequences."""
        return self.outputs or (() if self.output is None else (self.output,))


@checked_dataclass(frozen=True, kw_only=True, config=CONFIG)
class Caption:
    """A sentence of the author: before those of a step ("4"), or of a part of it ("4b")."""

    run: str | None = None
    step: Annotated[str, BeforeValidator(lambda step: str(step) if isinstance(step, int) else step)]
    text: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class Story:
    """A story.

    Attributes:
        title, text: What it shows, and what to look at.
        runs: Settings of each run by its name.
        requests: In order of arrival.
        captions: Sentences of the author.
        source: Its file, for errors.
    """

    title: str
    text: str
    runs: dict[str, Settings]
    requests: tuple[StoryRequest, ...]
    captions: tuple[Caption, ...] = ()
    source: Source = Source("story")

    def cast(self) -> Cast:
        """Names and words of the sequences."""
        several = [
            (row, f"{each.name}{place}" if len(each.samples) > 1 else each.name, each.prompt, words)
            for row, each in enumerate(self.requests)
            for place, words in enumerate(each.samples, start=1)
        ]
        requests, names, prompts, outputs = zip(*several, strict=True)
        return Cast(tuple(each.name for each in self.requests), names, requests, prompts, outputs)

    def workload(self) -> Workload:
        """The requests as the simulator takes them: equal words are equal tokens."""
        requests = self.requests
        single = all(len(each.samples) == 1 for each in requests)
        texts = [each.prompt + (each.samples[0] if single else ()) for each in requests]
        ids = {word: place for place, word in enumerate(dict.fromkeys(chain(*texts)))}
        pieces = [ids[word] for word in chain(*texts)]
        content = PromptContent(
            np.cumsum([0, *map(len, texts)]), np.array(pieces), np.ones(len(pieces), int), covers_outputs=single
        )
        return Workload(
            self.title,
            np.array([from_seconds(each.arrival_s) for each in requests]),
            np.array([len(each.prompt) for each in requests]),
            np.array([len(each.samples[0]) for each in requests]),
            np.array([each.max_tokens or len(each.samples[0]) for each in requests]),
            content,
            n=None if single else np.array([len(each.samples) for each in requests]),
        )


@dataclass(frozen=True)
class RunFrames:
    """A run of a story: its name, settings and frames."""

    name: str
    settings: Settings
    frames: list[Frame]


def run_story(chosen: Story) -> list[RunFrames]:
    """Serve the requests under the settings of each run, and make the frames.

    Raises:
        UserError: A pool cannot hold a request, a setting is not read, or a caption names no step.
    """
    workload, cast = chosen.workload(), chosen.cast()
    found = []
    for name, own in chosen.runs.items():
        of_run = f", run {name}" if len(chosen.runs) > 1 else ""
        try:
            run, steps = record(own, workload, OneSecondStep())
        except UserError as error:
            raise UserError(f"{chosen.source.place()}{of_run}: {error}") from None
        for row in np.flatnonzero(run.refused).tolist():
            where = f"{chosen.source.place(f'requests[{row + 1}]')}{of_run}"
            needs = f"needs {run.smallest_pool_blocks[row]} blocks, and the pool has {run.replica.num_blocks}"
            raise UserError(f"{where}: request {chosen.requests[row].name} {needs}; take a larger pool")
        frames = frames_of(steps, cast, run.replica.block_size)
        captions = {place: each for place, each in enumerate(chosen.captions, start=1) if each.run in (None, name)}
        found.append(RunFrames(name, own, _with_captions(frames, captions, chosen.source)))
    return found


def _with_captions(frames: list[Frame], captions: Mapping[int, Caption], source: Source) -> list[Frame]:
    """The frames with the captions, which are by their place in the file, from 1."""
    labels = [frame.label for frame in frames]
    for number, caption in captions.items():
        place = next((at for at, label in enumerate(labels) if label in (caption.step, f"{caption.step}a")), None)
        if place is None:
            raise source.error(f"captions[{number}].step", caption.step, f"the steps are {', '.join(labels)}; name one")
        frames[place] = replace(frames[place], events=(caption.text, *frames[place].events))
    return frames
