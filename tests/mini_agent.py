"""A small agent in the standard library alone: asks for a turn, runs the shell calls in it, asks again.

It reads its instruction from stdin and its endpoint from the environment, as a harness does.
"""

import json
import os
import subprocess
import sys
import urllib.request

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "sh",
            "description": "run a shell command",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


def ask(messages: list[dict[str, object]]) -> dict[str, object]:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": "any", "messages": messages, "tools": TOOLS}).encode(),
        headers={
            "content-type": "application/json",
            "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        },
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


messages: list[dict[str, object]] = [
    {"role": "system", "content": "You are a mini agent."},
    {"role": "user", "content": sys.stdin.read()},
]
while True:
    message = ask(messages)
    messages.append(message)
    calls = message.get("tool_calls") or []
    for call in calls:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        messages.append(
            {"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr}
        )
    if not calls:
        print(message.get("content"))
        break
