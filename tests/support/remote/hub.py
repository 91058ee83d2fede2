"""Stand-in of Hugging Face's hub: the web methods that huggingface_hub uses to find and list files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from support.remote.web_server import Request, Response, WebServer


class FakeHub:
    """Repositories of a hub, served by a web server.

    `commits` has the files of each commit by repository, `branches` the commit of each branch.
    """

    def __init__(self, server: WebServer) -> None:
        self.server = server
        self.commits: dict[str, dict[str, Mapping[str, bytes]]] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.gated: set[str] = set()
        self.token: str | None = None
        server.respond = self._respond

    def commit(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch; return its hash."""
        content = repr(sorted(files.items())).encode()
        commit = hashlib.sha1(content).hexdigest()
        self.commits.setdefault(repo, {})[commit] = dict(files)
        self.branches[repo, branch] = commit
        return commit

    def _respond(self, request: Request) -> Response:
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", request.path)
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)/?(.*)", request.path)
        match = file or listing
        if match is None:
            return Response(status=404)
        repo = match[1]
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return Response(status=401, headers={"X-Error-Code": "RepoNotFound"})
        if repo not in self.commits:
            return Response(status=404, headers={"X-Error-Code": "RepoNotFound"})
        if repo in self.gated:
            return Response(status=403, headers={"X-Error-Code": "GatedRepo"})
        revision = match[2] if file else match[3]
        commit = self.branches.get((repo, revision), revision)
        if commit not in self.commits[repo]:
            return Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        files = self.commits[repo][commit]
        if file:
            return _file(commit, files.get(file[3]))
        if match[2] == "revision":
            return _json({"id": repo, "sha": commit, "siblings": [], "private": False, "tags": []})
        return _json(
            [
                {
                    "type": "file",
                    "path": path,
                    "size": len(body),
                    "oid": hashlib.sha1(body).hexdigest(),
                }
                for path, body in files.items()
                if path.startswith(match[4])
            ]
        )


def _file(commit: str, body: bytes | None) -> Response:
    if body is None:
        return Response(status=404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
    headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
    return Response(body, headers=headers)


def _json(value: object) -> Response:
    return Response(json.dumps(value).encode(), headers={"Content-Type": "application/json"})
