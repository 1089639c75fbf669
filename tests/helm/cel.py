# SPDX-License-Identifier: Apache-2.0
"""Runs the chart's MutatingAdmissionPolicy on a pod, by the C++ implementation of CEL.

An API server gives expressions more than CEL's own: the constructor ``JSONPatch{...}``, ``jsonpatch.escapeKey`` and
``indexOf`` of lists. Those are put in here as Kubernetes documents them; nothing else of the policy's text is changed.
"""

from __future__ import annotations

from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

_ANY = cel.Type.DYN
_REPLACED = (
    ("JSONPatch{op: ", '{"op": '),
    (', path: "', ', "path": dyn("'),
    (", path: variables", ', "path": dyn(variables'),
    (", value: ", '), "value": '),
    ("jsonpatch.escapeKey(", "escapeKey("),
    (".indexOf(", ".listIndexOf("),
)


class PolicyError(Exception):
    """An expression of the policy cannot be evaluated."""


def _index_of(items: Any, item: Any) -> int:
    listed = list(items)
    return listed.index(item) if item in listed else -1


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


_FUNCTIONS = [
    cel.FunctionDecl(
        "listIndexOf", [cel.Overload("list_index_of", cel.Type.INT, [_ANY, _ANY], is_member=True, impl=_index_of)]
    ),
    cel.FunctionDecl("escapeKey", [cel.Overload("escape_key", cel.Type.STRING, [cel.Type.STRING], impl=_escaped)]),
]
_ENV = cel.NewEnv(
    variables={"object": _ANY, "variables": _ANY},
    extensions=[ext_optional.ExtOptional(), ext_strings.ExtStrings(), cel.CelExtension("kubernetes", _FUNCTIONS)],
)


class Policy:
    """A MutatingAdmissionPolicy, compiled."""

    def __init__(self, told: dict[str, Any]) -> None:
        """Compile every expression of the object ``told``."""
        spec = told["spec"]
        self._conditions = [_ENV.compile(_plain(part["expression"])) for part in spec["matchConditions"]]
        self._variables = {part["name"]: _ENV.compile(_plain(part["expression"])) for part in spec["variables"]}
        (mutation,) = spec["mutations"]
        assert mutation["patchType"] == "JSONPatch"
        self._patch = _ENV.compile(_plain(mutation["jsonPatch"]["expression"]))

    def patch(self, pod: dict[str, Any]) -> list[dict[str, Any]]:
        """The operations for a pod that the selectors let through; empty where a condition does not hold.

        Raises:
            PolicyError: An expression fails; an API server would let the pod through unchanged.
        """
        data: dict[str, Any] = {"object": pod, "variables": {}}
        if not all(_value(condition, data) for condition in self._conditions):
            return []
        for name, expression in self._variables.items():
            data["variables"][name] = _value(expression, data)
        operations: list[dict[str, Any]] = _value(self._patch, data)
        return operations


def _plain(text: str) -> str:
    for before, after in _REPLACED:
        text = text.replace(before, after)
    return text


def _value(expression: Any, data: dict[str, Any]) -> Any:
    found = expression.eval(data=data)
    if found.type() in (cel.Type.ERROR, cel.Type.UNKNOWN):  # its types cannot be hashed
        raise PolicyError(str(found.plain_value()))
    return found.plain_value()
