"""Reads a recipe: a config dataclass, a YAML file and `section.key=value` overrides make one checked object.

Generic: it knows no recipe of ours. Types and ranges come from the dataclass itself: from the annotations, and from the
field metadata `help`, `ge`, `gt`, `le`, `lt` (for lists, the range of every element). Nested dataclasses are sections; a
union of dataclasses is chosen by its `kind` key (the first one when `kind` is not given), a tuple of a dataclass is a list of
sections. Every mistake is reported, in one ConfigError, before anything is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import Field, Strict, TypeAdapter, ValidationError

T = TypeVar("T")
RANGE_KEYS = ("ge", "gt", "le", "lt")


class ConfigError(ValueError):
    """What is wrong with a recipe; `lines` holds one line for each mistake."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """A config object and the dotted keys that file or overrides gave (the others are defaults)."""

    value: T
    given: frozenset[str]


def load(cls: type[T], path: str | Path, overrides: Iterable[str] = ()) -> Loaded[T]:
    """The object of dataclass `cls` that YAML file `path` and `section.key=value` overrides describe.

    Raises:
        ConfigError: unreadable file, invalid YAML, and every unknown key, wrong type and value out of range.
    """
    values = read_yaml(path)
    lines = []
    for override in overrides:
        try:
            apply_override(values, override)
        except ConfigError as error:
            lines += error.lines
    try:
        loaded = build(cls, values)
    except ConfigError as error:
        lines += error.lines
    if lines:
        raise ConfigError(lines)
    return loaded


def build(cls: type[T], values: Mapping[str, Any]) -> Loaded[T]:
    """The object of dataclass `cls` with `values` (nested mappings). Raises ConfigError with every mistake."""
    builder = _Builder(cls)
    value = builder.node(cls, values, "")
    if builder.errors:
        raise ConfigError(builder.errors)
    return Loaded(value, frozenset(builder.given))


def to_plain(config: Any) -> dict[str, Any]:
    """A config dataclass as nested dicts and lists, ready for JSON or YAML; build() reads it back."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    return plain(dataclasses.asdict(config))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, path + ".")
        else:
            flat[path] = value
    return flat


# ---------------------------------------------------------------------------------------------- YAML and overrides


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and reads 1e-4 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError([f"line {line}: key {key!r} is not text; write it in quotes"])
            if key in seen:
                raise ConfigError([f"{key}: given twice, in line {seen[key]} and in line {line}"])
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


# YAML 1.1, which PyYAML follows, wants a dot in a float: 1e-4 would stay text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """YAML text as Python values. Raises ConfigError on a syntax error or a duplicate key."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError([f"{place}not valid YAML: {getattr(error, 'problem', None) or error}"]) from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in YAML file `path`. Raises ConfigError, each line with the file's name."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    try:
        values = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError([f"{path}: {line}" for line in error.lines]) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError([f"{path}: a recipe is a mapping of keys to values, this file holds a {type(values).__name__}"])
    return values


def apply_override(values: dict[str, Any], override: str) -> None:
    """Sets `section.key=value` in nested `values`; the value is read as YAML, as in a file. Raises ConfigError."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError([f"{override}: an override is written section.key=value"])
    try:
        value = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError([f"{path}: {text!r}: {line}" for line in error.lines]) from error
    *sections, last = keys
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ConfigError([f"{path}: {section} holds a value, not keys"])
    values[last] = value


# ----------------------------------------------------------------------------------------------------- validation


class _Builder:
    """Walks dataclass and values together; collects every mistake and every given key."""

    def __init__(self, root: type) -> None:
        self.errors: list[str] = []
        self.given: list[str] = []
        self.all_keys = list(_leaf_paths(root))

    def node(self, cls: Any, values: Any, path: str) -> Any:
        """One section. Returns None when something in it is wrong: `errors` then says what."""
        before = len(self.errors)
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            self.errors.append(f"{path}: {values!r} is not allowed; it is a section with the keys {_names(cls)}")
            return None
        hints, fields = get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
        arguments = {}
        for key, value in values.items():
            full = f"{path}.{key}" if path else key
            if key not in fields:
                self.errors.append(self._unknown(cls, full, key, path))
            else:
                arguments[key] = self._field(hints[key], fields[key], value, full)
        for name, field in fields.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and name not in values:
                full = f"{path}.{name}" if path else name
                self.errors.append(f"{full}: missing; it must be {_describe(hints[name], field.metadata)}")
        if len(self.errors) > before:
            return None
        try:
            return cls(**arguments)
        except ValueError as error:
            message = " ".join(str(error).split())
            self.errors.append(message if not path or message.startswith(path) else f"{path}.{message}")
            return None

    def _field(self, hint: Any, field: dataclasses.Field, value: Any, full: str) -> Any:
        sections = _sections(hint)
        if sections:
            cls = self._choose(sections, value, full)
            return None if cls is None else self.node(cls, value, full)
        entry = _listed(hint)
        if entry is not None:
            return self._list(entry, value, full)
        self.given.append(full)
        try:
            return _adapter(hint, field.metadata).validate_python(value)
        except ValidationError:
            allowed = _describe(hint, field.metadata)
            self.errors.append(f"{full}: {value!r} is not allowed; it must be {allowed}")
            return None

    def _list(self, cls: type, value: Any, full: str) -> Any:
        """A list of sections, each of dataclass `cls`. None when something in it is wrong."""
        self.given.append(full)
        if not isinstance(value, (list, tuple)):
            self.errors.append(f"{full}: {value!r} is not allowed; it is a list of sections with the keys {_names(cls)}")
            return None
        found = tuple(self.node(cls, entry, f"{full}[{number}]") for number, entry in enumerate(value))
        return None if None in found else found

    def _choose(self, sections: list[type], value: Any, full: str) -> type | None:
        """The dataclass of a union that `kind` names."""
        if len(sections) == 1 or not isinstance(value, Mapping) or "kind" not in value:
            return sections[0]
        kinds = {get_args(get_type_hints(cls)["kind"])[0]: cls for cls in sections}
        kind = value["kind"]
        if isinstance(kind, str) and kind in kinds:
            return kinds[kind]
        close = difflib.get_close_matches(str(kind), kinds, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        self.errors.append(f"{full}.kind: {kind!r} is not allowed; it must be one of {', '.join(kinds)}{hint}")
        return None

    def _unknown(self, cls: type, full: str, key: str, path: str) -> str:
        close = difflib.get_close_matches(str(key), [field.name for field in dataclasses.fields(cls)], n=1)
        if close:
            return f"{full}: unknown key; did you mean {f'{path}.' if path else ''}{close[0]}?"
        elsewhere = [known for known in self.all_keys if known.rpartition(".")[2] == key and known != full]
        if elsewhere:
            return f"{full}: unknown key; did you mean {elsewhere[0]}?"
        return f"{full}: unknown key; {path or 'the recipe'} has the keys {_names(cls)}"


def _adapter(hint: Any, metadata: Mapping[str, Any]) -> TypeAdapter[Any]:
    return TypeAdapter(_constrain(hint, {key: metadata[key] for key in RANGE_KEYS if metadata.get(key) is not None}))


def _constrain(hint: Any, limits: dict[str, Any]) -> Any:
    """`hint` with every number in it limited, and no conversion between scalars: true is no 1, and "7" no 7."""
    if hint is float:
        return Annotated[float, Strict(), Field(allow_inf_nan=False, **limits)]
    if hint is int:
        return Annotated[int, Strict(), Field(**limits)]
    if hint in (bool, str):
        return Annotated[hint, Strict()]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(_constrain(entry, limits) for entry in arguments)]  # noqa: UP007
    if origin in (tuple, list, dict):
        return origin[tuple(entry if entry is Ellipsis else _constrain(entry, limits) for entry in arguments)]
    return hint


def _describe(hint: Any, metadata: Mapping[str, Any]) -> str:
    """What a field allows, in words."""
    limits = _range(metadata)
    simple = {
        int: f"an integer{limits}",
        float: f"a number{limits}",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    if hint in simple:
        return simple[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(entry, metadata) for entry in arguments)
    if origin in (tuple, list):
        return f"a list, each entry {_describe(arguments[0], metadata)}"
    if origin is dict:
        return f"a mapping, each value {_describe(arguments[1], metadata)}"
    return getattr(hint, "__name__", str(hint))


def _range(metadata: Mapping[str, Any]) -> str:
    ge, gt, le, lt = (metadata.get(key) for key in RANGE_KEYS)
    if ge is not None and le is not None:
        return f" from {ge} to {le}"
    words = {"at least": ge, "above": gt, "at most": le, "below": lt}
    parts = [f"{word} {bound}" for word, bound in words.items() if bound is not None]
    return " " + " and ".join(parts) if parts else ""


def _sections(hint: Any) -> list[type]:
    """The dataclasses of a section field: one, or those of a union; empty for every other field."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    return list(members) if members and all(dataclasses.is_dataclass(entry) for entry in members) else []


def _listed(hint: Any) -> type | None:
    """The dataclass of a field that holds a list of sections; None for every other field."""
    arguments = get_args(hint) if get_origin(hint) is tuple else ()
    listed = len(arguments) == 2 and arguments[1] is Ellipsis
    return arguments[0] if listed and isinstance(arguments[0], type) and dataclasses.is_dataclass(arguments[0]) else None


def _leaf_paths(cls: Any, prefix: str = "") -> Iterable[str]:
    for name, hint in get_type_hints(cls).items():
        if name not in {field.name for field in dataclasses.fields(cls)}:
            continue
        sections = _sections(hint)
        if not sections:
            yield f"{prefix}{name}"
        for section in sections:
            yield from _leaf_paths(section, f"{prefix}{name}.")


def _names(cls: Any) -> str:
    return ", ".join(field.name for field in dataclasses.fields(cls))
