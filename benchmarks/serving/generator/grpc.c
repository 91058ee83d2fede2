/* gRPC over HTTP/2 without TLS: unary calls, and streams that keep messages in flight.
 *
 * A unary answer is right when its status is 0 and its one message is whole and large enough. A
 * message on a stream is right when it is an infer_response, not an error_message, and it is
 * matched to its request by the id, since a server may answer in any order. */
#define _GNU_SOURCE
#include "generator.h"

#include <errno.h>
#include <nghttp2/nghttp2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { PREFIX = 5, HEAD = 512, OUT_ROOM = 1 << 20, OUT_FULL = 1 << 18, IN_ROOM = 1 << 18 };
enum { INFER_RESPONSE = 0x12, NO_STATUS = -1, NOTHING = -1 };

/* Unary calls send the messages of the body in turn, each with its prefix. */
struct message {
    const uint8_t *bytes;
    size_t length;
};
static struct message *messages;
static size_t message_count, next_message;

/* A unary call, or a stream. */
struct call {
    struct connection *connection;
    struct call *next_free;
    int32_t stream;
    double began;
    int grpc_status, http_status;
    size_t sent, received;
    const struct message *request; /* of a unary call */
    /* the message being received */
    uint8_t prefix[PREFIX], head[HEAD];
    size_t prefix_length, head_length, message_left;
    /* a stream's messages: those not in flight are free to be sent */
    double *message_began;
    int *free_messages, free_count, sending, to_send;
    bool deferred;
};

struct connection {
    int fd;
    nghttp2_session *session;
    struct call *free_calls;
    uint8_t out[OUT_ROOM];
    size_t out_length, out_at;
};

static uint8_t in[IN_ROOM];

static uint32_t message_length(const uint8_t *prefix) {
    return (uint32_t)prefix[1] << 24 | prefix[2] << 16 | prefix[3] << 8 | prefix[4];
}

static void split_body(void) {
    for (size_t at = 0; at < options.body_length; message_count++) {
        size_t left = options.body_length - at;
        size_t length = left < PREFIX ? 0 : PREFIX + (size_t)message_length(options.body + at);
        if (length == 0 || length > left)
            fail("--body does not end with a whole message");
        messages = realloc(messages, (message_count + 1) * sizeof *messages);
        messages[message_count] = (struct message){options.body + at, length};
        at += length;
    }
    if (message_count == 0 || (options.mode == STREAM && message_count > 1))
        fail("--body has %zu messages; it needs one, or for unary calls several", message_count);
}

/* The int64 parameter batch_rows of an explained answer: its key, then a field 2 that holds a field 2. */
static double batch_rows(const uint8_t *head, size_t length) {
    static const char key[] = "batch_rows";
    if (!options.count_batches)
        return 0;
    const uint8_t *at = memmem(head, length, key, sizeof key - 1);
    if (!at || at + sizeof key + 2 >= head + length)
        return 0;
    at += sizeof key - 1;
    if (at[0] != 0x12 || at[2] != 0x10)
        return 0;
    return at[3] < 0x80 ? at[3] : (at[3] & 0x7f) | at[4] << 7;
}

/* --- sending --- */

static ssize_t read_unary(nghttp2_session *session, int32_t stream, uint8_t *buffer, size_t room,
                          uint32_t *flags, nghttp2_data_source *source, void *user) {
    (void)session, (void)stream, (void)user;
    struct call *call = source->ptr;
    size_t size = call->request->length - call->sent;
    if (size > room)
        size = room;
    memcpy(buffer, call->request->bytes + call->sent, size);
    call->sent += size;
    if (call->sent == call->request->length)
        *flags |= NGHTTP2_DATA_FLAG_EOF;
    return size;
}

/* Copies a part of the body, with the id of this message in it. */
static void copy_body(uint8_t *buffer, size_t from, size_t size, int message) {
    char id[ID_LENGTH + 1];
    memcpy(buffer, options.body + from, size);
    snprintf(id, sizeof id, "#%0*d", ID_DIGITS, message);
    for (size_t at = 0; at < ID_LENGTH; at++) {
        size_t place = options.id_offset + at;
        if (place >= from && place < from + size)
            buffer[place - from] = id[at];
    }
}

static ssize_t read_stream(nghttp2_session *session, int32_t stream, uint8_t *buffer, size_t room,
                           uint32_t *flags, nghttp2_data_source *source, void *user) {
    (void)session, (void)stream, (void)flags, (void)user;
    struct call *call = source->ptr;
    size_t written = 0;
    while (written < room && (call->sending != NOTHING || call->to_send > 0)) {
        if (call->sending == NOTHING) {
            call->sending = call->free_messages[--call->free_count];
            call->message_began[call->sending] = now();
            call->to_send--;
            call->sent = 0;
            tally_sent();
        }
        size_t size = options.body_length - call->sent;
        if (size > room - written)
            size = room - written;
        copy_body(buffer + written, call->sent, size, call->sending);
        call->sent += size;
        written += size;
        if (call->sent == options.body_length)
            call->sending = NOTHING;
    }
    if (written == 0) {
        call->deferred = true;
        return NGHTTP2_ERR_DEFERRED;
    }
    return written;
}

#define HEADER(name, value) {(uint8_t *)name, (uint8_t *)value, sizeof name - 1, strlen(value), 0}

static void submit(struct call *call) {
    const nghttp2_nv always[] = {
        HEADER(":method", "POST"),           HEADER(":scheme", "http"),
        HEADER(":path", options.path),       HEADER(":authority", options.authority),
        HEADER("content-type", "application/grpc"), HEADER("te", "trailers"),
    };
    nghttp2_nv headers[sizeof always / sizeof *always + MOST_HEADERS];
    size_t count = sizeof always / sizeof *always;
    memcpy(headers, always, sizeof always);
    for (int at = 0; at < options.header_count; at++) {
        const struct header *header = &options.headers[at];
        headers[count++] = (nghttp2_nv){(uint8_t *)header->name, (uint8_t *)header->value, strlen(header->name),
                                        strlen(header->value), 0};
    }
    bool stream = options.mode == STREAM;
    nghttp2_data_provider body = {{.ptr = call}, stream ? read_stream : read_unary};
    call->grpc_status = call->http_status = NO_STATUS;
    call->sent = call->received = call->prefix_length = call->head_length = call->message_left = 0;
    call->sending = NOTHING;
    call->deferred = false;
    if (stream) {
        call->to_send = call->free_count = options.in_flight;
        for (int at = 0; at < options.in_flight; at++) {
            call->free_messages[at] = at;
            call->message_began[at] = 0;
        }
    } else {
        call->request = &messages[next_message++ % message_count];
        tally_sent();
    }
    call->stream = nghttp2_submit_request(call->connection->session, NULL, headers, count, &body, call);
    if (call->stream < 0)
        fail("a request cannot be sent: %s", nghttp2_strerror(call->stream));
}

static struct call *new_call(struct connection *connection) {
    struct call *call = connection->free_calls;
    if (call) {
        connection->free_calls = call->next_free;
        return call;
    }
    call = calloc(1, sizeof *call);
    call->connection = connection;
    if (options.mode == STREAM) {
        call->message_began = calloc(options.in_flight, sizeof(double));
        call->free_messages = calloc(options.in_flight, sizeof(int));
    }
    return call;
}

void grpc_call(struct connection *connection, double began) {
    struct call *call = new_call(connection);
    call->began = began;
    submit(call);
}

void grpc_fill(struct connection *connection) {
    for (int at = 0; at < options.streams; at++)
        grpc_call(connection, now());
}

/* --- receiving --- */

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name,
                     size_t name_length, const uint8_t *value, size_t length, uint8_t flags, void *user) {
    (void)flags, (void)user;
    struct call *call = nghttp2_session_get_stream_user_data(session, frame->hd.stream_id);
    if (!call)
        return 0;
    if (name_length == 11 && !memcmp(name, "grpc-status", 11))
        call->grpc_status = atoi((const char *)value);
    else if (name_length == 7 && !memcmp(name, ":status", 7))
        call->http_status = atoi((const char *)value);
    else if (name_length == 12 && !memcmp(name, "grpc-message", 12) && length)
        tally_message("%.*s", (int)length, (const char *)value);
    return 0;
}

/* One message on a stream is whole. */
static void message_ended(struct call *call) {
    const uint8_t *id = memchr(call->head, '#', call->head_length);
    while (id && id + ID_LENGTH <= call->head + call->head_length &&
           strspn((const char *)id + 1, "0123456789") < ID_DIGITS)
        id = memchr(id + 1, '#', call->head + call->head_length - id - 1);
    bool ok = call->head_length && call->head[0] == INFER_RESPONSE;
    size_t size = message_length(call->prefix);
    if (!ok)
        tally_message("%.*s", (int)call->head_length, (const char *)call->head);
    else if (size < options.least_bytes)
        tally_message("a message of %zu bytes", size);
    if (!id || id + ID_LENGTH > call->head + call->head_length)
        fail("lost count: a message on a stream has no id of ours (%zu bytes)", size);
    int message = atoi((const char *)id + 1);
    if (message >= options.in_flight || call->message_began[message] == 0)
        fail("lost count: message %d was answered and is not in flight", message);
    tally_ended(call->message_began[message], ok && size >= options.least_bytes, size,
                batch_rows(call->head, call->head_length));
    call->message_began[message] = 0;
    call->free_messages[call->free_count++] = message;
    if (stopping)
        return;
    call->to_send++;
    if (call->deferred) {
        call->deferred = false;
        nghttp2_session_resume_data(call->connection->session, call->stream);
    }
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *data,
                   size_t length, void *user) {
    (void)flags, (void)user;
    struct call *call = nghttp2_session_get_stream_user_data(session, stream);
    if (!call)
        return 0;
    call->received += length;
    while (length) {
        if (call->prefix_length < PREFIX) {
            call->prefix[call->prefix_length++] = *data++;
            length--;
            if (call->prefix_length < PREFIX)
                continue;
            call->message_left = message_length(call->prefix);
            call->head_length = 0;
        }
        size_t size = length < call->message_left ? length : call->message_left;
        size_t kept = size < HEAD - 1 - call->head_length ? size : HEAD - 1 - call->head_length;
        memcpy(call->head + call->head_length, data, kept); /* a zero stays behind it */
        call->head_length += kept;
        call->head[call->head_length] = 0;
        data += size;
        length -= size;
        call->message_left -= size;
        if (call->message_left || options.mode == UNARY) {
            if (length && !call->message_left)
                break; /* a second message: its size tells */
            continue;
        }
        message_ended(call);
        call->prefix_length = 0;
    }
    return 0;
}

static void unary_ended(struct call *call, uint32_t error) {
    bool whole = call->prefix_length == PREFIX && !call->prefix[0] &&
                 call->received == PREFIX + (size_t)message_length(call->prefix);
    bool ok = call->grpc_status == 0 && call->http_status == 200 && whole &&
              call->received >= PREFIX + options.least_bytes;
    if (call->grpc_status == 0 && !ok)
        tally_message("an answer of %zu bytes, HTTP status %d", call->received, call->http_status);
    else if (call->grpc_status == NO_STATUS)
        tally_message("no grpc-status, HTTP status %d, HTTP/2 error %u", call->http_status, error);
    tally_ended(call->began, ok, call->received, batch_rows(call->head, call->head_length));
}

static int on_close(nghttp2_session *session, int32_t stream, uint32_t error, void *user) {
    (void)user;
    struct call *call = nghttp2_session_get_stream_user_data(session, stream);
    if (!call)
        return 0;
    if (options.mode == STREAM) {
        for (int at = 0; at < options.in_flight; at++)
            if (call->message_began[at] > 0)
                tally_ended(call->message_began[at], false, 0, 0);
        if (call->grpc_status <= 0)
            tally_message("a stream ended by itself, grpc-status %d", call->grpc_status);
    } else
        unary_ended(call, error);
    if (!stopping && options.rate == 0) {
        /* Each call would be closed as soon as it is submitted, from here, for ever. */
        if (!nghttp2_session_check_request_allowed(session))
            fail("the server takes no more calls on a connection");
        call->began = now();
        submit(call);
    } else {
        call->next_free = call->connection->free_calls;
        call->connection->free_calls = call;
    }
    return 0;
}

void grpc_readable(struct connection *connection) {
    for (;;) {
        ssize_t size = recv(connection->fd, in, sizeof in, 0);
        if (size < 0 && errno == EAGAIN)
            return;
        if (size <= 0)
            fail("the server closed the connection (%s)", size ? strerror(errno) : "end");
        ssize_t used = nghttp2_session_mem_recv(connection->session, in, size);
        if (used < 0)
            fail("what the server sent is no HTTP/2: %s", nghttp2_strerror((int)used));
        if (size < (ssize_t)sizeof in)
            return;
    }
}

void grpc_flush(struct connection *connection) {
    for (;;) {
        while (connection->out_at < connection->out_length) {
            ssize_t size = send(connection->fd, connection->out + connection->out_at,
                                connection->out_length - connection->out_at, MSG_NOSIGNAL);
            if (size < 0 && errno == EAGAIN) {
                watch_writable(connection->fd, true);
                return;
            }
            if (size < 0)
                fail("the server takes no more: %s", strerror(errno));
            connection->out_at += size;
        }
        connection->out_at = connection->out_length = 0;
        const uint8_t *data;
        ssize_t size;
        while (connection->out_length < OUT_FULL &&
               (size = nghttp2_session_mem_send(connection->session, &data)) > 0) {
            if (connection->out_length + size > OUT_ROOM)
                fail("a frame of %zd bytes has no room", size);
            memcpy(connection->out + connection->out_length, data, size);
            connection->out_length += size;
        }
        if (connection->out_length == 0)
            break;
    }
    watch_writable(connection->fd, false);
}

struct connection *grpc_open(int fd) {
    static nghttp2_session_callbacks *callbacks;
    if (!callbacks) {
        nghttp2_session_callbacks_new(&callbacks);
        nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
        nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
        nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_close);
        split_body();
    }
    struct connection *connection = calloc(1, sizeof *connection);
    connection->fd = fd;
    nghttp2_session_client_new(&connection->session, callbacks, connection);
    const nghttp2_settings_entry settings[] = {{NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
                                               {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 1 << 24}};
    nghttp2_submit_settings(connection->session, 0, settings, 2);
    nghttp2_session_set_local_window_size(connection->session, 0, 0, 1 << 30);
    return connection;
}
