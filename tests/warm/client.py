"""Hands a command to the process of server.py and ends as it does; needs nothing but what Python itself is made of.
SIGINT and SIGTERM go on to the copy that carries the command out, which ends with this process if that is killed."""

import contextlib
import json
import os
import signal
import socket
import sys
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM)


def forward(number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(copy, number)


request = {"arguments": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    message = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(server, [message], [0, 1, 2])
    server.sendall(message[sent:])
    answer = server.makefile("rb")
    if copy := int(answer.readline() or 0):
        for number in FORWARDED:
            signal.signal(number, forward)
    status = int(answer.read() or 70)
if status < 0:
    if -status in FORWARDED:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
