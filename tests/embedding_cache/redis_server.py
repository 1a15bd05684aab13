"""A real Redis server of its own, that a test may stop, kill and start again."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import final

import pytest

from tests.patience import PATIENCE


@final
class RedisServer:
    """Listens at `port` of this machine, with TLS where a certificate is given. Its data lie in `folder`."""

    def __init__(self, folder: Path, *options: str, certificate: Path | None = None) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed")
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = _own_port()
        ports = ["--port", str(self.port)]
        if certificate is not None:
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            ports += ["--tls-cert-file", str(certificate), "--tls-key-file", str(certificate.with_suffix(".key"))]
            ports += ["--tls-ca-cert-file", str(certificate)]
        self._command = ["redis-server", "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", *ports, *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Where it is, without TLS."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, on what it kept; returns when it listens."""
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        for _ in range(2000):
            if self._process.poll() is not None:
                break
            if _answers(self.port):
                return
            time.sleep(0.01)
        raise AssertionError((self.folder / "log").read_text())

    def stop(self, how: int = signal.SIGTERM) -> None:
        """End it, with SIGKILL at once."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=PATIENCE)
            self._process = None


def _own_port() -> int:
    """A port that nobody else takes before this process ends, not even while the server is away: those that the system
    hands out are higher, and other tests respect the lock."""
    for port in range(20000, 30000):
        claim = os.open(Path(tempfile.gettempdir()) / f"kitforge-port-{port}", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(claim)
            continue
        if not _answers(port):
            return port
    raise AssertionError("no port is free")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def make_certificate(folder: Path, name: str = "server") -> Path:
    """A certificate for 127.0.0.1 that vouches for itself, its key beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(path.with_suffix(".key")), "-out", str(path), "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return path
