"""What an error may not say: where an engine or a file is. For text that came from elsewhere."""

from __future__ import annotations

import re

# Any URL, with its password. Then absolute paths, of which the last part stays: it is a file's or a model's
# name. Not what follows a # or a word, such as the pointers of JSON schemas or "and/or".
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_FOLDER = re.compile(r"(?<![\w#/.~<])(?:~?/|[A-Za-z]:[\\/])(?:[^\s/\\'\":,;()<>]+[/\\])+")


def scrub(text: str) -> str:
    """The text without URLs and without the folders of paths."""
    return _FOLDER.sub(".../", _URL.sub("(address)", text))
