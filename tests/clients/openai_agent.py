"""A coding agent in a page on the openai package, run as `python openai_agent.py PROMPT`.

It lists the models, asks on both of the package's APIs, in one piece and streamed, and then works through a
chat with a tool that writes a file, until the model answers without a call. Prints what the model said.
"""

import json
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Write a text to a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
            "required": ["path", "text"],
        },
    },
}
MAX_STEPS = 5


def main() -> None:
    """Run the task of the command line."""
    prompt = sys.argv[1]
    client = OpenAI(max_retries=0, timeout=600)
    model = next(iter(client.models.list())).id
    whole = client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}])
    assert whole.usage is not None
    assert whole.choices[0].message.content
    response = client.responses.create(model=model, input=prompt)
    assert response.output_text
    with client.responses.stream(model=model, input=prompt) as events:
        for _ in events:
            pass
        assert events.get_final_response().output_text
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(MAX_STEPS):
        message = step(client, model, messages)
        if not message.tool_calls:
            sys.stdout.write(f"{message.content}\n")
            return
        messages.append(message)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            Path(arguments["path"]).write_text(arguments["text"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "written"})
    sys.exit("the model does not come to an end")


def step(client: OpenAI, model: str, messages: list[Any]) -> Any:
    """One streamed turn with the tool; its message."""
    options: Any = {"include_usage": True}
    with client.chat.completions.stream(
        model=model, messages=messages, tools=[TOOL], stream_options=options
    ) as events:
        for _ in events:
            pass
        final = events.get_final_completion()
    assert final.usage is not None
    return final.choices[0].message


if __name__ == "__main__":
    main()
