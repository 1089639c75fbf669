# SPDX-License-Identifier: Apache-2.0
"""``vllm-kvfix detach``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm_kvfix.attach import command, session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_kvfix.attach.session import Outcome

_EPILOG = f"""\
vLLM's own methods are put back, the very same objects; its managers record as before, so an affected release leaks
again; the recorder ends, and its ring stays for a post-mortem. What came with the engine's start stays.

{command.EXIT_CODES}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    made = command.parser("detach", "Takes back what `vllm-kvfix attach` brought into running engines.", _EPILOG)
    options = made.parse_args(argv)

    def do(pid: int, progress: Callable[[str], object]) -> Outcome:
        return session.detach_from(pid, progress=progress)

    return command.over_all(made, options, do)


if __name__ == "__main__":
    sys.exit(main())
