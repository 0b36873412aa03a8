/* The smallest plugin that passes `qwen-hal-check --level 0`: memory and streams in host memory, no ops yet.
 *
 *   cc -std=c99 -O2 -Wall -shared -fPIC -I../../include plugin.c -o libhal_example.so
 *   qwen-hal-check --plugin ./libhal_example.so --level 0
 *
 * A real one calls the vendor's runtime where this one calls malloc and memcpy. docs/hal.md goes on from here. */
#include "qwen_hal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct qhal_device { int open; };
struct qhal_buffer { unsigned char *bytes; uint64_t size; };
struct qhal_stream { qhal_device *device; };

#define TEXT(s) { (const uint8_t *)(s), sizeof(s) - 1 }

static const qhal_manifest manifest = {
    .struct_size = sizeof(qhal_manifest),
    .abi_major = QHAL_ABI_MAJOR,
    .abi_minor = QHAL_ABI_MINOR, /* what it was built with */
    .min_host_minor = 1,         /* what it needs at least */
    .name = TEXT("example"), .vendor = TEXT("qwen-inference"), .version = TEXT("0.1.0"), .build_id = TEXT("example-1"),
    .kind = QHAL_KIND_CPU,
    .score = 0,
};

/* Every refusal: a code, and a sentence in the caller's record, which may be null. */
static qhal_status refuse(qhal_error *err, qhal_status code, const char *text) {
    if (err) {
        err->code = code;
        snprintf((char *)err->message, sizeof err->message, "%s", text);
    }
    return code;
}

static qhal_status init(const qhal_kv *options, uint32_t count, qhal_error *err) {
    (void)options, (void)count, (void)err;
    return QHAL_OK;
}
static qhal_status shutdown_plugin(qhal_error *err) { (void)err; return QHAL_OK; }

static qhal_status device_count(uint32_t *out, qhal_error *err) { (void)err; *out = 1; return QHAL_OK; }

/* Records of the host are written field by field, so that a newer, larger one keeps what this plugin does not know. */
static qhal_status device_info(uint32_t index, qhal_device_info *out, qhal_error *err) {
    if (index != 0) return refuse(err, QHAL_OUT_OF_RANGE, "device index: expected 0, there is one device");
    out->kind = QHAL_KIND_CPU;
    out->id.index = 0;
    snprintf((char *)out->name, sizeof out->name, "Example in host memory");
    snprintf((char *)out->fingerprint, sizeof out->fingerprint, "example-1");
    return QHAL_OK;
}

static qhal_status device_open(uint32_t index, const qhal_kv *options, uint32_t count, qhal_device **out, qhal_error *err) {
    (void)options, (void)count;
    if (index != 0) return refuse(err, QHAL_OUT_OF_RANGE, "device index: expected 0, there is one device");
    *out = calloc(1, sizeof **out);
    return *out ? QHAL_OK : refuse(err, QHAL_RESOURCE_EXHAUSTED, "no memory for a device");
}
static qhal_status device_close(qhal_device *device, qhal_error *err) { (void)err; free(device); return QHAL_OK; }

static qhal_status device_caps(qhal_device *device, qhal_device_caps *out, qhal_error *err) {
    if (!device) return refuse(err, QHAL_INVALID_ARGUMENT, "device: expected an open one, found null");
    out->kind = QHAL_KIND_CPU;
    out->valid_fields = QHAL_CAPS_BUFFER_ALIGNMENT; /* the others stay unknown, which is not zero */
    out->buffer_alignment = 4;
    out->features = QHAL_FEATURE_INLINE; /* work is done when the call that enqueued it returns */
    return QHAL_OK;
}

static qhal_status buffer_alloc(qhal_device *device, const qhal_buffer_desc *desc, qhal_buffer **out, qhal_error *err) {
    if (!device || desc->size == 0) return refuse(err, QHAL_INVALID_ARGUMENT, "buffer: expected a device and a size");
    qhal_buffer *buffer = malloc(sizeof *buffer);
    void *bytes = NULL;
    uint64_t alignment = desc->alignment > 64 ? desc->alignment : 64;
    if (!buffer || desc->size > PTRDIFF_MAX || posix_memalign(&bytes, alignment, desc->size) != 0) {
        free(buffer);
        return refuse(err, QHAL_RESOURCE_EXHAUSTED, "no memory for the buffer");
    }
    buffer->bytes = bytes;
    buffer->size = desc->size;
    *out = buffer;
    return QHAL_OK;
}
static qhal_status buffer_free(qhal_buffer *buffer, qhal_error *err) {
    (void)err;
    if (buffer) free(buffer->bytes);
    free(buffer);
    return QHAL_OK;
}

static qhal_status stream_create(qhal_device *device, const qhal_stream_desc *desc, qhal_stream **out, qhal_error *err) {
    (void)desc;
    if (!device) return refuse(err, QHAL_INVALID_ARGUMENT, "device: expected an open one, found null");
    *out = malloc(sizeof **out);
    if (!*out) return refuse(err, QHAL_RESOURCE_EXHAUSTED, "no memory for a stream");
    (*out)->device = device;
    return QHAL_OK;
}
static qhal_status stream_destroy(qhal_stream *stream, qhal_error *err) { (void)err; free(stream); return QHAL_OK; }
static qhal_status stream_wait(qhal_stream *stream, uint64_t timeout_ns, qhal_error *err) {
    (void)timeout_ns;
    return stream ? QHAL_OK : refuse(err, QHAL_INVALID_ARGUMENT, "stream: expected one, found null");
}

/* One side of a copy: host memory as it is, or a range of a buffer if it lies within. */
static unsigned char *side(const qhal_slice *slice, const void *host, uint64_t extent) {
    if (host) return (unsigned char *)host;
    if (!slice->buffer || slice->size < extent || slice->offset > slice->buffer->size) return NULL;
    return extent <= slice->buffer->size - slice->offset ? slice->buffer->bytes + slice->offset : NULL;
}
static qhal_status copy(qhal_stream *stream, const qhal_copy_desc *desc, qhal_error *err) {
    if (!stream) return refuse(err, QHAL_INVALID_ARGUMENT, "stream: expected one, found null");
    if (desc->rows == 0 || desc->row_bytes == 0) return QHAL_OK;
    uint64_t steps = desc->rows - 1, limit = UINT64_MAX / 4;
    if (desc->row_bytes > limit || (steps && (desc->src_pitch > limit / steps || desc->dst_pitch > limit / steps)))
        return refuse(err, QHAL_INVALID_ARGUMENT, "copy: larger than any memory");
    unsigned char *from = side(&desc->src, desc->src_host, steps * desc->src_pitch + desc->row_bytes);
    unsigned char *to = side(&desc->dst, desc->dst_host, steps * desc->dst_pitch + desc->row_bytes);
    if (!from || !to) return refuse(err, QHAL_OUT_OF_RANGE, "copy: expected ranges within their buffers");
    for (uint64_t row = 0; row < desc->rows; row++)
        memmove(to + row * desc->dst_pitch, from + row * desc->src_pitch, desc->row_bytes);
    return QHAL_OK;
}

/* The next step of a bring-up: claim one op here and compute it in plan_launch. */
static qhal_status op_supports(qhal_device *device, const qhal_op_desc *desc, qhal_support *out, qhal_error *err) {
    (void)device, (void)desc, (void)err;
    out->level = QHAL_SUPPORT_NO;
    snprintf((char *)out->reason, sizeof out->reason, "the example has no ops");
    return QHAL_OK;
}
static qhal_status plan_create(qhal_device *device, const qhal_op_desc *desc, const qhal_plan_opts *opts, qhal_plan **out,
                               qhal_plan_info *info, qhal_error *err) {
    (void)device, (void)desc, (void)opts, (void)out, (void)info;
    return refuse(err, QHAL_UNIMPLEMENTED, "the example has no ops");
}
static qhal_status plan_launch(qhal_plan *plan, qhal_stream *stream, const qhal_launch_args *args, qhal_error *err) {
    (void)plan, (void)stream, (void)args;
    return refuse(err, QHAL_INVALID_ARGUMENT, "plan: expected one, found null");
}
static qhal_status plan_destroy(qhal_plan *plan, qhal_error *err) { (void)plan, (void)err; return QHAL_OK; }

static const qhal_plugin_api table = {
    .struct_size = sizeof(qhal_plugin_api), .abi_minor = QHAL_ABI_MINOR,
    .plugin_init = init, .plugin_shutdown = shutdown_plugin,
    .device_count = device_count, .device_info = device_info,
    .device_open = device_open, .device_close = device_close, .device_caps = device_caps,
    .buffer_alloc = buffer_alloc, .buffer_free = buffer_free,
    .stream_create = stream_create, .stream_destroy = stream_destroy, .stream_wait = stream_wait, .copy = copy,
    .op_supports = op_supports, .plan_create = plan_create, .plan_launch = plan_launch, .plan_destroy = plan_destroy,
    /* Everything else is null: the host puts refusing stubs there, or does it with what is here. */
};

const qhal_manifest *qhal_plugin_manifest(void) { return &manifest; }

const qhal_plugin_api *qhal_plugin_query(uint32_t host_major, uint32_t host_minor, const qhal_host_api *host) {
    (void)host_minor, (void)host;
    return host_major == QHAL_ABI_MAJOR ? &table : NULL;
}
