"""Commands for shell blocks: `matcha`, `python` and `torchrun` as forks of a process with torch.

The script of a command is a small client. It sends its arguments, environment, folder and standard
files over a socket to a server, which forks a process that becomes the command; the client passes
signals on to it and ends as it does. A process whose client is gone is ended.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULES = {"matcha": "matcha.cli", "python": None, "torchrun": "torch.distributed.run"}
_LENGTH = struct.Struct("!I")


def install(folder: Path) -> None:
    """Start a server and write the commands into a folder; the server ends with this process.

    The server is a fork of this process, which must not have started a thread yet.
    """
    folder.mkdir(exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    address = str(folder / "socket")
    listener.bind(os.path.relpath(address))  # the length of an address has a limit
    listener.listen(64)
    for name in MODULES:
        script = folder / name
        client = f'"{sys.executable}" -I -S "{__file__}" "{address}" {name}'
        script.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
        script.chmod(0o755)
    alive, held = os.pipe()  # held open by this process alone
    if os.fork():
        listener.close()
        os.close(alive)
        os.set_inheritable(held, False)
        return
    os.close(held)
    code = 1
    try:
        code = _serve(listener, alive)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- the client, started by a command's script ----------------------------------------------------


def _call(address: str, name: str, arguments: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as server:
        place = os.open(Path(address).parent, os.O_RDONLY)
        server.connect(f"/proc/self/fd/{place}/{Path(address).name}")
        os.close(place)
        request = json.dumps([name, arguments, dict(os.environ), os.getcwd()]).encode()
        files = array.array("i", [0, 1, 2]).tobytes()
        server.sendmsg(
            [_LENGTH.pack(len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        )
        server.sendall(request)
        (pid,) = _LENGTH.unpack(_exactly(server, _LENGTH.size))

        def pass_on(number: int, _: object) -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, pass_on)
        (code,) = struct.unpack("!i", _exactly(server, 4))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _exactly(source: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = source.recv(count - len(found))
        if not part:
            raise ConnectionError("the server of commands has ended")
        found += part
    return found


# -- the server -----------------------------------------------------------------------------------


def _serve(listener: socket.socket, alive: int) -> int:
    """Fork a process for each request, and tell its client how it ended, until `alive` closes."""
    clients: dict[socket.socket, int] = {}
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    while True:
        watched: list[Any] = [listener, alive, woken, *clients]
        ready = select.select(watched, [], [])[0]
        for client in [c for c in ready if c in clients]:  # says nothing more: it is gone
            with suppress(ProcessLookupError):
                os.killpg(clients[client], signal.SIGKILL)
            del clients[client]
            client.close()
        if woken in ready:
            os.read(woken, 4096)
            _report(clients)
        if alive in ready:
            for pid in clients.values():
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return 0
        if listener in ready:
            client = listener.accept()[0]
            read, files, *_ = client.recvmsg(_LENGTH.size, socket.CMSG_SPACE(12))
            request = json.loads(_exactly(client, *_LENGTH.unpack(read)))
            given = array.array("i", files[0][2])
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                for number, file in enumerate(given):
                    os.dup2(file, number)
                for end in (alive, woken, waker, *given):
                    os.close(end)
                for open_socket in (listener, client, *clients):
                    open_socket.close()
                os._exit(_become(*request))
            for file in given:
                os.close(file)
            client.sendall(_LENGTH.pack(pid))
            clients[client] = pid


def _report(clients: dict[socket.socket, int]) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            for client in [c for c, owned in clients.items() if owned == pid]:
                with suppress(ConnectionError):
                    client.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
                del clients[client]
                client.close()


def _become(name: str, arguments: list[str], environment: dict[str, str], folder: str) -> int:
    """Run the command as a process of its own would, to its very end; its exit code."""
    from matcha.distributed.launch.fork_server import end_with_parent
    from matcha.distributed.launch.main import run_main

    end_with_parent()
    warnings.resetwarnings()  # as a new process, whatever the server was started with
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    module = MODULES[name]
    if module is not None:
        arguments = ["-m", module, *arguments]
    elif arguments[:1] == ["-u"]:  # as torchrun starts workers
        arguments = arguments[1:]
    if not arguments or (arguments[0] != "-m" and arguments[0].startswith("-")):
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    sys.path[:0] = [""]  # run_main replaces it
    code: object = 1
    try:
        run_main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    if sys.argv[1] == "--install":
        install(Path(sys.argv[2]))
        signal.pause()
    sys.exit(_call(sys.argv[1], sys.argv[2], sys.argv[3:]))
