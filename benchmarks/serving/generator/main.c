/* Load over gRPC (unary calls, streams) and HTTP/1.1, from one thread, with little CPU per request.
 *
 * In a closed loop each caller sends its next request when the last is answered. With --rate it
 * is an open loop: the times to send are drawn by the seed, whatever becomes of the answers, and
 * a latency counts from the time at which a request was meant to be sent.
 *
 * The body of gRPC calls is one message with its length prefix, or several, which the calls send in turn.
 *
 * Prints "measuring" when the warm-up is over, and at the end one line of JSON; latencies are in
 * milliseconds. Whatever makes the figures worthless (an answer too many, a connection closed) is
 * said on stderr, with exit status 1. */
#define _GNU_SOURCE
#include "generator.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/timerfd.h>
#include <unistd.h>

/* How long it waits for its last answers. */
static const double GRACE_SECONDS = 10;
enum { MOST_EVENTS = 64, MOST_DESCRIPTORS = 4096, MOST_IN_FLIGHT = 1 << 18, CLOSED_LOOP_WAIT_MS = 20 };

struct options options = {
    .host = "127.0.0.1", .path = "/", .content_type = "application/octet-stream", .id_offset = -1,
    .connections = 1, .streams = 1, .in_flight = 1, .warm_up = 0.5, .seconds = 2, .poisson = true, .seed = 1,
};
bool stopping;

static int poll_fd, timer_fd;

/* By file descriptor. */
static struct {
    struct connection *connection;
    bool writable;
} watched[MOST_DESCRIPTORS];
static int *descriptors;

static const char usage[] =
    "usage: load --mode unary|stream|http1 --port N --path PATH --body FILE [--host ADDRESS]\n"
    "  [--connections N] [--streams N (on each connection)] [--in-flight N (on each stream)]\n"
    "  [--warm-up SECONDS] [--seconds SECONDS] [--calls N (at most)] [--least-bytes N (of an answer)]\n"
    "  [--rate N (a second, open loop)] [--arrivals poisson|uniform] [--seed N]\n"
    "  [--id-offset N (where in the body '#0000000' is)] [--content-type TYPE] [--count-batches]\n"
    "  [--header NAME=VALUE (of each call, may be given several times)]\n";

enum { MODE = 1, HOST, PORT, PATH, BODY, TYPE, CONNECTIONS, STREAMS, IN_FLIGHT, WARM_UP, SECONDS,
              CALLS, LEAST, RATE, ARRIVALS, SEED, ID_OFFSET, COUNT_BATCHES, EXTRA };

static void read_body(const char *name) {
    FILE *file = fopen(name, "rb");
    if (!file || fseek(file, 0, SEEK_END))
        fail("%s: %s", name, strerror(errno));
    options.body_length = ftell(file);
    rewind(file);
    options.body = malloc(options.body_length);
    if (fread(options.body, 1, options.body_length, file) != options.body_length)
        fail("%s cannot be read", name);
    fclose(file);
}

static enum mode mode_of(const char *name) {
    static const char *names[] = {"unary", "stream", "http1"};
    for (int mode = UNARY; mode <= HTTP1; mode++)
        if (!strcmp(name, names[mode]))
            return mode;
    fail("--mode is %s; it is unary, stream or http1", name);
}

static void add_header(char *text) {
    char *equals = strchr(text, '=');
    if (!equals || equals == text)
        fail("--header is %s; it is NAME=VALUE", text);
    if (options.header_count == MOST_HEADERS)
        fail("--header is given more than %d times", MOST_HEADERS);
    *equals = 0;
    options.headers[options.header_count++] = (struct header){text, equals + 1};
}

static void read_options(int count, char **words) {
    static const struct option known[] = {
        {"mode", 1, 0, MODE}, {"host", 1, 0, HOST}, {"port", 1, 0, PORT}, {"path", 1, 0, PATH},
        {"body", 1, 0, BODY}, {"content-type", 1, 0, TYPE}, {"connections", 1, 0, CONNECTIONS},
        {"streams", 1, 0, STREAMS}, {"in-flight", 1, 0, IN_FLIGHT}, {"warm-up", 1, 0, WARM_UP},
        {"seconds", 1, 0, SECONDS}, {"calls", 1, 0, CALLS}, {"least-bytes", 1, 0, LEAST},
        {"rate", 1, 0, RATE}, {"arrivals", 1, 0, ARRIVALS}, {"seed", 1, 0, SEED},
        {"id-offset", 1, 0, ID_OFFSET}, {"count-batches", 0, 0, COUNT_BATCHES},
        {"header", 1, 0, EXTRA}, {0}};
    for (int which; (which = getopt_long(count, words, "", known, NULL)) != -1;)
        switch (which) {
        case MODE: options.mode = mode_of(optarg); break;
        case HOST: options.host = optarg; break;
        case PORT: options.port = atoi(optarg); break;
        case PATH: options.path = optarg; break;
        case BODY: read_body(optarg); break;
        case TYPE: options.content_type = optarg; break;
        case CONNECTIONS: options.connections = atoi(optarg); break;
        case STREAMS: options.streams = atoi(optarg); break;
        case IN_FLIGHT: options.in_flight = atoi(optarg); break;
        case WARM_UP: options.warm_up = atof(optarg); break;
        case SECONDS: options.seconds = atof(optarg); break;
        case CALLS: options.calls = strtoull(optarg, NULL, 10); break;
        case LEAST: options.least_bytes = strtoul(optarg, NULL, 10); break;
        case RATE: options.rate = atof(optarg); break;
        case ARRIVALS: options.poisson = strcmp(optarg, "uniform") != 0; break;
        case SEED: options.seed = strtoull(optarg, NULL, 10); break;
        case ID_OFFSET: options.id_offset = atol(optarg); break;
        case COUNT_BATCHES: options.count_batches = true; break;
        case EXTRA: add_header(optarg); break;
        default: fail("%s", usage);
        }
    if (!options.body || !options.port || options.connections < 1 || options.streams < 1 || options.in_flight < 1)
        fail("%s", usage);
    if (options.mode == STREAM && (options.id_offset < 0 || options.id_offset + ID_LENGTH > (long)options.body_length))
        fail("--mode stream needs --id-offset, which is in the body");
    if (options.rate > 0 && options.mode != UNARY)
        fail("--rate goes with --mode unary only");
    snprintf(options.authority, sizeof options.authority, "%.60s:%d", options.host, options.port);
}

static int connect_to_server(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(options.port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    if (inet_pton(AF_INET, options.host, &address.sin_addr) != 1)
        fail("--host is %s; it is an IPv4 address", options.host);
    if (connect(fd, (struct sockaddr *)&address, sizeof address))
        fail("no connection to %s: %s", options.authority, strerror(errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static void watch(int how, int fd, uint32_t events) {
    struct epoll_event event = {events, {.fd = fd}};
    if (epoll_ctl(poll_fd, how, fd, &event))
        fail("epoll: %s", strerror(errno));
}

void watch_writable(int fd, bool wanted) {
    if (watched[fd].writable != wanted) {
        watched[fd].writable = wanted;
        watch(EPOLL_CTL_MOD, fd, wanted ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
}

static void flush_connection(struct connection *connection) {
    if (options.mode == HTTP1)
        http1_flush(connection);
    else
        grpc_flush(connection);
}

static void open_connections(void) {
    descriptors = calloc(options.connections, sizeof *descriptors);
    for (int at = 0; at < options.connections; at++) {
        int fd = descriptors[at] = connect_to_server();
        if (fd >= MOST_DESCRIPTORS)
            fail("--connections is too large; at most about %d", MOST_DESCRIPTORS);
        watch(EPOLL_CTL_ADD, fd, EPOLLIN);
        struct connection *connection = options.mode == HTTP1 ? http1_open(fd) : grpc_open(fd);
        watched[fd].connection = connection;
        if (options.mode == HTTP1)
            http1_call(connection);
        else if (options.rate == 0)
            grpc_fill(connection);
        flush_connection(connection);
    }
}

/* Serves what has happened on the connections, waiting for it at most so long (-1: the timer). */
static void serve(int wait_ms) {
    struct epoll_event events[MOST_EVENTS];
    int count = epoll_wait(poll_fd, events, MOST_EVENTS, wait_ms);
    for (int at = 0; at < count; at++) {
        struct connection *connection = watched[events[at].data.fd].connection;
        if (!connection) {
            uint64_t expirations;
            if (read(timer_fd, &expirations, sizeof expirations) < 0 && errno != EAGAIN)
                fail("timerfd: %s", strerror(errno));
            continue;
        }
        if (events[at].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
            if (options.mode == HTTP1)
                http1_readable(connection);
            else
                grpc_readable(connection);
        }
        flush_connection(connection);
    }
}

static void set_timer(double at) {
    struct itimerspec when = {.it_value = {(time_t)at, (long)((at - floor(at)) * 1e9)}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

static double cpu_seconds(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

static double cpu_at_start;

static void begin_measuring(void) {
    cpu_at_start = cpu_seconds();
    puts("measuring");
    fflush(stdout);
}

static void closed_loop(double from, double until) {
    bool measuring = false;
    uint64_t in_flight = (uint64_t)options.connections * (options.mode == HTTP1 ? 1 : options.streams) *
                         (options.mode == STREAM ? options.in_flight : 1);
    tally_measure(from, INFINITY);
    while (now() < until && !(options.calls && tally_answers() >= options.calls)) {
        if (!measuring && now() >= from) {
            measuring = true;
            begin_measuring();
        }
        serve(CLOSED_LOOP_WAIT_MS);
    }
    /* Of a stream some may not have been written yet. */
    if (tally_in_flight() > in_flight || (options.mode != STREAM && tally_in_flight() < in_flight))
        fail("lost count: %lu in flight of %lu", tally_in_flight(), in_flight);
    /* Now, not before: of what was sent since, nothing counts. */
    tally_measure(from, now());
    if (options.calls)
        return;
    /* Under the same load as before: how long they take decides what share of them counts. */
    tally_over();
    for (double patience = now() + GRACE_SECONDS; tally_begun() && now() < patience;)
        serve(CLOSED_LOOP_WAIT_MS);
}

static void open_loop(double from, double until) {
    unsigned short state[3] = {options.seed, options.seed >> 16, 0x330e};
    double next = now();
    bool measuring = false;
    for (uint64_t number = 0; next < until; number++) {
        while (now() < next) {
            set_timer(next);
            serve(-1);
        }
        if (!measuring && next >= from) {
            measuring = true;
            begin_measuring();
        }
        struct connection *connection = watched[descriptors[number % options.connections]].connection;
        if (tally_in_flight() >= MOST_IN_FLIGHT)
            fail("%d requests are in flight: the server does not keep up", MOST_IN_FLIGHT);
        grpc_call(connection, next);
        if (measuring)
            tally_lag(now() - next);
        grpc_flush(connection);
        if (number % 16 == 15) /* even when behind: answers must be read */
            serve(0);
        next += (options.poisson ? -log(1 - erand48(state)) : 1) / options.rate;
    }
    stopping = true;
    for (double patience = now() + GRACE_SECONDS; tally_in_flight() && now() < patience;)
        serve(CLOSED_LOOP_WAIT_MS);
}

int main(int count, char **words) {
    read_options(count, words);
    signal(SIGPIPE, SIG_IGN);
    poll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    watch(EPOLL_CTL_ADD, timer_fd, EPOLLIN);
    double from = now() + options.warm_up, until = from + options.seconds;
    tally_measure(from, until);
    open_connections();
    if (options.rate > 0)
        open_loop(from, until);
    else
        closed_loop(from, until);
    stopping = true;
    tally_print(cpu_seconds() - cpu_at_start);
    return 0;
}
