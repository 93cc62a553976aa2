"""A small HTTP server with faults on order: before a real server it is a faulty proxy, alone it answers by itself."""

import json
import socket
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# What can happen to the request of this number with this body; None: nothing.
Fault = str | None
FAULTS = ("429", "500", "dropped", "cut", "half")


def half_of(content: bytes) -> bytes:
    return content[: len(content) // 2]


class FaultyServer:
    """`asked` holds the prompts that came in, `answered` those that went out whole."""

    def __init__(self, fault_of: Callable[[int, dict], Fault], upstream: str = "", *, with_ids: bool = True) -> None:
        self.fault_of, self.upstream, self.with_ids = fault_of, upstream, with_ids
        self.asked: list[tuple[int, ...]] = []
        self.answered: list[tuple[int, ...]] = []
        self.faults: list[str] = []
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"rig": self}))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_exc):
        self.http.shutdown()
        self.http.server_close()

    def answer(self, body: dict) -> bytes:
        """Of its own: the prompt's last three ids backwards, then the first stop id."""
        ids = [*body["prompt"][-3:][::-1], body["stop_token_ids"][0]]
        choice = {"index": 0, "text": "made", "finish_reason": "stop"}
        if self.with_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
        made = {"id": "1", "object": "text_completion", "created": 0, "model": body["model"], "choices": [choice]}
        return json.dumps(made).encode()


class _Handler(BaseHTTPRequestHandler):
    rig: FaultyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args):
        pass

    def do_GET(self):
        if self.rig.upstream:
            self._send(200, self._forward(None))
        else:
            self._send(200, json.dumps({"object": "list", "data": [{"id": "made", "object": "model"}]}).encode())

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(content)
        prompt = tuple(body["prompt"])
        with self.rig.lock:
            number = len(self.rig.asked)
            self.rig.asked.append(prompt)
            fault = self.rig.fault_of(number, body)
            self.rig.faults += [fault] if fault else []
        if fault == "dropped":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault in ("400", "429", "500"):
            self._send(int(fault), b'{"error": {"message": "on order"}}', {"Retry-After": "0"})
            return
        made = self._forward(content) if self.rig.upstream else self.rig.answer(body)
        if fault == "cut":
            self._send(200, half_of(made), {"Content-Length": str(len(made))})
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "half":
            self._send(200, half_of(made))
        else:
            self._send(200, made)
            with self.rig.lock:
                self.rig.answered.append(prompt)

    def _forward(self, content: bytes | None) -> bytes:
        made = urllib.request.Request(self.rig.upstream + self.path, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(made, timeout=120) as response:
            return response.read()

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        shown = {"Content-Type": "application/json", "Content-Length": str(len(content))} | (headers or {})
        for name, value in shown.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
