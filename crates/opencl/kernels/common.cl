// Shared by every program. V: values of an explicit vector; LANES: work-items of a group that share a row.
// OpenCL C 1.2; no cl_khr_fp16: halves are converted by vload_half, or from their bits.

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define VLOAD JOIN(vload, V)
#define VSTORE JOIN(vstore, V)
#define VLOAD_HALF JOIN(vload_half, V)
#define VSTORE_HALF_RTE JOIN(JOIN(vstore_half, V), _rte)
#define CONVERT_FLOATV JOIN(convert_float, V)
#define CONVERT_UINTV JOIN(convert_uint, V)
#define AS_FLOATV JOIN(as_float, V)
#define AS_INTV JOIN(as_int, V)
#define AS_UINTV JOIN(as_uint, V)

typedef JOIN(float, V) floatv;
typedef JOIN(uint, V) uintv;
typedef JOIN(int, V) intv;
typedef JOIN(ushort, V) ushortv;
typedef JOIN(uchar, V) ucharv;

// One multiplication and one addition: fused where that costs nothing, and then everywhere, so that every kernel of a device
// gives the same bits.
#ifdef FP_FAST_FMAF
#define MAD(a, b, c) fma((a), (b), (c))
#else
#define MAD(a, b, c) ((a) * (b) + (c))
#endif

// A group of one work-item needs no barrier, and its arrays may stay in registers.
#if LANES == 1
#define SHARED
#define MEET
#else
#define SHARED __local
#define MEET barrier(CLK_LOCAL_MEM_FENCE)
#endif

// An operand is a buffer and the byte at which it begins.
#define IN(name) __global const uchar *name##_buffer, ulong name##_at
#define OUT(name) __global uchar *name##_buffer, ulong name##_at
#define F32_IN(name) __global const float *name = (__global const float *)(name##_buffer + name##_at)
#define F32_OUT(name) __global float *name = (__global float *)(name##_buffer + name##_at)
#define I32_IN(name) __global const int *name = (__global const int *)(name##_buffer + name##_at)
#define I32_OUT(name) __global int *name = (__global int *)(name##_buffer + name##_at)
#define BYTES_IN(name) __global const uchar *name = name##_buffer + name##_at
#define BYTES_OUT(name) __global uchar *name = name##_buffer + name##_at

// What the data says wrongly; the first of a stream is kept: code, index, value.
#define FAULTS __global volatile int *faults
void tell(FAULTS, int code, int index, int value) {
    if (atomic_cmpxchg(&faults[0], 0, code) == 0) {
        faults[1] = index;
        faults[2] = value;
    }
}

// The first n values of a vector that may end behind them; the rest is 0.
floatv load_up_to(__global const float *from, int n) {
    if (n >= V) {
        return VLOAD(0, from);
    }
    float part[V];
    for (int i = 0; i < V; i++) {
        part[i] = i < n ? from[i] : 0.0f;
    }
    return VLOAD(0, part);
}

void store_up_to(floatv value, __global float *to, int n) {
    if (n >= V) {
        VSTORE(value, 0, to);
        return;
    }
    float part[V];
    VSTORE(value, 0, part);
    for (int i = 0; i < n; i++) {
        to[i] = part[i];
    }
}

// The sum and the largest of a vector in halves: the order depends on V alone.
#if V == 16
#define IN_HALVES(x, two) \
    float8 a = two(x.lo, x.hi); \
    float4 b = two(a.lo, a.hi); \
    float2 c = two(b.lo, b.hi); \
    return two(c.lo, c.hi);
#elif V == 8
#define IN_HALVES(x, two) \
    float4 b = two(x.lo, x.hi); \
    float2 c = two(b.lo, b.hi); \
    return two(c.lo, c.hi);
#else
#define IN_HALVES(x, two) \
    float2 c = two(x.lo, x.hi); \
    return two(c.lo, c.hi);
#endif
#define PLUS(x, y) ((x) + (y))
float sum_of(floatv x) { IN_HALVES(x, PLUS) }
float max_of(floatv x) { IN_HALVES(x, fmax) }

// binary16 and the 8-bit floats from their bits, without subnormal float32 in between, which a device may flush.
float half_bits(uint h) {
    uint magnitude = h & 0x7fffu, shifted = (magnitude << 13) + (112u << 23);
    float value = magnitude >= 0x7c00u ? as_float(shifted + (112u << 23))
        : magnitude < 0x400u ? as_float(shifted + (1u << 23)) - as_float(113u << 23) : as_float(shifted);
    return as_float(as_uint(value) | (h & 0x8000u) << 16);
}

float e4m3_bits(uint b) {
    uint magnitude = b & 0x7fu;
    float value = magnitude == 0x7fu ? as_float(0x7fc00000u)
        : magnitude < 8u ? (float)magnitude * (1.0f / 512.0f) : as_float((magnitude << 20) + (120u << 23));
    return as_float(as_uint(value) | (b & 0x80u) << 24);
}

float e5m2_bits(uint b) { return half_bits(b << 8); }

float bf16_bits(uint b) { return as_float(b << 16); }

ushort bf16_of(float x) {
    uint bits = as_uint(x);
    return isnan(x) ? (ushort)(bits >> 16 | 0x40u) : (ushort)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Types of single values by their code.
#define TYPE_F32 0
#define TYPE_F16 1
#define TYPE_BF16 30
#define TYPE_E4M3 100
#define TYPE_E5M2 101

float value_at(__global const uchar *at, int type, size_t i) {
    switch (type) {
    case TYPE_F16: return half_bits(((__global const ushort *)at)[i]);
    case TYPE_BF16: return bf16_bits(((__global const ushort *)at)[i]);
    case TYPE_E4M3: return e4m3_bits(at[i]);
    case TYPE_E5M2: return e5m2_bits(at[i]);
    default: return ((__global const float *)at)[i];
    }
}

// Rounds to nearest even.
void store_as(__global uchar *at, int type, size_t i, float value) {
    switch (type) {
    case TYPE_F16: vstore_half_rte(value, i, (__global half *)at); break;
    case TYPE_BF16: ((__global ushort *)at)[i] = bf16_of(value); break;
    default: ((__global float *)at)[i] = value;
    }
}

// The first n of V values of a type, 0 behind them.
floatv values_at(__global const uchar *at, int type, size_t i, int n) {
    if (type == TYPE_F32) {
        return load_up_to((__global const float *)at + i, n);
    }
    float part[V];
    for (int j = 0; j < V; j++) {
        part[j] = j < n ? value_at(at, type, i + j) : 0.0f;
    }
    return VLOAD(0, part);
}

void store_values(__global uchar *at, int type, size_t i, floatv value, int n) {
    if (type == TYPE_F16 && n >= V) {
        VSTORE_HALF_RTE(value, 0, (__global half *)at + i);
        return;
    }
    float part[V];
    VSTORE(value, 0, part);
    for (int j = 0; j < min(V, n); j++) {
        store_as(at, type, i + j, part[j]);
    }
}

#define ACT_SILU 0
#define ACT_GELU_TANH 1
#define UNARY_SIGMOID 2

floatv activate(floatv x, int function) {
    switch (function) {
    case ACT_GELU_TANH:
        return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case UNARY_SIGMOID: return 1.0f / (1.0f + exp(-x));
    default: return x / (1.0f + exp(-x));
    }
}
