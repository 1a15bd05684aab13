"""Hands a command to the process of server.py and ends as it does; needs nothing but what Python itself is made of."""

import json
import os
import socket
import sys

request = {"arguments": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    message = json.dumps(request).encode()
    sent = socket.send_fds(server, [message], [0, 1, 2])
    server.sendall(message[sent:])
    server.shutdown(socket.SHUT_WR)
    status = int(server.recv(16) or 70)
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
