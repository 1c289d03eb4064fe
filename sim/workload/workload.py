"""A workload: requests in order of arrival, as columns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from ..types.errors import SettingError
from .content import PromptContent, TokenRuns
from .dialogue import Dialogue
from .users import Users


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in arrival order, as columns.

    Attributes:
        name: Name for titles and ``run.json``.
        arrival_ticks: int64 [n], not decreasing, in ticks from the start of the run.
        prompt_tokens: int64 [n], at least 1.
        output_tokens: int64 [n], at least 1: the true output, known only to the simulator.
        max_tokens: int64 [n] or None: the declared longest output, at least the true one; None if clients declare none
            and the model's maximum applies.
        content: Contents of the prompts; None if they are unknown and no prefix can be shared.
        dialogue: The parents of prompts that begin with another request's tokens; None without parents.
        n: int64 [n] or None: sequences of each request, all with its output length; None is one each.
        priority: int64 [n] or None: priority of each request, lower first; None if requests have none.
        ignore_eos: int64 [n] or None: 1 for a request that asks for all of its ``max_tokens`` (``ignore_eos`` of vLLM and SGLang),
            0 for one that may end earlier; None if none asks for all.
        load: int64 [n] or None: which of several loads each request is of, from 0; None if there is one.
        users: Users of a closed loop; None if arrivals are independent. In the workload of a finished run
            ``arrival_ticks`` are the send times, which need not ascend with sessions.
    """

    name: str
    arrival_ticks: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    max_tokens: np.ndarray | None = None
    content: PromptContent | None = None
    dialogue: Dialogue | None = None
    n: np.ndarray | None = None
    users: Users | None = None
    priority: np.ndarray | None = None
    ignore_eos: np.ndarray | None = None
    load: np.ndarray | None = None

    def __post_init__(self) -> None:
        for field in self.columns():
            column = np.ascontiguousarray(getattr(self, field), dtype=np.int64)
            column.setflags(write=False)
            object.__setattr__(self, field, column)
            if len(column) != len(self.arrival_ticks):
                remedy = f"must have a value for each of {len(self.arrival_ticks)} requests"
                raise SettingError(field, len(column), remedy)
            least = 0 if field in ("arrival_ticks", "ignore_eos", "load") else 1
            if len(column) and field != "priority" and column.min() < least:
                raise SettingError(field, int(column.min()), f"must be at least {least}")
        in_turn = self.users is not None and self.users.session_id is not None
        if (np.diff(self.arrival_ticks) < 0).any() and not in_turn:
            raise SettingError("arrival_ticks", "unsorted", "sort the requests by arrival")
        if self.max_tokens is not None and (self.max_tokens < self.output_tokens).any():
            raise SettingError("max_tokens", "too small", "must be at least the true output of every request")
        if self.ignore_eos is not None:
            self._check_ignored(self.ignore_eos)
        if self.content is not None:
            self._check(self.content)
        if self.dialogue is not None:
            self._check_dialogue(self.dialogue)
        if self.users is not None:
            self._check_users(self.users)

    def _check_ignored(self, ignore_eos: np.ndarray) -> None:
        if (ignore_eos > 1).any():
            raise SettingError("ignore_eos", int(ignore_eos.max()), "must be 0 or 1")
        if (
            self.max_tokens is not None
            and (broken := (ignore_eos == 1) & (self.max_tokens != self.output_tokens)).any()
        ):
            first = int(broken.argmax())
            remedy = (
                f"request {first} generates {self.output_tokens[first]} of {self.max_tokens[first]} tokens; must be 0"
            )
            raise SettingError("ignore_eos", 1, remedy)

    def _check_users(self, users: Users) -> None:
        users.check(len(self))
        if self.dialogue is not None:
            remedy = "is for requests without parents; leave it out"
            raise SettingError("max_concurrency", users.max_concurrency, remedy)

    def _check_dialogue(self, dialogue: Dialogue) -> None:
        if len(dialogue) != len(self):
            raise SettingError("dialogue", len(dialogue), f"must be of {len(self)} requests")
        if self.content is not None or self.shares:
            raise SettingError("parent", "given", "names the parents of requests: leave out hash_ids, session_id and n")
        dialogue.check(self.prompt_tokens, self.output_tokens)

    def _check(self, content: PromptContent) -> None:
        if len(content) != len(self):
            raise SettingError("content", len(content), f"must be of {len(self)} requests")
        covered = self.prompt_tokens + (self.output_tokens if content.covers_outputs else 0)
        longer = content.piece_tokens() > covered
        if longer.any():
            first = int(longer.argmax())
            what = "tokens" if content.covers_outputs else "prompt tokens"
            remedy = f"the pieces of request {first} are more than its {covered[first]} {what}"
            raise SettingError("content", int(content.piece_tokens()[first]), remedy)

    def columns(self) -> list[str]:
        """Names of the columns that are present."""
        optional = ("max_tokens", "n", "priority", "ignore_eos", "load")
        present = [name for name in optional if getattr(self, name) is not None]
        return ["arrival_ticks", "prompt_tokens", "output_tokens", *present]

    @property
    def shares(self) -> bool:
        """Whether a request asks for several sequences."""
        return self.n is not None and bool((self.n > 1).any())

    @property
    def num_sequences(self) -> np.ndarray:
        """Sequences of each request, int64 [n]."""
        return np.ones(len(self), dtype=np.int64) if self.n is None else self.n

    @property
    def first_sequences(self) -> np.ndarray:
        """Row of each request's first sequence in ``sequences``, int64 [n]."""
        return np.cumsum(self.num_sequences) - self.num_sequences

    def request_of(self, sequences: np.ndarray) -> np.ndarray:
        """The request of each of some rows of ``sequences``, int64."""
        return np.repeat(np.arange(len(self)), self.num_sequences)[sequences] if self.shares else sequences

    @property
    def sequences(self) -> Workload:
        """The workload with a row per sequence, grouped by request; itself if each request has one sequence."""
        if not self.shares:
            return self
        rows = np.repeat(np.arange(len(self)), self.num_sequences)
        columns = {field: getattr(self, field)[rows] for field in self.columns() if field != "n"}
        content = (self.content or PromptContent.unknown(len(self))).repeated(self.num_sequences)
        users = self.users and self.users.repeated(self.num_sequences)
        return replace(self, **columns, content=content, n=None, users=users)

    def __len__(self) -> int:
        return len(self.arrival_ticks)

    @property
    def may_share_prefixes(self) -> bool:
        """Whether the contents of prompts are known."""
        return self.content is not None or self.dialogue is not None

    def token_runs(self) -> TokenRuns:
        """The tokens of every request; requests share none if the contents of prompts are unknown."""
        lengths = self.prompt_tokens, self.output_tokens
        if self.dialogue is not None:
            return TokenRuns.of_dialogue(self.dialogue, *lengths)
        return TokenRuns(self.content or PromptContent.unknown(len(self)), *lengths)

    def sha256(self) -> str:
        """Hash of the columns in little-endian bytes, the hash of the trace in ``run.json``."""
        digest = hashlib.sha256()
        parts = (self, self.content, self.dialogue, self.users)
        for part in (part for part in parts if part is not None):
            for field in part.columns():
                digest.update(field.encode())
                digest.update(np.asarray(getattr(part, field)).astype("<i8").tobytes())
        return digest.hexdigest()
