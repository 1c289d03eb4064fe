"""Reads over HTTP from a server of the user's: GET alone, within a time limit, with a bearer token from the environment."""

from __future__ import annotations

import os
import time
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ...sim.types.errors import SettingError
from ...sim.types.user_files import MOST_BYTES, json_value

#: Variable with a bearer token.
TOKEN = "FRAGMETER_TOKEN"
#: Seconds in which an answer must begin, and in which it must have ended.
_BEGINS_S, _ENDS_S = 5.0, 10.0
_PIECE = 1 << 16


class _NoRedirect(HTTPRedirectHandler):
    """Follows nothing: the token is for the address that the user gave."""

    def redirect_request(self, *_: Any) -> None:
        return None


def is_address(text: str) -> bool:
    """Whether a text is an address rather than the name of a file."""
    return text.startswith(("http://", "https://"))


def get(url: str, field: str) -> str:
    """The answer to GET, as text.

    Args:
        field: Setting that gives the address.

    Raises:
        SettingError: There is no answer in time, or it is an error, or larger than any file that is read.
    """
    try:
        headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get(TOKEN)) else {}
        with build_opener(_NoRedirect).open(Request(url, headers=headers), timeout=_BEGINS_S) as answer:
            until, content = time.monotonic() + _ENDS_S, bytearray()
            while piece := answer.read1(_PIECE):
                content += piece
                if len(content) > MOST_BYTES or time.monotonic() > until:
                    limits = f"{MOST_BYTES >> 20} MiB and {_ENDS_S:g} s"
                    raise SettingError(field, url, f"does not end within {limits}; is it the right address?")
            return content.decode("utf-8-sig", errors="replace")
    except HTTPError as error:
        raise SettingError(field, url, _refused(error)) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise SettingError(field, url, f"does not answer ({reason}); start it, or correct the address") from None


def get_json(url: str, field: str) -> Any:
    """The answer to GET, as JSON; raises SettingError as ``get``, or where it is none."""
    text = get(url, field)
    try:
        return json_value(text)
    except ValueError as error:
        raise SettingError(field, url, f"does not answer with JSON ({error}); correct the address") from None


def _refused(error: HTTPError) -> str:
    if error.code in (401, 403):
        return f"refuses ({error.code}); give a bearer token as the variable {TOKEN}"
    if 300 <= error.code < 400:
        return f"redirects to {error.headers.get('Location')!r}; give that address"
    return f"answers {error.code} {error.reason}; correct the address"
