# SPDX-License-Identifier: Apache-2.0
"""The token that a sidecar may ask for: where both sides read it, and how one compares it."""

from __future__ import annotations

import hmac
import logging
import re
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar.telemetry_settings import SettingError

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "VLLM_KVFIX_TOKEN_FILE"
SHORTEST, LONGEST = 16, 4096
_log = logging.getLogger(__name__)
# What may stand behind "Bearer" in a header (RFC 6750).
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


def read(file: Path) -> str:
    """The token in a file.

    Raises:
        SettingError: The file cannot be read, or holds no token.
    """
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            text = opened.read(LONGEST + 1).strip()
    except OSError as error:
        raise SettingError(f"--token-file {file} cannot be read: {error.strerror or error}") from error
    if not SHORTEST <= len(text) <= LONGEST or not _TOKEN.fullmatch(text):
        raise SettingError(
            f"--token-file {file} cannot be used; allowed: one token of {SHORTEST} or more letters, digits and any of "
            f"- . _ ~ + /, such as `openssl rand -hex 32` makes"
        )
    return text


class TokenFile:
    """Lets in who has the token that the file holds at that moment, so that it can be changed without a restart."""

    def __init__(self, file: Path) -> None:
        """Read it a first time.

        Raises:
            SettingError: The file cannot be read, or holds no token.
        """
        self._file = file
        self._trouble = ""
        read(file)

    def lets_in(self, authorization: str | None) -> bool:
        """Whether that header carries the token; nobody is let in while the file cannot be used."""
        try:
            token = read(self._file)
        except SettingError as error:
            if str(error) != self._trouble:
                _log.error("nobody is let in: %s", error)  # the text says it all
            self._trouble = str(error)
            return False
        self._trouble = ""
        scheme, _, given = (authorization or "").partition(" ")
        # As long for any wrong one, so that its time tells nothing.
        same = hmac.compare_digest(given.strip().encode(errors="replace"), token.encode())
        return same and scheme.lower() == "bearer"
