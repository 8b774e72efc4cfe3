"""A server with the parts of the Hub's API that huggingface_hub reads, over repositories in memory."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class HubRepository:
    """One model: the files of each commit, and the commit of each branch."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private_to: str | None = None  # a token
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch and return its name."""
        sha = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha


class HubServer:
    """The server on a port of this machine; `requests` lists method and path, `tokens` what came with them."""

    def __init__(self) -> None:
        self.repositories: dict[str, HubRepository] = {}
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        self.broken = False
        # Set by a download of weights that gets no answer until `close`, once `stall` is true.
        self.stalled = threading.Event()
        self.stall = False
        self._closed = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self._http.shutdown()
        self._http.server_close()

    def fetched(self) -> list[str]:
        """Names of all files that were sent, sorted."""
        return sorted(
            r.rpartition("/")[2] for r in self.requests if r.startswith("GET") and "/api/" not in r
        )


def _handler(server: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path == "/api/agent-harnesses":  # the client asks once, for its own statistics
                return self._send(404, b"")
            server.requests.append(f"{self.command} {path}")
            token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
            parts = path.strip("/").split("/")
            if server.broken:
                return self._send(503, b"down")
            if parts[0] == "cdn":  # the place of large files
                if server.stall:
                    server.stalled.set()
                    server._closed.wait()
                _, owner, model, sha, *name = parts
                files = server.repositories[f"{owner}/{model}"].commits[sha]
                return self._send(200, files["/".join(name)])
            server.tokens.add(token)
            if parts[:2] == ["api", "models"]:
                return self._api(parts[2:], token)
            owner, model, _, revision, *name = parts
            repository = self._repository(f"{owner}/{model}", token)
            if repository is None:
                return None
            content = repository.commits[revision].get("/".join(name))
            if content is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            digest = hashlib.sha256(content).hexdigest()
            commit = {"X-Repo-Commit": revision}
            if not name[-1].endswith((".safetensors", ".bin")):
                return self._send(200, content, {**commit, "ETag": f'"{digest}"'})
            facts = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest}"'}
            # Another host, as the Hub's: the client follows redirects to the same host before it reads headers.
            host = server.url.replace("127.0.0.1", "localhost")
            place = {"Location": f"{host}/cdn/{owner}/{model}/{revision}/{'/'.join(name)}"}
            return self._send(302, b"", commit | facts | place)

        def _api(self, parts: list[str], token: str | None) -> None:
            owner, model, what, revision = parts[:4]
            repository = self._repository(f"{owner}/{model}", token)
            if repository is None:
                return None
            sha = repository.branches.get(revision, revision)
            if sha not in repository.commits:
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = repository.commits[sha]
            if what == "revision":
                siblings = [{"rfilename": name} for name in files]
                return self._json({"id": f"{owner}/{model}", "sha": sha, "siblings": siblings})
            return self._json(
                [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(content),
                        "oid": hashlib.sha1(content).hexdigest(),
                    }
                    for name, content in files.items()
                ]
            )

        def _repository(self, name: str, token: str | None) -> HubRepository | None:
            repository = server.repositories.get(name)
            if token == "wrong":
                why = {"X-Error-Message": "Invalid credentials in Authorization header"}
                return self._send(401, b"", why)
            if repository is None or repository.private_to not in (None, token):
                return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            if repository.gated:
                return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return repository

        def _json(self, body: object) -> None:
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler
