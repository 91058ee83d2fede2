/* A custom operator, y = twice(x) or y = minus_mean(x), by the C interface of ONNX Runtime, whose wheels have no headers.
 * The compiler gets DOMAIN and NAME, strings, and COMPUTE, one of the two functions. */
#include <stddef.h>
#include <stdint.h>

typedef void *Status; /* NULL is success */
typedef void **Api;   /* a table of functions, whose order never changes */

struct ApiBase {
    Api (*get_api)(uint32_t version);
    const char *(*version)(void);
};

/* Indices in the table. */
enum {
    CREATE_DOMAIN = 26,
    ADD_OPERATOR = 27,
    ADD_DOMAIN = 28,
    GET_DATA = 51,
    GET_RANK = 61,
    GET_SHAPE = 62,
    GET_TYPE_AND_SHAPE = 65,
    GET_INPUT = 90,
    GET_OUTPUT = 91,
    RELEASE_TYPE_AND_SHAPE = 99
};

enum { API_VERSION = 8, FLOAT = 1, REQUIRED = 0, MOST_AXES = 8 };

struct Operator {
    uint32_t version;
    void *(*create)(const struct Operator *, Api, const void *node);
    const char *(*name)(const struct Operator *);
    const char *(*provider)(const struct Operator *);
    int (*input_type)(const struct Operator *, size_t);
    size_t (*inputs)(const struct Operator *);
    int (*output_type)(const struct Operator *, size_t);
    size_t (*outputs)(const struct Operator *);
    void (*compute)(void *kernel, void *context);
    void (*destroy)(void *kernel);
    int (*input_kind)(const struct Operator *, size_t);
    int (*output_kind)(const struct Operator *, size_t);
};

static Api api;

#define CALL(index, ...) (((Status(*)())api[index])(__VA_ARGS__))

/* Sets x to the input, y to an output of the same shape, and returns the number of elements. */
static size_t open_tensors(void *context, const float **x, float **y) {
    void *input, *output, *info;
    int64_t shape[MOST_AXES];
    size_t rank, count = 1;
    CALL(GET_INPUT, context, (size_t)0, &input);
    CALL(GET_TYPE_AND_SHAPE, input, &info);
    CALL(GET_RANK, info, &rank);
    CALL(GET_SHAPE, info, shape, rank);
    ((void (*)(void *))api[RELEASE_TYPE_AND_SHAPE])(info);
    CALL(GET_DATA, input, x);
    CALL(GET_OUTPUT, context, (size_t)0, shape, rank, &output);
    CALL(GET_DATA, output, y);
    for (size_t axis = 0; axis < rank; axis++) count *= (size_t)shape[axis];
    return count;
}

void twice(void *kernel, void *context) {
    const float *x;
    float *y;
    size_t count = open_tensors(context, &x, &y);
    for (size_t i = 0; i < count; i++) y[i] = 2 * x[i];
}

/* Subtracts the mean of all elements, so each row depends on the others. */
void minus_mean(void *kernel, void *context) {
    const float *x;
    float *y, sum = 0;
    size_t count = open_tensors(context, &x, &y);
    for (size_t i = 0; i < count; i++) sum += x[i];
    for (size_t i = 0; i < count; i++) y[i] = x[i] - sum / (float)count;
}

static void *create(const struct Operator *operator, Api given, const void *node) { return (void *)operator; }
static void destroy(void *kernel) {}
static const char *name(const struct Operator *operator) { return NAME; }
static const char *provider(const struct Operator *operator) { return "CPUExecutionProvider"; }
static int type(const struct Operator *operator, size_t index) { return FLOAT; }
static size_t one(const struct Operator *operator) { return 1; }
static int required(const struct Operator *operator, size_t index) { return REQUIRED; }

static const struct Operator the_operator = {API_VERSION, create, name,    provider, type,     one,
                                             type,        one,    COMPUTE, destroy,  required, required};

Status RegisterCustomOps(void *options, const struct ApiBase *base) {
    void *domain;
    api = base->get_api(API_VERSION);
    CALL(CREATE_DOMAIN, DOMAIN, &domain);
    CALL(ADD_OPERATOR, domain, &the_operator);
    return CALL(ADD_DOMAIN, options, domain);
}
