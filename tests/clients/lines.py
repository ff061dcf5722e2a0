"""What docs/clients.md tells the user of a client to type: the lines of `clients.toml`, as Markdown."""

from __future__ import annotations

import shlex

from tests.clients.spec import PROMPT, Client

_LANGUAGES = {".json": "json", ".toml": "toml"}


def blocks(client: Client) -> list[str]:
    """The files, each under its path, then the variables and commands."""
    return [*(_file(path, text) for path, text in client.files.items()), _shell(client)]


def _file(path: str, text: str) -> str:
    language = _LANGUAGES[path[path.rindex(".") :]]
    return f"`~/{path}`\n\n```{language}\n{text.strip()}\n```\n"


def _shell(client: Client) -> str:
    exports = [f"export {name}={value}" for name, value in client.environment.items()]
    typed = () if client.source == "package" else (client.setup, client.run)
    commands = [" ".join(map(_word, words)) for words in typed if words]
    return "```sh\n" + "".join(f"{line}\n" for line in (*exports, *commands)) + "```\n"


def _word(word: str) -> str:
    return '"the task"' if word == PROMPT else shlex.quote(word)
