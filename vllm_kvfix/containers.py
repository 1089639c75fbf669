# SPDX-License-Identifier: Apache-2.0
"""What one object of a live process is to a census: a container, something that may hold some, or neither.

All this may run in a thread of its own beside the engine's. So each read is one call of the interpreter's own C code,
which no other thread can come between, takes a bounded part however large the container is, and runs no Python code of
the object's class: no property, ``__getattr__``, ``__len__``, ``__eq__`` or ``__hash__``. A ``RuntimeError`` says that
a container changed meanwhile.
"""

from __future__ import annotations

import array
import functools
import gc
import sys
import types
from collections import OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvfix import live

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MISSING: Any = object()
MOST_ATTRIBUTES = 512  # of one object
SHORT = 16  # a tuple of at most so many entries is a record, and each of its entries told apart
REACH = 256  # entries of a container that are stepped through at most: some 2 us
HOLLOW = 32_768  # places of a hash table that may have to be stepped over to find an entry: some 30 us
_MOST_SHAPES = 4096

# What a process keeps per request does not lie in these, or is of no use to anybody there.
_OPAQUE = frozenset({
    "PIL", "cupy", "enum", "fastapi", "flashinfer", "huggingface_hub", "jax", "llguidance", "logging", "networkx",
    "numba", "numpy", "openai", "opentelemetry", "outlines", "outlines_core", "pandas", "prometheus_client", "psutil",
    "pydantic", "pydantic_core", "pydantic_settings", "pynvml", "ray", "regex", "safetensors", "scipy",
    "sentencepiece", "starlette", "sympy", "tensorflow", "tiktoken", "tokenizers", "torch", "torchaudio",
    "torchvision", "transformers", "triton", "uvicorn", "uvloop", "vllm_kvfix", "xgrammar", "zmq",
})  # fmt: skip
_STANDARD = frozenset(sys.stdlib_module_names) | {"builtins"}
# Classes of the standard library that are one container each, by the attribute that is it.
_WRAPPERS = {
    ("queue", "Queue"): "queue",
    ("asyncio.queues", "Queue"): "_queue",
    ("multiprocessing.queues", "Queue"): "_buffer",
    ("weakref", "WeakValueDictionary"): "data",
    ("weakref", "WeakKeyDictionary"): "data",
    ("_weakrefset", "WeakSet"): "data",
    ("collections", "UserDict"): "data",
    ("collections", "UserList"): "data",
}
# Classes of the standard library whose attributes are looked at.
_TRANSPARENT = frozenset({("concurrent.futures.thread", "ThreadPoolExecutor"), ("types", "SimpleNamespace")})

# Classes written in C that hold a few objects, which only the interpreter itself can name.
_NATIVE = frozenset({
    ("_asyncio", "Future"), ("_asyncio", "Task"), ("builtins", "async_generator"), ("builtins", "cell"),
    ("builtins", "builtin_function_or_method"), ("builtins", "coroutine"), ("builtins", "function"),
    ("builtins", "generator"), ("builtins", "method"), ("functools", "partial"),
})  # fmt: skip

_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_class_dict: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
_maxlen: Callable[[Any], int | None] = deque.__dict__["maxlen"].__get__
_LruCache: Any = type(functools.lru_cache(lambda: None))
_flags: Callable[[type], int] = type.__dict__["__flags__"].__get__
_class_module: Callable[[type], Any] = type.__dict__["__module__"].__get__
_class_name: Callable[[type], str] = type.__dict__["__name__"].__get__
_HAS_GC_HEADER, _HAS_PREFIX = 1 << 14, 1 << 4 | 1 << 3  # Py_TPFLAGS_HAVE_GC; _MANAGED_DICT and _MANAGED_WEAKREF
_IS_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_HAS_VALUES = 1 << 4 if sys.version_info >= (3, 11) else 0  # Py_TPFLAGS_MANAGED_DICT
# Classes are compared by id throughout: a metaclass may have a __hash__ and an __eq__ of its own.
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_COMMON = frozenset(map(id, (property, staticmethod, classmethod, str, int, float, bool, tuple, type, type(None))))
_COMMON_KINDS = frozenset(map(id, (type(None), bool, type(...), type, types.ModuleType)))  # held by many
_LEAVES = frozenset(map(id, (int, float, complex, str, bytes, bytearray, array.array, range)))
_CALLABLES = frozenset(map(id, (types.MethodType, types.FunctionType, functools.partial)))


def _references(things: list[Any]) -> list[int]:
    return list(map(sys.getrefcount, things))


# What sys.getrefcount says of an object that one container holds, and a list of it and the call itself.
_HOLDER = [object()]
_ALONE = _references(list(_HOLDER))[0]


# -- the builtin containers -----------------------------------------------------------------------------------------


class Reads(NamedTuple):
    """How one builtin container is read.

    ``length``: its entries. ``spread``: every so manieth of the oldest so many, from one on. ``newest``: so many of the
    newest, [] where there is no order. ``structure``: bytes of its own.
    """

    length: Callable[[Any], int]
    spread: Callable[..., list[Any]]  # (container, step, reach, start=0)
    newest: Callable[[Any, int], list[Any]]
    structure: Callable[[Any], int]


def _nothing(*_: Any) -> list[Any]:
    return []


def _row_bytes(row: list[Any]) -> int:
    # What it has set aside for entries to come is not resident, or may not be.
    return 40 + 8 * list.__len__(row)


_READS: dict[Any, Reads] = {
    dict: Reads(
        dict.__len__,
        lambda table, step, reach, start=0: list(islice(dict.values(table), start, reach, step)),
        lambda table, most: list(islice(reversed(dict.values(table)), most)),
        dict.__sizeof__,
    ),
    OrderedDict: Reads(
        dict.__len__,
        lambda table, step, reach, start=0: list(islice(dict.values(table), start, reach, step)),
        lambda table, most: list(islice(reversed(dict.values(table)), most)),
        OrderedDict.__sizeof__,
    ),
    list: Reads(
        list.__len__,
        lambda row, step, reach, start=0: list.__getitem__(row, slice(start, reach, step)),
        lambda row, most: list.__getitem__(row, slice(-most, None)),
        _row_bytes,
    ),
    deque: Reads(
        deque.__len__,
        lambda line, step, reach, start=0: list(islice(deque.__iter__(line), start, reach, step)),
        lambda line, most: list(islice(deque.__reversed__(line), most)),
        deque.__sizeof__,
    ),
    set: Reads(
        set.__len__,
        lambda bag, step, reach, start=0: list(islice(set.__iter__(bag), start, reach, step)),
        _nothing,
        set.__sizeof__,
    ),
    frozenset: Reads(
        frozenset.__len__,
        lambda bag, step, reach, start=0: list(islice(frozenset.__iter__(bag), start, reach, step)),
        _nothing,
        frozenset.__sizeof__,
    ),
    array.array: Reads(array.array.__len__, _nothing, _nothing, array.array.__sizeof__),
    bytearray: Reads(bytearray.__len__, _nothing, _nothing, bytearray.__sizeof__),
    # A link, and a place in its table. Its keys and results can be found only by a walk over all of them: they are left
    # out, so its bytes are the least that it takes.
    _LruCache: Reads(
        lambda cache: cache.cache_info().currsize,
        _nothing,
        _nothing,
        lambda cache: 64 + 104 * cache.cache_info().currsize,
    ),
}
_KEYS = Reads(
    dict.__len__,
    lambda table, step, reach, start=0: list(islice(dict.keys(table), start, reach, step)),
    lambda table, most: list(islice(reversed(dict.keys(table)), most)),
    dict.__sizeof__,
)
_BUILTIN = {id(cls): (dict if cls is OrderedDict else cls, reads) for cls, reads in _READS.items()}


# -- classes --------------------------------------------------------------------------------------------------------


class Shape:
    """What a class makes of its instances, worked out once.

    ``builtin``: the builtin container that it is; ``reads``: how to read that, None where it is none; ``wraps``: the
    attribute that holds its one container; ``record``: it is a tuple, with ``fields`` if named; ``slots``, ``vars_of``:
    where attributes are; ``shared``: containers that are attributes of the class; ``transparent``: worth a look inside.
    """

    __slots__ = (
        "attribute_count", "builtin", "cls", "fields", "header", "is_common", "is_function", "is_leaf", "key_holders",
        "name", "reads", "record", "referents", "shared", "slots", "structure", "transparent", "vars_extra", "vars_of",
        "weighed_slots", "weighed_vars", "wraps",
    )  # fmt: skip

    def __init__(self, cls: type) -> None:
        self.cls = cls  # held, so that its id is nobody else's
        mro = _mro(cls)
        names = [_name(base) for base in mro]
        self.name = names[0][1]
        self.attribute_count = _attribute_count(mro)
        known = [_BUILTIN[id(base)] for base in mro if id(base) in _BUILTIN]
        self.builtin: type | None = known[0][0] if known else None
        self.reads: Reads | None = known[0][1] if known else None
        self.record = self.reads is None and any(base is tuple for base in mro)
        fields = _class_dict(cls).get("_fields") if self.record else None
        self.fields: tuple[str, ...] = fields if type(fields) is tuple else ()
        self.wraps = next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)
        self.slots: dict[str, Callable[[Any], Any]] = {}
        self.vars_of: Callable[[Any], dict[str, Any]] | None = None
        self.shared: dict[str, Any] = {}
        if _looked_into(mro, names):
            self._find_attributes(mro)
        self.is_function = cls is types.FunctionType
        self.transparent = bool(
            self.slots or self.vars_of or self.shared or self.reads or self.record or self.is_function
        )
        flags = _flags(cls)
        self.header = (16 if flags & _HAS_GC_HEADER else 0) + (16 if flags & _HAS_PREFIX else 0)
        # Attributes may lie beside the object, without a dictionary around them: it is made when it is asked for.
        self.vars_extra = -48 if flags & _HAS_VALUES else 16
        self.key_holders = _ALONE + any(base is OrderedDict for base in mro)  # its links hold the keys as well
        self.structure = self.reads.structure if self.reads else _native_size(mro)
        self._find_weighed(mro, names)

    def _find_weighed(self, mro: Sequence[type], names: Sequence[tuple[str, str]]) -> None:
        """What counts to an instance's bytes, though its class need not be one whose attributes are looked at."""
        self.is_common = any(base is type or base is types.ModuleType for base in mro) or id(self.cls) in _COMMON_KINDS
        self.referents = any(name in _NATIVE for name in names)
        self.weighed_vars = self.vars_of
        self.weighed_slots: list[Callable[[Any], Any]] = []
        for base in mro if not self.is_common else ():
            if not _flags(base) & _IS_HEAP_TYPE:
                continue
            for name, value in list(_class_dict(base).items()):
                kind = type(value)
                if kind is types.MemberDescriptorType and not name.startswith("__") and not self.referents:
                    self.weighed_slots.append(value.__get__)
                elif kind is types.GetSetDescriptorType and name == "__dict__":
                    self.weighed_vars = value.__get__
        self.is_leaf = id(self.cls) in _LEAVES or not (
            self.referents or self.weighed_vars or self.weighed_slots or self.record or self.reads
        )

    def _find_attributes(self, mro: Sequence[type]) -> None:
        callable_ = id(self.cls) in _CALLABLES
        for base in reversed(mro):
            if id(base) in _BUILTIN:
                descriptor = _class_dict(base).get("__dict__")
                self.vars_of = descriptor.__get__ if descriptor is not None else None
                continue
            for name, value in list(_class_dict(base).items()):
                kind = type(value)
                self.shared.pop(name, None)
                if name == "__dict__" and kind in _DESCRIPTORS:
                    self.vars_of = value.__get__
                elif kind is types.MemberDescriptorType and (callable_ or not name.startswith("__")):
                    self.slots[name] = value.__get__
                elif not callable_ and not name.startswith(("__", "_abc_")) and _holds_state(value):
                    self.shared[name] = value
        if callable_:
            self.vars_of = None
        if self.cls is types.FunctionType:
            self.slots = {}


def _name(cls: type) -> tuple[str, str]:
    """The module and name of a class."""
    module = _class_module(cls)
    return (module if type(module) is str else ""), _class_name(cls)


def _looked_into(mro: Sequence[type], names: Sequence[tuple[str, str]]) -> bool:
    if any(module.partition(".")[0] in _OPAQUE for module, _ in names):
        return False
    if id(mro[0]) in _CALLABLES or names[0] in _TRANSPARENT or any(name in _WRAPPERS for name in names):
        return True
    module = names[0][0]
    return (
        module.partition(".")[0] not in _STANDARD
        and not live.stateless(module)
        and not any(base is type or base is BaseException for base in mro)
    )


def _is_container(value: Any) -> bool:
    kind = type(value)
    return id(kind) not in _COMMON and any(id(base) in _BUILTIN for base in _mro(kind))


def _holds_state(value: Any) -> bool:
    """Whether an attribute of a class is a container, or a function that keeps one in its closure or its defaults."""
    if type(value) is types.FunctionType:
        if value.__closure__ is None and value.__defaults__ is None and value.__kwdefaults__ is None:
            return False
        return any(_is_container(held) for _, held in _of_function(value))
    return _is_container(value)


def _native_size(mro: Sequence[type]) -> Callable[[Any], int]:
    """What tells the bytes of an instance, without Python code: its ``__sizeof__``, and what its ``nbytes`` says."""
    sizes = (base for base in mro if type(_class_dict(base).get("__sizeof__")) is types.MethodDescriptorType)
    own: Callable[[Any], int] = _class_dict(next(sizes)).get("__sizeof__")  # type: ignore[assignment]  # object has one
    getters = {}
    for name in ("nbytes", "is_cpu"):
        for base in mro:
            if type(_class_dict(base).get(name)) is types.GetSetDescriptorType:
                getters[name] = _class_dict(base)[name].__get__
                break
    if own is object.__sizeof__ and "nbytes" in getters:  # a tensor: its own is where it lies
        here = getters.get("is_cpu", lambda _: True)
        return lambda thing: object.__sizeof__(thing) + (getters["nbytes"](thing) if here(thing) is True else 0)
    return own


_shapes: dict[int, Shape] = {}
_learnt = [0]


def shape_of(thing: Any) -> Shape:
    """The shape of an object's class."""
    cls = type(thing)
    found = _shapes.get(id(cls))
    return _learn(cls) if found is None else found


def _learn(cls: type) -> Shape:
    if len(_shapes) >= _MOST_SHAPES:
        _shapes.clear()
    shape = _shapes[id(cls)] = Shape(cls)
    _learnt[0] += 1
    return shape


def learnt() -> int:
    """How many classes were looked at so far: each takes some time."""
    return _learnt[0]


def learn_again(*, every: bool) -> Iterator[None]:
    """Look anew, a few at a time, at each class that has more or fewer attributes than it had, or at every one."""
    for number, shape in enumerate(list(_shapes.values())):
        changed = every or _attribute_count(_mro(shape.cls)) != shape.attribute_count
        if changed:
            _learn(shape.cls)
        if changed or number % 4 == 0:
            yield


def _attribute_count(mro: Sequence[type]) -> int:
    return sum([len(_class_dict(base)) for base in mro])


# -- attributes -----------------------------------------------------------------------------------------------------


def attributes(thing: Any, shape: Shape) -> list[tuple[str, Any]]:
    """The attributes of an object, its class's containers among them, at most ``MOST_ATTRIBUTES`` and one more."""
    if shape.is_function:
        return list(_of_function(thing))
    found: list[tuple[str, Any]] = []
    if shape.vars_of is not None:
        found = list(islice(dict.items(shape.vars_of(thing)), MOST_ATTRIBUTES + 1))
    if shape.slots:
        found += [(name, read) for name, get in shape.slots.items() if (read := _slot(get, thing)) is not MISSING]
    if shape.shared:
        found += shape.shared.items()
    return found


def attribute(thing: Any, name: str) -> Any:
    """One of :func:`attributes`, or ``MISSING``."""
    shape = shape_of(thing)
    if shape.vars_of is not None:
        found = dict.get(shape.vars_of(thing), name, MISSING)
        if found is not MISSING:
            return found
    if name in shape.slots:
        return _slot(shape.slots[name], thing)
    if name in shape.shared:
        return shape.shared[name]
    if shape.is_function:
        return next((value for key, value in _of_function(thing) if key == name), MISSING)
    return MISSING


def _slot(get: Callable[[Any], Any], thing: Any) -> Any:
    try:
        return get(thing)
    except AttributeError:
        return MISSING


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING  # not yet set


def _of_function(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function keeps from call to call: the cells of its closure, its defaults, its attributes."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):  # noqa: B905  the shorter counts
        held = _cell(cell)
        if held is not MISSING:
            yield f"<closure>.{name}", held
    for number, value in enumerate(function.__defaults__ or ()):
        yield f"<default {number}>", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"<default {name}>", value
    yield from list(function.__dict__.items())


def fields(thing: Any, shape: Shape) -> list[tuple[int, str, Any]]:
    """The entries of a short tuple: index, ``.name`` or ``[index]``, and what is there."""
    if tuple.__len__(thing) > SHORT:
        return []
    values = tuple.__getitem__(thing, slice(SHORT))
    names = shape.fields if len(shape.fields) == len(values) else ()
    return [(at, f".{names[at]}" if names else f"[{at}]", value) for at, value in enumerate(values)]


# -- containers -----------------------------------------------------------------------------------------------------


def contained(thing: Any) -> Any:
    """The container that an object is: itself, or what the standard library's class around it holds."""
    shape = shape_of(thing)
    return thing if shape.wraps is None else attribute(thing, shape.wraps)


def is_container(thing: Any) -> bool:
    """Whether :func:`length` and the others below can be asked."""
    return shape_of(thing).reads is not None


def length(container: Any) -> int:
    """Entries in a container."""
    reads = shape_of(container).reads
    return reads.length(container) if reads is not None else 0


def is_about_request(thing: Any) -> bool:
    """Whether an object has an attribute with the id of a request."""
    return any(attribute(thing, name) is not MISSING for name in live.REQUEST_ID_NAMES)


def hollow(container: Any, shape: Shape) -> int:
    """Places in a hash table that may be empty and have to be stepped over, at most; 0 for what is no hash table."""
    if shape.builtin is dict:
        return max(0, dict.__sizeof__(container) // 22 - dict.__len__(container))
    if shape.builtin is set or shape.builtin is frozenset:
        places: int = shape.structure(container) // 16
        return places // max(1, shape.reads.length(container)) * SHORT if shape.reads else 0  # they lie scattered
    return 0


def sample(container: Any, shape: Shape, most: int) -> list[Any]:
    """A few elements, of a table its values: spread over a small container, of a large one from both its ends."""
    reads = shape.reads
    length = reads.length(container) if reads is not None else 0
    if reads is None or not length:
        return []
    stepped_over = hollow(container, shape)
    if stepped_over > HOLLOW:
        # Only the newest can be found at once, and of a table that was far larger before, none.
        return [] if stepped_over > length * SHORT else _twice(reads.newest, container, max(1, most // 2))
    if length <= REACH:
        return _twice(reads.spread, container, -(-length // most) | 1, length)
    half = max(1, most // 2)
    return _twice(reads.spread, container, -(-REACH // half) | 1, REACH) + _twice(reads.newest, container, half)


def oldest_keys(container: Any, shape: Shape, most: int, start: int = 0) -> list[Any]:
    """The oldest keys of a table, or elements of another container, from one on; [] where they are hard to find."""
    if shape.reads is None or hollow(container, shape) > HOLLOW:
        return []
    spread = _KEYS.spread if shape.builtin is dict else shape.reads.spread
    return _twice(spread, container, 1, start + most, start)


def newest_keys(container: Any, shape: Shape, most: int) -> list[Any]:
    """As :func:`oldest_keys`, from the newest on; [] of a set."""
    if shape.reads is None or hollow(container, shape) > max(HOLLOW, SHORT * shape.reads.length(container)):
        return []
    return _twice(_KEYS.newest if shape.builtin is dict else shape.reads.newest, container, most)


def _twice(read: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
    """What was read, if need be at the second time: the container may have changed meanwhile."""
    try:
        return read(*arguments)
    except RuntimeError:
        return read(*arguments)


# -- capacities -----------------------------------------------------------------------------------------------------

_CAPACITY_NAMES = ("maxsize", "max_size", "maxlen", "max_len", "capacity", "max_entries", "max_items", "cache_size")


def own_capacity(container: Any, length: int) -> int | None:
    """The most entries that a container says it may have; None where it says nothing, or has more."""
    shape = shape_of(container)
    bound: Any = None
    if shape.builtin is deque:
        bound = _maxlen(container)
    elif shape.builtin is _LruCache:
        bound = container.cache_info().maxsize
    if bound is None and shape.vars_of is not None:
        bound = _stated(shape.vars_of(container))[0]
    return _fitting(bound, length)


def owner_capacity(owner: Any, length: int) -> int | None:
    """The most entries of its one container that an object says there may be; None where it says nothing, or has two.

    A cache that counts something other than entries (its ``currsize`` is not its length) states a bound on that.
    """
    shape = shape_of(owner)
    if shape.vars_of is None:
        return None
    bound, current, number = _stated(shape.vars_of(owner))
    if shape.wraps or (number == 1 if current is None else current == length > 0):
        return _fitting(bound, length)
    return None


def _stated(attributes: dict[str, Any]) -> tuple[int | None, int | None, int]:
    """What attributes say of the most entries and of how many there are; and how many of them are containers."""
    items = list(islice(dict.items(attributes), MOST_ATTRIBUTES))
    bound = current = None
    for name, value in [item for item in items if type(item[1]) is int]:
        bare = name.rpartition("__")[2].lstrip("_") if type(name) is str else ""
        if bare in _CAPACITY_NAMES:
            bound = value
        elif bare == "currsize":
            current = value
    if bound is None:
        return None, None, 0
    return bound, current, sum([shape_of(value).reads is not None for _, value in items])


def _fitting(bound: Any, length: int) -> int | None:
    return bound if type(bound) is int and bound >= length and bound > 0 else None


# -- bytes ----------------------------------------------------------------------------------------------------------

_MOST_NODES = 40  # objects weighed at once: some 30 us
_MOST_OPENED = 6  # of those, that hold others
_SAMPLED = 8  # elements of a container below
_WELL_KNOWN = 16  # what has more references is not looked into
_NEWEST = 8


def weigh(container: Any, number: int) -> int | None:
    """The bytes of an element that nobody outside of the container refers to, and of all that lives through it alone.

    Which element that is depends on ``number``: of the oldest and the newest in turn. None: there is none to be seen.
    One that is held by its neighbours, by its own key, or by what it holds itself, is nobody else's for that.
    """
    elements, at, keys, _ = _entries(container, number)
    return _owned(elements, at, 1, keys) if at < len(elements) else None


def weigh_key(container: Any, number: int) -> int | None:
    """As :func:`weigh`, of the key of a table's entry: one that its own value holds is nobody else's for that."""
    elements, at, keys, holders = _entries(container, number)
    return _owned(keys, at, holders, elements) if at < len(keys) else None


def _entries(container: Any, number: int) -> tuple[list[Any], int, list[Any], int]:
    """Elements in a row, the place of the one that is meant, the keys of a table, and who holds such a key there."""
    shape = shape_of(container)
    if shape.reads is None:
        return [], 0, [], 0
    elements, at = _window(container, shape, shape.reads, number)
    if shape.builtin is not dict:
        return elements, at, [], 0
    return elements, at, _window(container, shape, _KEYS, number)[0], shape.key_holders - _ALONE + 1


def _window(container: Any, shape: Shape, reads: Reads, number: int) -> tuple[list[Any], int]:
    """Some entries in a row, and the place among them of the one that is meant."""
    length = reads.length(container)
    from_end, nth = number % 2, number // 2
    stepped_over = hollow(container, shape)
    if stepped_over > max(HOLLOW, length * SHORT) or not length:
        return [], 0
    if (from_end or stepped_over > HOLLOW) and reads.newest is not _nothing:
        nth %= min(_NEWEST, length)
        found = _twice(reads.newest, container, nth + 2)
        return found, len(found) - 1 - nth if shape.builtin is list else nth
    nth = nth * 7 % min(length, REACH - 2)
    start = max(0, nth - 1)
    return _twice(reads.spread, container, 1, nth + 2, start), nth - start


def _owned(entries: list[Any], at: int, holders: int, others: Sequence[Any] = ()) -> int:
    """The bytes of one of the ``entries`` with all that lives through it alone; 0 if it does not itself.

    ``holders``: references that its container has. Those of the other entries and of ``others`` are no more of a
    sharing.
    """
    unknown = _references(entries)[at] - _ALONE + 1 - holders
    if unknown > _WELL_KNOWN:
        return 0
    neighbours = (*entries[max(0, at - 1) : at], *entries[at + 1 : at + 2], *others)
    for other in neighbours if unknown > 0 else ():
        holders += _references_to(entries[at], other)
    return _Graph(entries[at], holders, {id(other) for other in neighbours} - {id(entries[at])}).owned()


def _references_to(thing: Any, other: Any) -> int:
    """How many references to one object are in another, as far as can be seen at once."""
    shape = shape_of(other)
    if shape.is_leaf:
        return 0
    elements, attributes, _ = _parts(other, shape, _SAMPLED)
    wanted = id(thing)
    return list(map(id, elements)).count(wanted) + list(map(id, attributes)).count(wanted)


class _Graph:
    """An object and what it refers to, at some removes; each thing is held once here, and the first once elsewhere."""

    def __init__(self, thing: Any, holders: int, others: set[int]) -> None:
        """``others``: ids of what is not entered, as it belongs to the same container."""
        self._things = [thing]
        self._index = {id(thing): 0}
        self._others = others
        self._holders = [holders + 1]  # references that are known
        self._weights = [1.0]  # how many of its kind each stands for
        self._edges: list[list[int]] = []
        opened = 0
        for each in self._things:  # and those that it leads to
            edges = list[int]()
            self._edges.append(edges)
            if opened < _MOST_OPENED and id(type(each)) not in _LEAVES:
                opened += self._open(each, edges)

    def _open(self, thing: Any, edges: list[int]) -> bool:
        at, shape = len(self._edges) - 1, shape_of(thing)
        if shape.is_leaf or sys.getrefcount(thing) > _WELL_KNOWN + self._holders[at]:
            return False
        elements, attributes, scale = _parts(thing, shape, _MOST_NODES - len(self._things))
        self._refer(edges, attributes, self._weights[at])
        self._refer(edges, elements, self._weights[at] * scale)
        return True

    def _refer(self, edges: list[int], parts: list[Any], weight: float) -> None:
        index, things, holders = self._index, self._things, self._holders
        for part in parts:
            if id(type(part)) in _COMMON_KINDS or id(part) in self._others:
                continue
            at = index.get(id(part))
            if at is None:
                if len(things) >= _MOST_NODES:
                    continue
                at = index[id(part)] = len(things)
                things.append(part)
                holders.append(0)
                self._weights.append(weight)
            holders[at] += 1
            edges.append(at)

    def owned(self) -> int:
        """Bytes of what nobody else refers to."""
        known, things = self._holders, self._things
        kept = [at for at, count in enumerate(_references(things)) if count - _ALONE + 1 > known[at]]
        marked = set(kept)
        while kept and 0 not in marked:
            for below in self._edges[kept.pop()]:
                if below not in marked:
                    marked.add(below)
                    kept.append(below)
        if 0 in marked:
            return 0
        weights = self._weights
        return round(sum([_size(thing) * weights[at] for at, thing in enumerate(things) if at not in marked]))


def _parts(thing: Any, shape: Shape, room: int) -> tuple[list[Any], list[Any], float]:
    """What an object refers to: some of its elements, its attributes; and how many each such element stands for."""
    elements: list[Any] = []
    attributes: list[Any] = []
    total = 0
    if shape.referents:
        attributes = gc.get_referents(thing)[: SHORT * 2]
    elif shape.record:
        total = tuple.__len__(thing)
        elements = list(tuple.__getitem__(thing, slice(max(2, min(SHORT, room)))))
    elif shape.reads is not None:
        total = shape.reads.length(thing)
        if total and hollow(thing, shape) <= HOLLOW:
            elements = shape.reads.spread(thing, 1, max(2, min(_SAMPLED, room)))
    scale = total / len(elements) if elements else 1.0
    if elements and shape.builtin is dict:
        elements += _KEYS.spread(thing, 1, len(elements)) * (shape.key_holders - _ALONE + 1)
    if shape.weighed_vars is not None and not shape.referents:
        attributes = list(islice(dict.values(shape.weighed_vars(thing)), SHORT * 2))
    if shape.weighed_slots:
        attributes += [_slot(get, thing) for get in shape.weighed_slots]
    return elements, attributes, scale


def _size(thing: Any) -> int:
    shape = shape_of(thing)
    size = own_bytes(thing, shape)
    if shape.weighed_vars is not None and not shape.referents:
        size += _round_up(dict.__sizeof__(shape.weighed_vars(thing)) + shape.vars_extra)
    return size


def own_bytes(thing: Any, shape: Shape) -> int:
    """Bytes of an object without what it refers to, as the allocator rounds them."""
    return _round_up(shape.structure(thing) + shape.header)


def _round_up(size: int) -> int:
    return (size + 15) & ~15
