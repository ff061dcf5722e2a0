"""A coding agent in a page on the anthropic package, run as `python anthropic_agent.py PROMPT`.

It lists the models, counts the prompt, asks in one piece, and then works through streamed messages with a
tool that writes a file, until the model answers without a call. Prints what the model said.
"""

import sys
from pathlib import Path
from typing import Any

from anthropic import Anthropic

TOOL: Any = {
    "name": "write",
    "description": "Write a text to a file.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        "required": ["path", "text"],
    },
}
MAX_STEPS = 5
MAX_TOKENS = 1024


def main() -> None:
    """Run the task of the command line."""
    prompt = sys.argv[1]
    client = Anthropic(max_retries=0, timeout=600)
    model = next(iter(client.models.list())).id
    messages: list[Any] = [{"role": "user", "content": prompt}]
    counted = client.messages.count_tokens(model=model, messages=messages)
    assert counted.input_tokens > 0
    whole = client.messages.create(model=model, max_tokens=MAX_TOKENS, messages=messages)
    assert whole.usage.output_tokens > 0
    for _ in range(MAX_STEPS):
        with client.messages.stream(
            model=model, max_tokens=MAX_TOKENS, messages=messages, tools=[TOOL]
        ) as events:
            for _ in events:
                pass
            message = events.get_final_message()
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            sys.stdout.write("".join(block.text for block in message.content if block.type == "text") + "\n")
            return
        messages.append({"role": "assistant", "content": message.content})
        results = []
        for call in calls:
            arguments: Any = call.input
            Path(arguments["path"]).write_text(arguments["text"])
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": "written"})
        messages.append({"role": "user", "content": results})
    sys.exit("the model does not come to an end")


if __name__ == "__main__":
    main()
