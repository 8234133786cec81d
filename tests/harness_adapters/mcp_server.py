"""A tool server on stdin and stdout with one tool, `frobnicate`; run as a script by the CLIs."""

import json
import sys

TOOL = {
    "name": "frobnicate",
    "description": "Frobnicates a widget.",
    "inputSchema": {"type": "object", "properties": {}},
}

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    match message["method"]:
        case "initialize":
            result = {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "stub", "version": "1"},
            }
        case "tools/list":
            result = {"tools": [TOOL]}
        case _:
            result = {}
    answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
    print(json.dumps(answer), flush=True)
