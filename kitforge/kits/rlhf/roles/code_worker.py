"""Runs a program and its tests, each in a process apart from all else: `python -I -S code_worker.py`.

It reads two lines of JSON, limits and a job, and writes the outcome behind the job's marker. Tests call the program by
a socket, so that it can neither read them nor decide what they find: plain values cross it by content, and `==` is the
tests' own; functions, classes and instances stay where they are, and the other side has a `Remote`. Knows nothing but
the standard library.
"""

import ast
import builtins
import ctypes
import errno
import json
import operator
import os
import resource
import signal
import socket
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

# Errors of what the sandbox does not allow.
_BLOCKED = {errno.EPERM, errno.EACCES, errno.EROFS, errno.ENETUNREACH, errno.EAGAIN, errno.EFBIG, errno.ENOSPC}
_MAX_PROCESSES, _MAX_FILE_BYTES = 32, 2**26
_CONTAINERS: dict[str, Any] = {each.__name__: each for each in (list, tuple, set, frozenset)}
_ERRORS = {
    name: each for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, BaseException)
}
# An operator takes two objects of the other side: compared with a value of the tests, one could equal all they expect.
_SPECIAL = (
    len,
    iter,
    next,
    bool,
    str,
    repr,
    operator.getitem,
    operator.setitem,
    operator.eq,
    operator.lt,
    operator.add,
)
_OPERATIONS: dict[str, Any] = {each.__name__: each for each in (operator.call, getattr, setattr, *_SPECIAL)}
_LIBC = ctypes.CDLL(None, use_errno=True)
# Namespaces of mounts, host name, IPC, users, processes and network; constants of mount and prctl.
_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_NOSUID_NODEV, _BIND, _RECURSIVE, _PRIVATE, _MOUNT_SETATTR, _READ_ONLY = 6, 0x1000, 0x4000, 0x40000, 442, 7
_PARENT_DEATH_SIGNAL, _DUMPABLE, _NO_NEW_PRIVILEGES = 1, 4, 38


class Peer:
    """One end of the socket between tests and program. Either asks the other, also while it is being asked."""

    def __init__(self, end: socket.socket) -> None:
        self.operations: dict[str, Any] = {"call": operator.call}  # what the other side may ask for
        self._stream = end.makefile("rwb")
        self._held: list[Any] = []  # what the other side has by its number
        self._remotes: dict[int, Remote] = {}

    def ask(self, operation: str, *operands: Any, **named: Any) -> Any:
        """The result of an operation of the other side, which may change lists, dicts and sets that it is given."""
        self.send("ask", operation, [self._encode(each) for each in operands], self._encode(named))
        found, changes = self.listen()
        for index, value in changes:
            given = operands[index]
            if type(given) is type(value) and isinstance(given, (list, dict, set)):
                given.clear()
                (given.extend if isinstance(given, list) else given.update)(value)
        return found

    def send(self, *message: Any) -> None:
        """Write a message."""
        self._stream.write(json.dumps(message).encode() + b"\n")
        self._stream.flush()

    def listen(self) -> Any:
        """Answer what is asked until there is an answer. The end of the other side is that of this one."""
        while True:
            kind, *rest = json.loads(self._stream.readline() or os._exit(1))
            if kind == "ask":
                self.send(*self._answer(*rest))
            elif kind == "raise":
                raise _ERRORS.get(rest[0], Exception)(*self._decode(rest[1]))
            else:
                return self._decode(rest[0])

    def _answer(self, operation: str, operands: list[Any], named: Any) -> tuple[Any, ...]:
        try:
            given = [self._decode(each) for each in operands]
            found = self.operations[operation](*given, **self._decode(named))
            changes = [each for each in enumerate(given) if self._encode(each[1]) != operands[each[0]]]
            return "value", self._encode((found, changes))
        except BaseException as error:  # noqa: BLE001 (the other side raises it)
            name = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS)
            return "raise", name, self._encode(error.args)

    def _encode(self, value: Any) -> Any:
        """A value for JSON: plain ones by their content, as the built-in type that they derive from."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (bytes, complex)):
            return {"literal": repr(value)}
        if isinstance(value, dict):
            return {"dict": [[self._encode(key), self._encode(each)] for key, each in value.items()]}
        for name, kind in _CONTAINERS.items():
            if isinstance(value, kind):
                return {name: [self._encode(each) for each in value]}
        if isinstance(value, Remote):
            return {"own": value._number}
        self._held.append(value)
        return {"remote": len(self._held) - 1}

    def _decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](map(self._decode, content))
        if kind == "dict":
            return {self._decode(key): self._decode(each) for key, each in content}
        if kind == "literal":
            return ast.literal_eval(content)
        return self._held[content] if kind == "own" else self._remotes.setdefault(content, Remote(self, content))


class Remote:
    """An object of the other side."""

    def __init__(self, peer: Peer, number: int) -> None:
        vars(self).update(_peer=peer, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._peer.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)


def _special(name: str) -> Any:
    def ask(self: Remote, *operands: Any) -> Any:
        is_asked = name.endswith("item") or all(isinstance(each, Remote) for each in operands)
        return self._peer.ask(name, self, *operands) if is_asked else NotImplemented

    return ask


for _operation in _SPECIAL:
    setattr(Remote, f"__{_operation.__name__}__", _special(_operation.__name__))


def _run_program(source: str) -> dict[str, Any]:
    """What a program gives names to."""
    program = sys.modules["solution"] = types.ModuleType("solution")
    exec(compile(source, "solution.py", "exec"), vars(program))
    return {name: each for name, each in vars(program).items() if name[:2] != "__"}


def _run_tests(peer: Peer, job: dict[str, Any]) -> str:
    """The outcome of the tests: pass, fail, memory or blocked."""
    try:
        found = peer.ask("run", job["program"])
        tests, solution = types.ModuleType("tests"), types.ModuleType("solution")
        sys.modules.update(tests=tests, solution=solution)
        for module in (solution, tests):
            vars(module).update({name: found[name] for name in job["names"] if name in found})
        # What the program begins with is known to the tests as it was, but for what is asked for.
        exec(job["prefix"], vars(tests))
        vars(tests).update({name: found[name] for name in [job["entry_point"]] if name})
        exec(compile(job["tests"], "tests.py", "exec"), vars(tests))
    except BaseException as error:  # noqa: BLE001 (it is the outcome)
        is_blocked = isinstance(error, OSError) and error.errno in _BLOCKED
        return "memory" if isinstance(error, MemoryError) else "blocked" if is_blocked else "fail"
    return "pass"


def _call(name: str, *arguments: Any) -> None:
    """A function of the C library. Raises OSError where it fails: nothing runs less confined than it is to be."""
    if getattr(_LIBC, name)(*(each.encode() if isinstance(each, str) else each for each in arguments)):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _isolate(folder: str) -> None:
    """Leave the file system for an empty one, with Python and its libraries to read, the network for none, and other
    processes for those to come. Raises OSError where that is not allowed."""
    process, (wait, go) = os.getpid(), os.pipe()
    if os.getuid() == 0:
        os.setgroups([])
    if not (helper := os.fork()):
        os.close(go)
        os.read(wait, 1) or os._exit(1)
        # The user 1 of the namespace is this one or, of root, one without rights elsewhere.
        for name, own in (("uid_map", os.getuid()), ("setgroups", -1), ("gid_map", os.getgid())):
            with open(f"/proc/{process}/{name}", "w") as file:
                users = f"1 {own} 1" if own else f"0 0 1\n1 {20000 + process % 40000} 1"
                file.write("deny" if own < 0 else users)
        os._exit(0)
    _call("unshare", _NAMESPACES)
    os.write(go, b".")
    if os.waitpid(helper, 0)[1]:
        raise PermissionError(errno.EPERM, "no user can be mapped into a user namespace")
    _call("mount", "none", "/", None, _RECURSIVE | _PRIVATE, None)
    _call("mount", "none", folder, "tmpfs", _NOSUID_NODEV, f"size={_MAX_FILE_BYTES},mode=1777")
    libraries = {"/usr", "/lib", "/lib64", "/nix/store", "/gnu/store", sys.base_prefix, sys.base_exec_prefix}
    for path in filter(os.path.isdir, sorted(libraries)):
        os.makedirs(folder + path, exist_ok=True)
        _call("mount", path, folder + path, None, _BIND | _RECURSIVE, None)
        attributes = (ctypes.c_uint64 * 4)(_READ_ONLY)
        _call("syscall", _MOUNT_SETATTR, -1, folder + path, 0x8000, ctypes.byref(attributes), ctypes.sizeof(attributes))
    os.chroot(folder)


def _confine(limits: dict[str, Any]) -> None:
    """Give up all rights, and limit what this process may use."""
    if limits["is_isolated"] and os.getuid() == 0:
        os.setgid(1)
        os.setuid(1)
    bounds = {"CPU": limits["cpu_seconds"], "FSIZE": _MAX_FILE_BYTES, "CORE": 0}
    if sys.platform == "linux":
        _call("capset", ctypes.byref((ctypes.c_uint32 * 2)(0x20080522)), ctypes.byref((ctypes.c_uint32 * 6)()))
        _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        bounds["AS"] = limits["memory_bytes"]
    if limits["is_isolated"]:
        # Without a namespace every process of the user would count.
        bounds["NPROC"] = _MAX_PROCESSES
    for name, value in bounds.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    sys.set_int_max_str_digits(0)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _call("prctl", _PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _start(limits: dict[str, Any], end: socket.socket, other: socket.socket, run: Callable[[Peer], None]) -> int:
    """The process whose child runs `run` in a sandbox. It tells the other end of one that was killed for its memory."""
    if process := os.fork():
        return process
    try:
        _end_with_parent()
        other.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        if limits["is_isolated"]:
            _isolate(limits["folder"])
        os.chdir("/" if limits["is_isolated"] else limits["folder"])
        if not (child := os.fork()):
            _confine(limits)
            _end_with_parent()
            os.dup2(nothing, 2)
            run(Peer(end))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            Peer(end).send("raise", "MemoryError", {"tuple": []})
    except BaseException as error:  # noqa: BLE001 (what reads the output raises it)
        os.write(2, f"{error}\n".encode())
    os._exit(0)


def _be_program(peer: Peer) -> None:
    peer.operations = {**_OPERATIONS, "run": _run_program}
    peer.send("value", "ready")
    peer.listen()


def run_job() -> None:
    """Run what the input says, and write what becomes of it."""
    _end_with_parent()
    (ours, theirs), lines = socket.socketpair(), os.fdopen(0, "rb", 0)
    limits = json.loads(lines.readline())
    if not limits["is_isolated"] and sys.platform == "linux":
        # Processes of the same user may look into others, but not into these.
        _call("prctl", _DUMPABLE, 0, 0, 0, 0)
    # The program's process is begun before the tests are read.
    _start(limits, theirs, ours, _be_program)
    job, verdict = json.loads(lines.read()), os.dup(1)

    def report(outcome: str) -> None:
        os.write(verdict, f"{job['marker']} {outcome}\n".encode())

    def time_out(*_signal: object) -> NoReturn:
        report("timeout")
        os._exit(0)

    def be_tests(peer: Peer) -> None:
        peer.listen()
        report("ready")
        signal.signal(signal.SIGALRM, time_out)
        signal.setitimer(signal.ITIMER_REAL, limits["timeout"])
        report(_run_tests(peer, job))

    tests = _start(limits, ours, theirs, be_tests)
    ours.close()
    theirs.close()
    os.waitpid(tests, 0)


if __name__ == "__main__":
    run_job()
