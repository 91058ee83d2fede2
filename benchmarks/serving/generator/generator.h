/* What the parts of the load generator share: main.c (options, the loop), grpc.c and http1.c (the
 * protocols), tally.c (counts and latencies). Times are seconds of CLOCK_MONOTONIC. */
#ifndef GENERATOR_H
#define GENERATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdnoreturn.h>

enum mode { UNARY, STREAM, HTTP1 };

/* How many digits follow '#' in the id of a message on a stream. */
enum { ID_DIGITS = 7, ID_LENGTH = ID_DIGITS + 1 };

/* Beside those that each call has. */
enum { MOST_HEADERS = 8 };
struct header {
    const char *name, *value;
};

struct options {
    enum mode mode;
    const char *host;
    int port;
    char authority[80];
    const char *path, *content_type;
    uint8_t *body; /* gRPC: length-prefixed messages, several for unary calls only */
    size_t body_length;
    long id_offset;        /* where in the body the id is: '#' and digits; -1: nowhere */
    int connections;       /* HTTP/1.1: one request in flight on each */
    int streams;           /* per connection */
    int in_flight;         /* messages per stream, in mode STREAM */
    double warm_up, seconds;
    size_t least_bytes;    /* an answer with fewer is an error */
    double rate;           /* a second; 0: closed loop */
    bool poisson;          /* else uniform */
    uint64_t seed;
    uint64_t calls;        /* stop after so many answers; 0: no limit */
    struct header headers[MOST_HEADERS];
    int header_count;
    bool count_batches;    /* read batch_rows, which an explained answer has */
};
extern struct options options;

struct connection;

/* tally.c */
double now(void);
void tally_sent(void);
void tally_ended(double began, bool ok, size_t bytes, double rows);
void tally_message(const char *format, ...) __attribute__((format(printf, 1, 2)));
void tally_lag(double seconds);
void tally_measure(double from, double until);
void tally_over(void);
uint64_t tally_in_flight(void);
uint64_t tally_begun(void); /* of those in flight at tally_over, how many still are */
uint64_t tally_answers(void);
void tally_print(double cpu_seconds);
noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* main.c: set once no new request may be sent. */
extern bool stopping;

/* main.c: to be told when more can be sent, or no longer. */
void watch_writable(int fd, bool wanted);

/* grpc.c */
struct connection *grpc_open(int fd);
void grpc_fill(struct connection *connection);
void grpc_call(struct connection *connection, double began);
void grpc_readable(struct connection *connection);
void grpc_flush(struct connection *connection);

/* http1.c */
struct connection *http1_open(int fd);
void http1_call(struct connection *connection);
void http1_readable(struct connection *connection);
void http1_flush(struct connection *connection);

#endif
