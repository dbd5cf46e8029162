"""Hosts that can be cut off from one another while processes run on them.

Where the system lets us (root, network namespaces), every process gets a host of its own: a namespace with an address, plugged into a
switch. A host that is unplugged loses every packet and nobody is told, as with a pulled cable. Elsewhere a small proxy stands
before every process and stalls: what comes in stays in it.
"""
import itertools
import os
import select
import socket
import subprocess
import threading
import urllib.parse

from harness import Process

_subnets = itertools.count()


def namespaces_are_permitted():
    probe = "ip link add name probe0 type veth peer name probe1 && ip link add name probe2 type bridge"
    try:
        return subprocess.run(["unshare", "-n", "sh", "-c", probe], capture_output=True).returncode == 0
    except OSError:
        return False


def make_network():
    return Hosts() if namespaces_are_permitted() else Proxies()


class _Namespace:
    """A network namespace that goes, with all its links, when this process does."""

    def __init__(self):
        self.holder = subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.holder.stdin.write(b"\n")
        self.holder.stdin.flush()
        self.holder.stdout.read(1)  # cat runs, so the namespace is there
        self.prefix = ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "--"]
        self.run("ip link set lo up")

    def run(self, command):
        subprocess.run([*self.prefix, "sh", "-ec", command], check=True, capture_output=True, text=True)

    def close(self):
        self.holder.stdin.close()
        self.holder.wait()
        self.holder.stdout.close()


class Hosts:
    """One namespace a process, and a switch in one more."""

    def __init__(self):
        number = (os.getpid() * 7 + next(_subnets)) % 16384
        self._subnet = f"10.{192 + number // 256}.{number % 256}"
        self._switch = _Namespace()
        self._hosts = {}  # name: (namespace, port of the switch)
        self._switch.run("ip link add name switch type bridge && ip link set switch up")
        uplink = f"bt{os.getpid() % 100000}u{number}"[:15]
        subprocess.run(["ip", "link", "add", "name", uplink, "type", "veth", "peer", "name", "trunk", "netns", str(self._switch.holder.pid)], check=True)
        self._switch.run("ip link set trunk master switch up")
        for command in (["ip", "address", "add", f"{self._subnet}.1/24", "dev", uplink], ["ip", "link", "set", uplink, "up"]):
            subprocess.run(command, check=True)

    def start(self, name, argv, directory):
        host = f"{self._subnet}.{2 + len(self._hosts)}"
        namespace, port = _Namespace(), f"port{len(self._hosts)}"
        self._hosts[name] = (namespace, port)
        self._switch.run(f"ip link add name {port} type veth peer name eth0 netns {namespace.holder.pid}; ip link set {port} master switch up")
        namespace.run(f"ip address add {host}/24 dev eth0; ip link set eth0 up")
        flags = [f"--listen={host}:0", "--allow-plaintext"]
        if name.startswith("decode"):
            flags.append(f"--kv-listen={host}:0")
        return Process(name, [*argv, *flags], directory, host=host, prefix=namespace.prefix)

    def address(self, process):
        return process.address

    def cut(self, process):
        """Pulls the cable of the process's host."""
        self._switch.run(f"ip link set {self._port(process)} nomaster")

    def mend(self, process):
        self._switch.run(f"ip link set {self._port(process)} master switch")

    def metrics_text(self, process):
        """Read on the host itself, whether it is cut off or not."""
        namespace, _ = self._hosts[process.name.partition("+")[0]]
        fetch = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"
        return subprocess.run([*namespace.prefix, "python3", "-c", fetch, f"http://{process.host}:{process.http_port}/metrics"],
                              check=True, capture_output=True, text=True).stdout

    def close(self):
        for namespace, _ in self._hosts.values():
            namespace.close()
        self._switch.close()

    def _port(self, process):
        return self._hosts[process.name.partition("+")[0]][1]


class Proxies:
    """All on the loopback, each process behind a proxy. KV bytes between workers pass it by: their session does not."""

    def __init__(self):
        self._proxies = {}

    def start(self, name, argv, directory):
        return Process(name, [*argv, "--listen=127.0.0.1:0"], directory)

    def address(self, process):
        proxy = self._proxies.get(process.name)
        if proxy is None:
            proxy = self._proxies[process.name] = _StallingProxy(process.address)
        return proxy.address

    def cut(self, process):
        self._proxies[process.name].stalled.set()

    def mend(self, process):
        self._proxies[process.name].stalled.clear()

    def metrics_text(self, process):
        return process.metrics_text()

    def close(self):
        for proxy in self._proxies.values():
            proxy.close()


class _StallingProxy:
    """One thread. While `stalled` it accepts and reads nothing and closes nothing."""

    def __init__(self, target):
        parts = urllib.parse.urlsplit("//" + target)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.stalled, self._closing = threading.Event(), threading.Event()
        self._peer, self._pending = {}, {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        self._closing.set()
        self._thread.join()
        for connection in [self._listener, *self._peer]:
            connection.close()

    def _run(self):
        while not self._closing.is_set():
            if self.stalled.is_set():
                self._closing.wait(0.01)
                continue
            readable = [self._listener] + [c for c, other in self._peer.items() if len(self._pending[other]) < 1 << 20]
            writable = [c for c in self._peer if self._pending[c]]
            readable, writable, _ = select.select(readable, writable, [], 0.01)
            for connection in writable:
                self._write(connection)
            for connection in readable:
                self._accept() if connection is self._listener else self._read(connection)

    def _accept(self):
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            return client.close()
        for connection, other in ((client, server), (server, client)):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peer[connection], self._pending[connection] = other, bytearray()

    def _read(self, connection):
        if connection not in self._peer:
            return
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._drop(connection)
        self._pending[self._peer[connection]] += data

    def _write(self, connection):
        if connection not in self._peer:
            return
        try:
            sent = connection.send(self._pending[connection])
        except BlockingIOError:
            return
        except OSError:
            return self._drop(connection)
        del self._pending[connection][:sent]

    def _drop(self, connection):
        """The end of one side is the end of both, after what is still to be written."""
        other = self._peer.pop(connection)
        self._peer.pop(other)
        rest = self._pending.pop(other)
        self._pending.pop(connection)
        try:
            if rest:
                other.setblocking(True)
                other.settimeout(1)
                other.sendall(rest)
        except OSError:
            pass
        connection.close()
        other.close()
