/* HTTP/1.1 with keep-alive: one POST in flight on each connection. An answer is right when its
 * status is 200 and its body is whole and large enough. */
#define _GNU_SOURCE
#include "generator.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

enum { IN_ROOM = 1 << 16, HEAD_ROOM = 4096, LENGTH_ROOM = 64 };

struct connection {
    int fd;
    double began;
    size_t sent;
    char *in;
    size_t in_length, in_room;
};

static char *request;
static size_t request_length;

static void make_request(void) {
    request = malloc(options.body_length + HEAD_ROOM);
    request_length = snprintf(request, HEAD_ROOM, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: %s\r\n",
                              options.path, options.authority, options.content_type);
    for (int at = 0; at < options.header_count && request_length < HEAD_ROOM; at++)
        request_length += snprintf(request + request_length, HEAD_ROOM - request_length, "%s: %s\r\n",
                                   options.headers[at].name, options.headers[at].value);
    if (request_length >= HEAD_ROOM - LENGTH_ROOM)
        fail("the headers have no room");
    request_length += sprintf(request + request_length, "Content-Length: %zu\r\n\r\n", options.body_length);
    memcpy(request + request_length, options.body, options.body_length);
    request_length += options.body_length;
}

struct connection *http1_open(int fd) {
    struct connection *connection = calloc(1, sizeof *connection);
    if (!request)
        make_request();
    connection->fd = fd;
    connection->in = malloc(connection->in_room = IN_ROOM);
    connection->sent = request_length;
    return connection;
}

void http1_flush(struct connection *connection) {
    while (connection->sent < request_length) {
        ssize_t size = send(connection->fd, request + connection->sent,
                            request_length - connection->sent, MSG_NOSIGNAL);
        if (size < 0 && errno == EAGAIN) {
            watch_writable(connection->fd, true);
            return;
        }
        if (size < 0)
            fail("the server takes no more: %s", strerror(errno));
        connection->sent += size;
    }
    watch_writable(connection->fd, false);
}

void http1_call(struct connection *connection) {
    connection->began = now();
    connection->sent = 0;
    tally_sent();
    http1_flush(connection);
}

/* The value of a header line, or NULL. */
static const char *header(const char *from, const char *until, const char *name) {
    for (const char *line = from; line && line < until;) {
        if (!strncasecmp(line, name, strlen(name)))
            return line + strlen(name);
        line = memmem(line, until - line, "\r\n", 2);
        line = line ? line + 2 : NULL;
    }
    return NULL;
}

/* The length of the whole answer that starts the buffer, or 0 while it is not all there. */
static size_t answer_length(struct connection *connection, size_t *head) {
    const char *from = connection->in, *end = memmem(from, connection->in_length, "\r\n\r\n", 4);
    if (!end)
        return 0;
    *head = end + 4 - from;
    if (header(from, end, "transfer-encoding: chunked")) {
        const char *last = memmem(end, connection->in_length - (end - from), "\r\n0\r\n\r\n", 7);
        return last ? (size_t)(last + 7 - from) : 0;
    }
    const char *length = header(from, end, "content-length:");
    if (!length)
        fail("an answer without its length: %.*s", (int)(end - from), from);
    if (header(from, end, "connection: close"))
        fail("the server does not keep its connections: %.*s", (int)(end - from), from);
    size_t whole = *head + strtoul(length, NULL, 10);
    return whole <= connection->in_length ? whole : 0;
}

static void take_answer(struct connection *connection) {
    size_t head = 0, length = answer_length(connection, &head);
    if (!length)
        return;
    int status = 0;
    sscanf(connection->in, "HTTP/1.%*d %d", &status);
    bool ok = status == 200 && length - head >= options.least_bytes;
    if (!ok)
        tally_message("HTTP status %d: %.*s", status, (int)(length - head), connection->in + head);
    tally_ended(connection->began, ok, length - head, 0);
    if (connection->in_length != length)
        fail("lost count: %zu bytes behind the answer", connection->in_length - length);
    connection->in_length = 0;
    if (!stopping)
        http1_call(connection);
}

void http1_readable(struct connection *connection) {
    if (connection->in_length + 1 >= connection->in_room)
        connection->in = realloc(connection->in, connection->in_room *= 2);
    ssize_t size = recv(connection->fd, connection->in + connection->in_length,
                        connection->in_room - connection->in_length - 1, 0);
    if (size < 0 && errno == EAGAIN)
        return;
    if (size <= 0)
        fail("the server closed the connection (%s)", size ? strerror(errno) : "end");
    connection->in_length += size;
    connection->in[connection->in_length] = 0;
    take_answer(connection);
}
