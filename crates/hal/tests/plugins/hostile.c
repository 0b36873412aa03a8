/* The example plugin with one misbehaviour, chosen by -DHOSTILE=n; the numbers are those of tests/loader.rs. */
#define qhal_plugin_manifest example_manifest
#define qhal_plugin_query example_query
#include "plugin.c"
#undef qhal_plugin_manifest
#undef qhal_plugin_query
#include <unistd.h>

static qhal_manifest own_manifest __attribute__((unused));
static struct { qhal_plugin_api api; uint64_t newer[8]; } own;

static qhal_status abort_init(const qhal_kv *o, uint32_t n, qhal_error *e) { (void)o, (void)n, (void)e; abort(); }
static qhal_status exit_init(const qhal_kv *o, uint32_t n, qhal_error *e) { (void)o, (void)n, (void)e; _exit(0); }
static qhal_status fail_init(const qhal_kv *o, uint32_t n, qhal_error *e) {
    (void)o, (void)n;
    return refuse(e, QHAL_UNAVAILABLE, "driver: expected version 5, found 4; update it");
}
static qhal_status hang_open(uint32_t i, const qhal_kv *o, uint32_t n, qhal_device **out, qhal_error *e) {
    (void)i, (void)o, (void)n, (void)out, (void)e;
    for (;;) sleep(1);
    return QHAL_OK;
}
static qhal_status crash_caps(qhal_device *d, qhal_device_caps *out, qhal_error *e) {
    (void)d, (void)e;
    *(volatile int *)16 = 1;
    (void)out;
    return QHAL_OK;
}
static qhal_status lazy_copy(qhal_stream *s, const qhal_copy_desc *d, qhal_error *e) { (void)s, (void)d, (void)e; return QHAL_OK; }
static qhal_status noisy_init(const qhal_kv *o, uint32_t n, qhal_error *e) {
    (void)o, (void)n, (void)e;
    printf("driver says\nhello ");
    fflush(stdout);
    return QHAL_OK;
}
static qhal_status no_devices(uint32_t *out, qhal_error *e) { (void)e; *out = 0; return QHAL_OK; }

/* For qwen-hal-check: claims every op and has none. */
static qhal_status claims_all(qhal_device *d, const qhal_op_desc *desc, qhal_support *out, qhal_error *e) {
    (void)d, (void)desc, (void)e;
    out->level = QHAL_SUPPORT_NATIVE;
    return QHAL_OK;
}
/* Says that it is a GPU that reads a petabyte a second. */
static qhal_status boast_info(uint32_t i, qhal_device_info *out, qhal_error *e) {
    qhal_status status = device_info(i, out, e);
    if (!status) out->kind = QHAL_KIND_GPU;
    return status;
}
static qhal_status boast_caps(qhal_device *d, qhal_device_caps *out, qhal_error *e) {
    qhal_status status = device_caps(d, out, e);
    if (status) return status;
    out->kind = QHAL_KIND_GPU;
    out->bandwidth = 1e15;
    out->valid_fields |= QHAL_CAPS_BANDWIDTH;
    return QHAL_OK;
}
/* Crashes on rows, which the self test does not try; hangs on a poll. */
static qhal_status crash_rows(qhal_stream *s, const qhal_copy_desc *d, qhal_error *e) {
    if (d->rows > 1) abort();
    return copy(s, d, e);
}
static qhal_status hang_poll(qhal_stream *s, uint64_t t, qhal_error *e) {
    while (t == 0 && s) sleep(1);
    return stream_wait(s, t, e);
}

#if HOSTILE == 16
__attribute__((constructor)) static void crash_while_loading(void) { abort(); }
#endif

#if HOSTILE != 15
__attribute__((visibility("default"))) const qhal_manifest *qhal_plugin_manifest(void) {
    own_manifest = *example_manifest();
#if HOSTILE == 1 /* built for an older minor, when the record was shorter */
    own_manifest.abi_minor = 0;
    own_manifest.min_host_minor = 0;
    own_manifest.struct_size = offsetof(qhal_manifest, score);
#elif HOSTILE == 2 /* built for a newer minor, content with an older host */
    own_manifest.abi_minor = 99;
#elif HOSTILE == 3 /* needs a newer host */
    own_manifest.abi_minor = 99;
    own_manifest.min_host_minor = 99;
#elif HOSTILE == 4
    own_manifest.abi_major = 7;
#endif
    return &own_manifest;
}
#endif

__attribute__((visibility("default"))) const qhal_plugin_api *qhal_plugin_query(uint32_t major, uint32_t minor,
                                                                                const qhal_host_api *host) {
    const qhal_plugin_api *table = example_query(major, minor, host);
    if (!table) return NULL;
    own.api = *table;
    (void)abort_init, (void)exit_init, (void)fail_init, (void)hang_open, (void)crash_caps, (void)lazy_copy;
    (void)noisy_init, (void)no_devices, (void)claims_all, (void)crash_rows, (void)hang_poll, (void)boast_info, (void)boast_caps;
#if HOSTILE == 2 /* functions that this host does not know */
    own.api.struct_size = sizeof own;
    for (int i = 0; i < 8; i++) own.newer[i] = 0xdeadbeef;
#elif HOSTILE == 5
    own.api.plan_launch = NULL;
    own.api.buffer_free = NULL;
#elif HOSTILE == 6
    own.api.struct_size = 4;
#elif HOSTILE == 7
    return NULL;
#elif HOSTILE == 8
    own.api.plugin_init = abort_init;
#elif HOSTILE == 9
    own.api.plugin_init = exit_init;
#elif HOSTILE == 10
    own.api.plugin_init = fail_init;
#elif HOSTILE == 11
    own.api.device_open = hang_open;
#elif HOSTILE == 12
    own.api.device_caps = crash_caps;
#elif HOSTILE == 13
    own.api.copy = lazy_copy;
#elif HOSTILE == 14
    own.api.plugin_init = noisy_init;
#elif HOSTILE == 17
    own.api.device_count = no_devices;
#elif HOSTILE == 18
    own.api.op_supports = claims_all;
#elif HOSTILE == 19
    own.api.copy = crash_rows;
#elif HOSTILE == 20
    own.api.stream_wait = hang_poll;
#elif HOSTILE == 21
    own.api.device_info = boast_info;
    own.api.device_caps = boast_caps;
#endif
    return &own.api;
}
