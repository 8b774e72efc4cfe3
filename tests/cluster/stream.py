"""Client of a test, run on a host: streams completions and prints a JSON line an event, with its time.

Arguments: port, fields of the body, seconds of silence that end a request, a name for `pkill`. Uses Python's own
library alone, so that it starts at once.
"""

import http.client
import json
import sys
import time


def say(**fields: object) -> None:
    print(json.dumps({"at": time.time(), **fields}), flush=True)


def main() -> None:
    port, fields, timeout = int(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
    body = {"model": "demo", "prompt": "lockstep", "stream": True, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **fields}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            say(status=answer.status, error=answer.read().decode())
            return
        for raw in answer:
            line = raw.decode().strip()
            if line == "data: [DONE]":
                say(done=True)
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                error = event.get("error")
                if error:
                    say(error=error)
                for choice in event.get("choices", ()):
                    say(text=choice["text"], ids=choice["token_ids"])
    except (OSError, http.client.HTTPException) as error:
        say(error=f"{type(error).__name__}: {error}")


main()
