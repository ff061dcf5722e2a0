"""YAML text to plain data that still knows where each value stands.

The YAML is read by the 1.2 core rules, not PyYAML's 1.1 ones: `no`, `on` and `1:30` are text, so an agent may
be called `on`. Keys are always text. Anchors work; merge keys and custom tags are refused, as are texts that
expand or nest without end.
"""

import re
from dataclasses import dataclass, field

import yaml

TYPE_TAG = "tag:yaml.org,2002:"

KeyPath = tuple[str | int, ...]

MAX_BYTES = 256 * 1024
MAX_DEPTH = 24
MAX_NODES = 20_000
MAX_DIGITS = 30
MAX_SHOWN = 60

# What stands there may be a key, where a hash was meant.
SECRET_KEYS = ("key", "admin_key")

TOO_LARGE = f"is larger than {MAX_BYTES // 1024} KiB, too large for a configuration"


@dataclass(frozen=True)
class Problem:
    """One mistake, on one line of output: `config.yaml:14: agents.editor.priority: what is wrong`."""

    source: str
    line: int | None
    path: str
    message: str

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        return ": ".join(part for part in (place, self.path, self.message) if part)


@dataclass
class Document:
    """Plain data of one file, with the line and the written form of each value."""

    source: str
    data: object = None
    problems: list[Problem] = field(default_factory=list)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    written: dict[KeyPath, str] = field(default_factory=dict)
    #: Values that YAML itself could not give. They are reported once, and read as null.
    broken: set[KeyPath] = field(default_factory=set)

    def report(self, path: KeyPath, message: str, line: int | None = None) -> None:
        """Add a mistake; without a line, that of the value or of the closest thing around it."""
        if path in self.broken:
            return
        here = path
        while line is None and here not in self.lines and here:
            here = here[:-1]
        self.problems.append(Problem(self.source, line or self.lines.get(here), show_path(path), message))

    def show(self, path: KeyPath) -> str:
        """The value as its author wrote it, shortened, and without secrets."""
        if path and path[-1] in SECRET_KEYS:
            return "this key"
        return self.written.get(path, "nothing")


def show_path(path: KeyPath) -> str:
    """`agents.editor.key`, `backends[0].url`; names that are no plain words are quoted."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            name = step if re.fullmatch(r"[\w-]{1,60}", step, re.ASCII) else quote(step)
            text += f".{name}" if text else name
    return text


def quote(text: str) -> str:
    """Text in quotes on one printable line, with the password of a URL left out."""
    text = re.sub(r"//[^/@\s]*@", "//***@", text)
    return ascii(text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "...")


class _CoreLoader(yaml.SafeLoader):
    """Which plain words are numbers, booleans and null, by YAML 1.2's core schema."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own registration API copies and fills it


for _tag, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"[-+]?[0-9](?:_?[0-9])*$", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", list("-+.")),
    ("merge", r"<<$", ["<"]),
):
    _CoreLoader.add_implicit_resolver(TYPE_TAG + _tag, re.compile(_pattern), _first)


def read_document(text: str, source: str) -> Document:
    """Never raises: what is wrong with the text is in the document's problems."""
    document = Document(source)
    if len(text) > MAX_BYTES:
        document.report((), TOO_LARGE)
        return document
    try:
        root = yaml.compose(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        hint = " (indent with spaces, not tabs)" if "'\\t'" in said else ""
        document.report((), f"not valid YAML: {_one_line(said)}{hint}", mark.line + 1 if mark else None)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        found = quote(chr(error.character) if isinstance(error.character, int) else str(error.character))
        document.report((), f"not valid YAML: the character {found} is not allowed", line)
    except RecursionError:
        document.report((), f"nested deeper than {MAX_DEPTH} levels")
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML lets chr() and int() fail on escapes and directives that are out of range.
        document.report((), f"not valid YAML: {_one_line(str(error))}")
    else:
        if root is None:
            document.report((), "is empty: backends and agents are needed")
        else:
            _Builder(document).build(root)
    return document


def _one_line(text: str) -> str:
    return ascii(" ".join(text.split()))[1:-1].replace("\\'", "'").replace("\\\\", "\\")


class _Builder:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.nodes = 0

    def build(self, root: yaml.Node) -> None:
        self.document.lines[()] = root.start_mark.line + 1
        try:
            self.document.data = self._value(root, ())
        except _EndlessError as error:
            self.document.data = None
            self.document.report(error.path[:3], str(error), error.line)

    def _value(self, node: yaml.Node, path: KeyPath) -> object:
        self.nodes += 1
        line = node.start_mark.line + 1
        if len(path) > MAX_DEPTH:
            raise _EndlessError(f"nested deeper than {MAX_DEPTH} levels", path, line)
        if self.nodes > MAX_NODES:
            raise _EndlessError(f"holds more than {MAX_NODES} values", path, line)
        if isinstance(node, yaml.MappingNode) and node.tag == TYPE_TAG + "map":
            self.document.written[path] = "a mapping"
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == TYPE_TAG + "seq":
            self.document.written[path] = "a list"
            for index, item in enumerate(node.value):
                self.document.lines[(*path, index)] = item.start_mark.line + 1
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            self.document.lines[path] = line
            return self._scalar(node, path)
        self.document.report(path, f"the YAML tag {quote(node.tag)} is not allowed here", line)
        self.document.broken.add(path)
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.document.report(path, "a key must be a plain word", line)
            elif key.tag == TYPE_TAG + "merge":
                self.document.report(path, "merge keys (<<) are not supported: write the keys out", line)
            elif _has_surrogate(key.value):
                self.document.report(path, f"the key {quote(key.value)} is half a character", line)
            elif key.value in result:
                here = (*path, key.value)
                self.document.report(here, f"given twice, first on line {self.document.lines[here]}", line)
            else:
                here = (*path, key.value)
                self.document.lines[here] = line
                result[key.value] = self._value(value, here)
                if not isinstance(value, yaml.ScalarNode):
                    self.document.lines[here] = line
        return result

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> str | float | None:
        text: str = node.value
        kind = node.tag.removeprefix(TYPE_TAG)
        shown = quote(text) if kind == "str" else _one_line(text[:MAX_SHOWN])
        self.document.written[path] = shown or "nothing"
        try:
            if kind == "str" and not _has_surrogate(text):
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return text.lower() == "true"
            if kind == "int" and len(text) <= MAX_DIGITS:
                return int(text)
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            pass  # an explicit tag over a text that is not of its kind
        meaning = {"str": "holds half a character", "int": "is not a usable whole number"}
        message = meaning.get(kind, f"is not a usable value for the YAML tag {quote(node.tag)}")
        self.document.report(path, f"{self.document.show(path)} {message}")
        self.document.broken.add(path)
        return None


class _EndlessError(Exception):
    """The document expands to more than any configuration needs, perhaps to itself."""

    def __init__(self, message: str, path: KeyPath, line: int) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)
