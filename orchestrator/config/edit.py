"""Puts one value into a configuration's text and leaves every other character as it is, comments included."""

import yaml

from orchestrator.config.document import KeyPath, read_document


class CannotEdit(ValueError):
    """The text is of a form in which this module cannot place the value; one line that says so."""


def set_value(text: str, path: tuple[str, ...], value: str) -> str:
    """The text with a plain word at a path of mappings; what is missing on the way is added.

    The result is read again before it is returned: it differs from the old text in that value only.
    Raises CannotEdit; also for a text that is not a configuration at all.
    """
    before = read_document(text, "")
    if before.problems:
        raise CannotEdit(str(before.problems[0]))
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise CannotEdit("the file is not a mapping")
    edited = _set(text, root, path, value)
    after = read_document(edited, "")
    if after.problems or after.data != _with(before.data, path, value):
        raise CannotEdit(f"{'.'.join(path)} cannot be set without changing something else")
    return edited


def _set(text: str, parent: yaml.MappingNode, path: tuple[str, ...], value: str) -> str:
    name, rest = path[0], path[1:]
    for key, node in parent.value:
        if key.value != name:
            continue
        if rest and isinstance(node, yaml.MappingNode) and node.value:
            return _set(text, node, rest, value)
        # What stands there is replaced: an old value, null, {} or nothing at all.
        start, end = node.start_mark.index, node.end_mark.index
        blank = " " if text[start - 1 : start] == ":" else ""
        return text[:start] + blank + _written(rest, value) + text[end:]
    entry = f"{name}: {_written(rest, value)}"
    if parent.flow_style:
        inside = parent.start_mark.index + 1
        return f"{text[:inside]}{entry}{', ' if parent.value else ''}{text[inside:]}"
    first = parent.value[0][0].start_mark
    newline = "\r\n" if "\r\n" in text else "\n"
    return f"{text[: first.index]}{entry}{newline}{' ' * first.column}{text[first.index :]}"


def _written(path: tuple[str, ...], value: str) -> str:
    for name in reversed(path):
        value = f"{{{name}: {value}}}"
    return value


def _with(data: object, path: KeyPath, value: str) -> object:
    """The data with the value at the path."""
    if not path:
        return value
    old = data if isinstance(data, dict) else {}
    return {**old, path[0]: _with(old.get(path[0]), path[1:], value)}
