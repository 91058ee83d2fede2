"""Heads of requests: what is read, and what is refused because it is malformed or ambiguous."""

from __future__ import annotations

import random
import time

import pytest
from fuzz.targets.http import Messages

from tensorferry.server.transport.http.errors import HttpError, form_of
from tensorferry.server.transport.http.heads import Head, HeadCache, parse_head
from tensorferry.server.transport.http.routes import routed


def head(line: str = "POST /v2 HTTP/1.1", *fields: str, host: str = "Host: h") -> Head:
    return parse_head(
        "\r\n".join([line, *([host] if host else []), *fields, "", ""]).encode("latin-1"), routed
    )


def refused(*arguments: str, **options: str) -> tuple[int, str]:
    with pytest.raises(HttpError) as error:
        head(*arguments, **options)
    return error.value.status, str(error.value)


def test_a_head_is_read() -> None:
    read = head(
        "POST /v2/models/m%2F%C3%A4/infer?x=%00 HTTP/1.1",
        "Content-Length: 12",
        "X-Text:\t zwei  Wörter \t",
        "x-text: again",
        "Expect: 100-Continue",
        "Content-Encoding: GZIP",
        "Accept-Encoding: br, gzip;q=0.5",
        "Inference-Header-Content-Length: 7",
        "X-Request-Timeout: 0.25",
    )
    assert (read.method, read.path) == ("POST", "/v2/models/m%2F%C3%A4/infer")
    assert read.fields[2:4] == (("x-text", "zwei  Wörter"), ("x-text", "again"))
    assert (read.length, read.chunked, read.json_length, read.timeout) == (12, False, 7, 0.25)
    assert (read.expects_continue, read.encoding, read.accepts_gzip) == (True, "gzip", True)


@pytest.mark.parametrize(
    ("line", "field", "kept"),
    [
        ("GET / HTTP/1.1", "X: y", True),
        ("GET / HTTP/1.1", "Connection: Close", False),
        ("GET / HTTP/1.0", "X: y", False),
        ("GET / HTTP/1.0", "Connection: keep-alive", True),
    ],
)
def test_connections_are_kept_as_the_version_and_the_client_say(line: str, field: str, kept: bool) -> None:
    assert head(line, field).keep_alive is kept


def test_a_proxy_may_send_the_whole_address() -> None:
    assert head("GET http://host:1/v2/health/live HTTP/1.1").path == "/v2/health/live"


@pytest.mark.parametrize("header", ["gzip;q=0", "gzip; q=0.000", "br", "deflate"])
def test_gzip_is_not_forced_on_a_client(header: str) -> None:
    assert not head("GET / HTTP/1.1", f"Accept-Encoding: {header}").accepts_gzip


MALFORMED = {
    "no-version": ("GET /",),
    "version-2": ("GET / HTTP/2.0",),
    "version-1.2": ("GET / HTTP/1.2",),
    "lower-case": ("get / HTTP/1.1",),
    "two-blanks": ("GET  / HTTP/1.1",),
    "blank-in-path": ("GET /a b HTTP/1.1",),
    "no-slash": ("GET v2 HTTP/1.1",),
    "query-as-host": ("GET http://?x/v2 HTTP/1.1",),
    "control-in-path": ("GET /\x01 HTTP/1.1",),
    "blank-before-colon": ("GET / HTTP/1.1", "X : y"),
    "no-colon": ("GET / HTTP/1.1", "X"),
    "no-name": ("GET / HTTP/1.1", ": y"),
    "folded": ("GET / HTTP/1.1", "X: y", " z"),
    "nul": ("GET / HTTP/1.1", "X: \x00"),
    "bare-cr": ("GET / HTTP/1.1", "X: a\rb"),
    "bare-lf": ("GET / HTTP/1.1", "X: a\nY: b"),
    "two-hosts": ("GET / HTTP/1.1", "Host: i"),
    "length-sign": ("POST / HTTP/1.1", "Content-Length: +1"),
    "length-list": ("POST / HTTP/1.1", "Content-Length: 1, 1"),
    "length-twice": ("POST / HTTP/1.1", "Content-Length: 1", "Content-Length: 1"),
    "length-empty": ("POST / HTTP/1.1", "Content-Length:"),
    "length-and-chunks": ("POST / HTTP/1.1", "Content-Length: 1", "Transfer-Encoding: chunked"),
    "chunks-twice": ("POST / HTTP/1.1", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    "chunks-in-1.0": ("POST / HTTP/1.0", "Transfer-Encoding: chunked"),
}


@pytest.mark.parametrize("lines", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_malformed_or_ambiguous_is_refused(lines: tuple[str, ...]) -> None:
    assert refused(*lines)[0] == 400


@pytest.mark.parametrize(
    "field", ["Inference-Header-Content-Length: -1", "X-Request-Timeout: 0", "X-Request-Timeout: nan"]
)
def test_what_says_nothing_of_the_end_of_a_request_is_answered_in_the_form_of_its_path(field: str) -> None:
    read = head("POST /v1/embeddings HTTP/1.1", field)
    assert isinstance(read.target, HttpError)
    assert (read.target.status, read.errors) == (400, form_of("/v1/embeddings"))


def test_other_refusals() -> None:
    assert refused(host="")[0] == 400
    assert refused("POST / HTTP/1.1", "Transfer-Encoding: gzip, chunked")[0] == 501
    assert refused("POST / HTTP/1.1", *["X: y"] * 100)[0] == 431
    assert refused("POST / HTTP/1.1", "X: " + "y" * 16_384)[0] == 431


def test_a_malformed_head_takes_no_more_time_than_its_length() -> None:
    began = time.process_time()
    assert refused("GET / HTTP/1.1", "X:" + " " * 16_000 + "\x01")[0] == 400
    # By backtracking it took 5 to 20 seconds.
    assert time.process_time() - began < 2


def test_equal_heads_are_parsed_once_and_the_cache_is_bounded() -> None:
    cache = HeadCache(routed)
    block = b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n"
    assert cache.get(block % 1) is cache.get(block % 1)
    first = cache.get(block % 2)
    for number in range(300):
        cache.get(block % (1000 + number))
    assert cache.get(block % 2) is not first
    long = b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 3000 + b"\r\n\r\n"
    assert cache.get(long) is not cache.get(long)


PIECES = (
    b"GET", b"POST", b" ", b"/", b"/a", b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"\n", b"\r", b":", b"Host: h", b"Content-Length: 0",
    b"Content-Length: 3", b"Transfer-Encoding: chunked", b"x", b"\x00", b"\xff", b"\t", b"Connection: close", b"X-Y: z", b",",
)  # fmt: skip


def test_what_both_accept_is_read_as_the_parser_of_node_reads_it() -> None:
    generator = random.Random(7)
    accepted = 0
    for _ in range(20_000):
        lines = [b"GET /a HTTP/1.1", b"Host: h"]
        lines += [
            b"".join(generator.choices(PIECES, k=generator.randint(1, 4)))
            for _ in range(generator.randint(0, 3))
        ]
        if generator.random() < 0.3:
            generator.shuffle(lines)
        block = b"\r\n".join([*lines, b"", b""])
        if block.find(b"\r\n\r\n") != len(block) - 4:
            continue
        try:
            ours = parse_head(block, routed)
        except HttpError:
            continue
        theirs = Messages(block)
        if theirs.refused:
            # What only one of both accepts is harmless: a proxy in front refuses it, or this server does.
            continue
        accepted += 1
        assert (ours.method, list(ours.fields)) == (theirs.method.decode(), theirs.head), block
    assert accepted > 1000
