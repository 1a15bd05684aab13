"""Clients that all ask at once, each on a connection of its own, in a process of their own.

python -m tests.inference.server.crowd PORT BODIES ANSWERS reads a list of bodies from one file, and writes a list of
[status, headers, answer], in their order, to the other. Nobody asks before everybody is connected.
"""

import asyncio
import json
import resource
import sys
from pathlib import Path
from typing import Any

PATH = "/v1/completions"


def allow_connections(number: int) -> None:
    """Let this process have that many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + 500
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def asked(port: int, bodies: list[Any]) -> list[Any]:
    """What was answered to each."""
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in bodies]

    async def ask(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter], body: Any) -> Any:
        reader, writer = stream
        content = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        answer = json.loads(await reader.readexactly(int(headers["content-length"])))
        writer.close()
        return int(first.split()[1]), headers, answer

    return await asyncio.gather(*map(ask, streams, bodies))


def main() -> None:
    """See above."""
    port, given, found = sys.argv[1:]
    bodies = json.loads(Path(given).read_text())
    allow_connections(len(bodies))
    Path(found).write_text(json.dumps(asyncio.run(asked(int(port), bodies))))


if __name__ == "__main__":
    main()
