# SPDX-License-Identifier: Apache-2.0
"""What to do about a growth: known leaks by release and container, and what helps with an allocator."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Remedy:
    """``action`` in plain words; ``issue``: where upstream tracks it; ``fixed_in``: the first release without it."""

    action: str
    issue: str | None = None
    fixed_in: str | None = None


@dataclass(frozen=True)
class KnownLeak:
    """A leak of released vLLM: the containers that it fills, and the releases that have it."""

    path: re.Pattern[str]
    releases: SpecifierSet
    issue: str
    fixed_in: str
    action: str

    def fits(self, path: str, version: str) -> bool:
        """Whether this is it; a version that cannot be read fits nothing."""
        return self.path.search(path) is not None and is_in(self.releases, version)


NEW_BLOCK_IDS = KnownLeak(
    path=re.compile(r"(^|\.)new_block_ids$"),
    releases=SpecifierSet(">=0.17.1,<0.26.0", prereleases=True),
    issue="https://github.com/vllm-project/vllm/pull/44490",
    fixed_in="0.26.0",
    action="`pip install vllm-kvfix` beside vLLM and restart it, `vllm-kvfix attach --fix PID` without a restart, "
    "or upgrade vLLM to 0.26.0",
)
KNOWN = (NEW_BLOCK_IDS,)

# Growth that has an end by design, and the setting that says where.
EXPECTED = (
    (re.compile(r"\bmm_(processor|receiver|input)_cache\b"), "`--mm-processor-cache-gb`"),
    (re.compile(r"encoder_cache_manager\.(cached|freeable)\b"), "`--limit-mm-per-prompt` and the encoder's budget"),
    (
        re.compile(r"\.cached_block_hash_to_block\b"),
        "the number of KV-cache blocks (`--gpu-memory-utilization`)",
    ),
)


def is_in(releases: SpecifierSet, version: str) -> bool:
    """Whether a version, its local and development parts aside, is one of the releases."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return False
    return parsed.base_version in releases


def known_leak(path: str, version: str, patch_state: str) -> KnownLeak | None:
    """The leak that a growing container is known for on this release; one that the patch took away is none."""
    for leak in KNOWN:
        if leak.fits(path, version) and patch_state not in {"applied", "not affected"}:
            return leak
    return None


def for_container(path: str, version: str, patch_state: str) -> Remedy:
    """What to do about a container that leaks."""
    for leak in KNOWN:
        if not leak.path.search(path):
            continue
        if patch_state == "applied":
            return Remedy(
                f"vllm-kvfix is applied, and yet {path} grows: please report it with `vllm-kvfix diagnose --json`",
                leak.issue,
                leak.fixed_in,
            )
        if is_in(leak.releases, version):
            why = {
                "off": " (it is installed, but off: leave VLLM_KVFIX_PATCH away and restart)",
                "refused": " (it is installed, but did not know this build: see `vllm-kvfix status`)",
            }.get(patch_state, "")
            return Remedy(leak.action + why, leak.issue, leak.fixed_in)
    return Remedy(
        f"no release is known to have this leak: report {path} to vLLM with this evidence, and restart the process "
        "before the limit is reached"
    )


def is_expected(path: str) -> bool:
    """Whether a container is a cache that vLLM itself bounds, whatever the census could see of its capacity."""
    return any(pattern.search(path) for pattern, _ in EXPECTED)


def for_bounded(path: str) -> Remedy | None:
    """Which setting says how large a cache becomes; None: not known."""
    for pattern, setting in EXPECTED:
        if pattern.search(path):
            return Remedy(f"expected: it stops when it is full; {setting} decides how large that is")
    return None


def for_allocator(retained: float | None) -> Remedy:
    """What makes glibc give freed memory back."""
    much = "" if retained is None else f"; it would give back up to {retained / (1 << 20):,.0f} MiB"
    return Remedy(
        "restart with MALLOC_ARENA_MAX=2 and MALLOC_TRIM_THRESHOLD_=131072, or with jemalloc or tcmalloc in "
        f"LD_PRELOAD; malloc_trim(0) in the process trims it at once{much}"
    )


def for_unexplained(category: str | None, *, in_malloc: bool | None) -> Remedy:
    """How to look further where no container owns the growth."""
    if in_malloc is False:
        where = "it lies outside malloc and Python's objects: look at the native libraries that map memory themselves"
    elif category in {"shared_memory", "shmem"}:
        where = "it is shared memory: look at /dev/shm and at the message queues of the workers"
    else:
        where = "no container that the census sees owns it: native memory, or objects that hang elsewhere"
    return Remedy(
        f"{where}; `memray attach` on this process finds the allocation; restart it before the limit is reached"
    )
