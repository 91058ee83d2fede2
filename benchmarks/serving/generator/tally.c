/* Counts every request once: sent, and ended or still in flight. Prints the line of JSON. */
#include "generator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct samples {
    double *values;
    size_t count, room;
};

static uint64_t sent, ended;                /* since the start */
static uint64_t answers, errors, bytes;     /* of the measurement */
static double batches, measure_from, measure_until;
static double shares;                       /* of requests in the time of the measurement, closed loop */
static uint64_t begun;                      /* in flight when that ended, and not ended yet */
static struct samples latencies, lags;
static char last_message[256];

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

noreturn void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s%s\n", last_message[0] ? "; last message: " : "", last_message);
    exit(1);
}

static void add(struct samples *samples, double value) {
    if (samples->count == samples->room) {
        samples->room = samples->room ? samples->room * 2 : 1 << 16;
        samples->values = realloc(samples->values, samples->room * sizeof(double));
        if (!samples->values)
            fail("out of memory");
    }
    samples->values[samples->count++] = value;
}

void tally_measure(double from, double until) {
    measure_from = from;
    measure_until = until;
}

void tally_sent(void) { sent++; }

void tally_over(void) { begun = sent - ended; }

uint64_t tally_begun(void) { return begun; }

uint64_t tally_in_flight(void) { return sent - ended; }

uint64_t tally_answers(void) { return answers; }

void tally_message(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_message, sizeof last_message, format, arguments);
    va_end(arguments);
    for (char *at = last_message; *at; at++) /* it goes into JSON */
        if (*at == '"' || *at == '\\' || *at < ' ' || (unsigned char)*at > '~')
            *at = ' ';
}

/* A closed loop counts what ends while it measures; an open loop, what was meant to begin then.
 *
 * The rate of a closed loop counts of each request the share of its time that is in that of the
 * measurement: the answers of a batch come together, and of a dozen batches of 32 one more or less
 * is a tenth. */
void tally_ended(double began, bool ok, size_t size, double rows) {
    double at = now(), decides = options.rate > 0 ? began : at;
    if (ended++ >= sent)
        fail("lost count: more answers than requests");
    if (begun && began < measure_until)
        begun--;
    if (ok && began < measure_until && at > measure_from) {
        double from = began > measure_from ? began : measure_from, until = at < measure_until ? at : measure_until;
        shares += at > began ? (until - from) / (at - began) : 1;
    }
    if (decides < measure_from || decides >= measure_until)
        return;
    if (!ok) {
        errors++;
        return;
    }
    answers++;
    bytes += size;
    if (rows > 0)
        batches += 1 / rows;
    add(&latencies, at - began);
}

void tally_lag(double seconds) { add(&lags, seconds); }

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* In milliseconds; 0 of no samples. */
static double percentile(const struct samples *sorted, double percent) {
    return sorted->count ? sorted->values[(size_t)((sorted->count - 1) * percent / 100)] * 1e3 : 0;
}

void tally_print(double cpu_seconds) {
    double seconds = measure_until - measure_from, sum = 0;
    if (latencies.count)
        qsort(latencies.values, latencies.count, sizeof(double), ascending);
    if (lags.count)
        qsort(lags.values, lags.count, sizeof(double), ascending);
    for (size_t at = 0; at < latencies.count; at++)
        sum += latencies.values[at];
    printf("{\"answers\": %lu, \"errors\": %lu, \"unanswered\": %lu, \"seconds\": %.4f, \"rate\": %.1f, ",
           answers, errors, options.rate > 0 ? tally_in_flight() : 0, seconds,
           (options.rate > 0 ? answers : shares) / seconds);
    printf("\"mean_ms\": %.4f, \"p50_ms\": %.4f, \"p90_ms\": %.4f, \"p99_ms\": %.4f, \"max_ms\": %.4f, ",
           latencies.count ? sum / latencies.count * 1e3 : 0, percentile(&latencies, 50),
           percentile(&latencies, 90), percentile(&latencies, 99), percentile(&latencies, 100));
    printf("\"lag_p99_ms\": %.4f, \"mean_rows\": %.3f, \"mean_bytes\": %.1f, \"cpu_seconds\": %.3f, ",
           percentile(&lags, 99), batches > 0 ? answers / batches : 0,
           answers ? (double)bytes / answers : 0, cpu_seconds);
    printf("\"last_message\": \"%s\"}\n", last_message);
}
