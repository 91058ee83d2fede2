/* A stand-in for the NVIDIA driver's library, for tests on machines without a GPU. Device memory is POSIX shared
 * memory. The stand-in is as strict as the driver in these points:
 * - Nothing works before cuInit, or without a context.
 * - A handle is opened only by another process than the one that made it, and closed as often as it was opened.
 * - A copy must be within an allocation, and is made only when its thread waits for the stream.
 * - An allocation has a whole number of pages of 512 bytes, as with cudaMalloc. All of a process have 1 GiB together.
 * - Memory is allocated, freed and exported only with a context.
 *
 * The numbers at the offsets 40, 44 and 48 of a handle are the results of opening it, of copying its memory, and of
 * closing it; 0 for success. STAND_IN_GPUS is the number of devices (2), STAND_IN_INIT the result of cuInit,
 * STAND_IN_EXPORT that of cuIpcGetMemHandle, and STAND_IN_OPEN the result of opening each handle exported here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <pthread.h>

enum { PAGE = 512, MOST = 256, DEVICES = 16, ROOM = 1 << 30 };

typedef uint64_t CUdeviceptr;
typedef struct {
    uint32_t magic, pid, device, number;
    uint64_t size;
    char pad[16];
    int32_t open_result, copy_result, close_result;
    char rest[12];
} Handle;
_Static_assert(sizeof(Handle) == 64, "a cudaIpcMemHandle_t has 64 bytes");

typedef struct {
    Handle handle;
    char *at;
    int opened;
} Memory;

static const uint32_t MAGIC = 0x41445543;
static Memory memories[MOST];
static int initialised, made;
static size_t allocated;
static char contexts[DEVICES], streams[DEVICES];
static int retained[DEVICES];
static _Thread_local void *stack[8];
static _Thread_local int depth;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int number_of(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text ? atoi(text) : otherwise;
}

static int ready(void) {
    return !initialised ? 3 : !depth ? 201 : 0;
}

int cuInit(unsigned flags) {
    int result = number_of("STAND_IN_INIT", 0);
    initialised = !result;
    return result;
}

/* By which NVIDIA's bindings for Python find all other functions. The newest version has "_v2" in its name. */
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, void *status) {
    char newest[128];
    Dl_info here;
    dladdr(&memories, &here);
    void *library = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    snprintf(newest, sizeof newest, "%s_v2", symbol);
    *function = dlsym(library, newest);
    if (!*function) *function = dlsym(library, symbol);
    dlclose(library);
    return *function ? 0 : 500;
}

int cuDeviceGetCount(int *count) {
    *count = number_of("STAND_IN_GPUS", 2);
    return initialised ? 0 : 3;
}

int cuDeviceGet(int *device, int number) {
    if (!initialised) return 3;
    if (number < 0 || number >= number_of("STAND_IN_GPUS", 2)) return 101;
    *device = number;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (!initialised) return 3;
    *context = &contexts[device];
    retained[device]++;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    if (!retained[device]) return 201;
    retained[device]--;
    return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = retained[device] > 0;
    return 0;
}

int cuCtxPushCurrent_v2(void *context) {
    if (depth == 8) return 1;
    stack[depth++] = context;
    return 0;
}

int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return 201;
    *context = stack[--depth];
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = depth ? stack[depth - 1] : NULL;
    return 0;
}

static uint32_t device_now(void) {
    return (char *)stack[depth - 1] - contexts;
}

/* CU_STREAM_LEGACY, the default stream, is 1. */
static int is_stream(void *stream) {
    return stream == (void *)1 || stream == &streams[device_now()];
}

int cuStreamCreate(void **stream, unsigned flags) {
    int result = ready();
    if (!result) *stream = &streams[device_now()];
    return result;
}

static _Thread_local struct { char *to; const char *from; size_t size; void *stream; } waiting[8];
static _Thread_local int count;

int cuStreamSynchronize(void *stream) {
    int result = ready();
    if (result) return result;
    if (!is_stream(stream)) return 400;
    int left = 0;
    for (int i = 0; i < count; i++)
        if (waiting[i].stream == stream) memcpy(waiting[i].to, waiting[i].from, waiting[i].size);
        else waiting[left++] = waiting[i];
    count = left;
    return 0;
}

static int later(void *to, const void *from, size_t size, void *stream) {
    if (count == 8) return 2;
    waiting[count].to = to;
    waiting[count].from = from;
    waiting[count].size = size;
    waiting[count++].stream = stream;
    return 0;
}

/* Maps the memory of a handle. Its file is created, or must exist. */
static Memory *mapped(const Handle *handle, int flags) {
    char name[64];
    snprintf(name, sizeof name, "/tensorferry-cuda-%u-%u", handle->pid, handle->number);
    int file = shm_open(name, O_RDWR | flags, 0600);
    if (file < 0) return NULL;
    if (flags && ftruncate(file, handle->size)) return NULL;
    char *at = mmap(NULL, handle->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return NULL;
    for (Memory *memory = memories; memory < memories + MOST; memory++)
        if (!memory->at) {
            *memory = (Memory){*handle, at, 1};
            return memory;
        }
    return NULL;
}

static Memory *around(CUdeviceptr address) {
    for (Memory *memory = memories; memory < memories + MOST; memory++)
        if (memory->at && address >= (uintptr_t)memory->at && address < (uintptr_t)memory->at + memory->handle.size)
            return memory;
    return NULL;
}

static void forget(Memory *memory) {
    munmap(memory->at, memory->handle.size);
    memory->at = NULL;
}

int cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    int result = ready();
    if (result) return result;
    pthread_mutex_lock(&lock);
    Handle handle = {MAGIC, getpid(), device_now(), made++, (size + PAGE - 1) / PAGE * PAGE};
    Memory *memory = handle.size > ROOM - allocated ? NULL : mapped(&handle, O_CREAT | O_EXCL);
    if (memory) {
        *address = (uintptr_t)memory->at;
        allocated += handle.size;
    }
    pthread_mutex_unlock(&lock);
    return memory ? 0 : 2;
}

int cuMemFree_v2(CUdeviceptr address) {
    int result = ready();
    if (result) return result;
    Memory *memory = around(address);
    if (!memory) return 1;
    char name[64];
    snprintf(name, sizeof name, "/tensorferry-cuda-%u-%u", memory->handle.pid, memory->handle.number);
    shm_unlink(name);
    allocated -= memory->handle.size;
    forget(memory);
    return 0;
}

int cuIpcGetMemHandle(Handle *handle, CUdeviceptr address) {
    int result = ready();
    if (!result) result = number_of("STAND_IN_EXPORT", 0);
    if (result) return result;
    Memory *memory = around(address);
    if (!memory) return 1;
    *handle = memory->handle;
    handle->open_result = number_of("STAND_IN_OPEN", 0);
    return 0;
}

int cuIpcOpenMemHandle_v2(CUdeviceptr *address, Handle handle, unsigned flags) {
    int result = ready();
    if (result) return result;
    if (handle.open_result) return handle.open_result;
    if (flags != 1 || handle.magic != MAGIC || handle.device != device_now()) return 1;
    if (handle.pid == (uint32_t)getpid()) return 201;
    pthread_mutex_lock(&lock);
    Memory *memory = NULL;
    for (Memory *other = memories; other < memories + MOST; other++)
        if (other->at && other->handle.pid == handle.pid && other->handle.number == handle.number) memory = other;
    if (memory) memory->opened++;
    else memory = mapped(&handle, 0);
    if (memory) *address = (uintptr_t)memory->at;
    pthread_mutex_unlock(&lock);
    return memory ? 0 : 1;
}

int cuIpcCloseMemHandle(CUdeviceptr address) {
    int result = ready();
    if (result) return result;
    pthread_mutex_lock(&lock);
    Memory *memory = around(address);
    result = memory ? memory->handle.close_result : 1;
    if (memory && !--memory->opened) forget(memory);
    pthread_mutex_unlock(&lock);
    return result;
}

int cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    int result = ready();
    if (result) return result;
    Memory *memory = around(address);
    if (!memory) return 500;
    *base = (uintptr_t)memory->at;
    *size = memory->handle.size;
    return 0;
}

/* Returns 0 if a copy of this size may be made, else the error. */
static int copied(CUdeviceptr address, size_t size, void *stream) {
    int result = ready();
    if (result) return result;
    if (!is_stream(stream)) return 400;
    Memory *memory = around(address);
    if (!memory || address + size > (uintptr_t)memory->at + memory->handle.size) return 1;
    return memory->handle.copy_result;
}

int cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, void *stream) {
    int result = copied(from, size, stream);
    return result ? result : later(to, (char *)from, size, stream);
}

int cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, void *stream) {
    int result = copied(to, size, stream);
    return result ? result : later((char *)to, from, size, stream);
}

int cuGetErrorName(int result, const char **name) {
    *name = result == 1 ? "CUDA_ERROR_INVALID_VALUE" : result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
    return *name ? 0 : 1;
}

int cuGetErrorString(int result, const char **text) {
    *text = result == 1 ? "invalid argument" : result == 2 ? "out of memory" : NULL;
    return *text ? 0 : 1;
}
