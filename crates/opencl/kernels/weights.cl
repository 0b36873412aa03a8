// What the blocks of a weight mean, once for each type: for(a block's values in storage order) VALUE(k, w).
//
// Used twice: by products on vectors of V outputs whose units lie side by side (see gemm.cl), and by embed on single values. Before
// use, F and U name the float and unsigned types, TO_F(u) converts a value and TO_S8(u) its low byte as a signed one, UNIT(j)
// is unit j of the block, BITS_HALF, LEVEL_OF and the like work on these types. A unit has UNIT_BYTES.

#define BYTE(j) (UNIT((j) / 2) >> (8 * ((j) & 1)) & 255u)
#define HALF(j) BITS_HALF(UNIT(j))

#if WEIGHT_F32
#define BLOCK_LEN 1
#define UNITS 1
#define UNIT_BYTES 4
#define BLOCK_VALUES VALUE(0, BITS_FLOAT(UNIT(0)));

#elif WEIGHT_F16
#define BLOCK_LEN 1
#define UNITS 1
#define UNIT_BYTES 2
#define BLOCK_VALUES VALUE(0, HALF(0));

#elif WEIGHT_BF16
#define BLOCK_LEN 1
#define UNITS 1
#define UNIT_BYTES 2
#define BLOCK_VALUES VALUE(0, BITS_FLOAT(UNIT(0) << 16));

#elif WEIGHT_F8_E4M3
#define BLOCK_LEN 1
#define UNITS 1
#define UNIT_BYTES 1
#define BLOCK_VALUES VALUE(0, BITS_E4M3(UNIT(0)));

#elif WEIGHT_F8_E5M2
#define BLOCK_LEN 1
#define UNITS 1
#define UNIT_BYTES 1
#define BLOCK_VALUES VALUE(0, BITS_HALF(UNIT(0) << 8));

#else
#define UNIT_BYTES 2
#endif

// 32 values, four-bit codes: low nibbles are values 0 to 15, high ones 16 to 31. MEANS(u, at, e, d) is the value of the code at bit
// `at`, with d for a code that is not shifted down: 2^-at of the scale, which is exact.
#define NIBBLES(first, MEANS) \
    F d4 = d * 0x1p-4f, d8 = d * 0x1p-8f, d12 = d * 0x1p-12f; \
    for (int j = 0; j < 8; j++) { \
        U u = UNIT((first) + j); \
        VALUE(2 * j, MEANS(u, 0, 2 * j, d)); \
        VALUE(2 * j + 1, MEANS(u, 8, 2 * j + 1, d8)); \
        VALUE(2 * j + 16, MEANS(u, 4, 2 * j + 16, d4)); \
        VALUE(2 * j + 17, MEANS(u, 12, 2 * j + 17, d12)); \
    }

#if WEIGHT_Q4_0
#define BLOCK_LEN 32
#define UNITS 9
#define MEANING(u, at, e, d) d * (TO_F(u & 15u << at) - (float)(8 << at))
#define BLOCK_VALUES F d = HALF(0); NIBBLES(1, MEANING)

#elif WEIGHT_Q4_1
#define BLOCK_LEN 32
#define UNITS 10
#define MEANING(u, at, e, d) MAD(d, TO_F(u & 15u << at), m)
#define BLOCK_VALUES F d = HALF(0), m = HALF(1); NIBBLES(2, MEANING)

#elif WEIGHT_Q5_0
#define BLOCK_LEN 32
#define UNITS 11
#define MEANING(u, at, e, d) d * (TO_F((u & 15u << at) | (high >> (uint)(e) & 1u) << (at + 4)) - (float)(16 << at))
#define BLOCK_VALUES F d = HALF(0); U high = UNIT(1) | UNIT(2) << 16; NIBBLES(3, MEANING)

#elif WEIGHT_Q5_1
#define BLOCK_LEN 32
#define UNITS 12
#define MEANING(u, at, e, d) MAD(d, TO_F((u & 15u << at) | (high >> (uint)(e) & 1u) << (at + 4)), m)
#define BLOCK_VALUES F d = HALF(0), m = HALF(1); U high = UNIT(2) | UNIT(3) << 16; NIBBLES(4, MEANING)

#elif WEIGHT_Q8_0
#define BLOCK_LEN 32
#define UNITS 17
#define BLOCK_VALUES \
    F d = HALF(0); \
    for (int j = 0; j < 16; j++) { \
        U u = UNIT(1 + j); \
        VALUE(2 * j, d * TO_S8(u)); \
        VALUE(2 * j + 1, d * TO_S8(u >> 8)); \
    }

#elif WEIGHT_IQ4_NL
#define BLOCK_LEN 32
#define UNITS 9
#define MEANING(u, at, e, ignored) d * LEVEL_OF(u >> at & 15u)
#define BLOCK_VALUES F d = HALF(0); NIBBLES(1, MEANING)

#elif WEIGHT_IQ4_XS
#define BLOCK_LEN 256
#define UNITS 68
#define BLOCK_VALUES \
    F d = HALF(0); \
    U high = UNIT(1); \
    for (int g = 0; g < 8; g++) { \
        F s = d * (TO_F((BYTE(4 + g / 2) >> (uint)(4 * (g & 1)) & 15u) | (high >> (uint)(2 * g) & 3u) << 4) - 32.0f); \
        for (int j = 0; j < 8; j++) { \
            U u = UNIT(4 + 8 * g + j); \
            VALUE(32 * g + 2 * j, s * LEVEL_OF(u & 15u)); \
            VALUE(32 * g + 2 * j + 1, s * LEVEL_OF(u >> 8 & 15u)); \
            VALUE(32 * g + 2 * j + 16, s * LEVEL_OF(u >> 4 & 15u)); \
            VALUE(32 * g + 2 * j + 17, s * LEVEL_OF(u >> 12 & 15u)); \
        } \
    }

#elif WEIGHT_Q2_K
// Groups of 16: scale in the low, minimum in the high nibble of a byte. A run of 32 codes is two bits of 32 bytes.
#define BLOCK_LEN 256
#define UNITS 42
#define BLOCK_VALUES \
    F d = HALF(40), dmin = HALF(41); \
    for (int g = 0; g < 16; g++) { \
        U packed = BYTE(g); \
        F s = d * TO_F(packed & 15u), m = -(dmin * TO_F(packed >> 4)); \
        uint shift = 2 * (g / 2 & 3); \
        for (int j = 0; j < 8; j++) { \
            U u = UNIT(8 + 16 * (g / 8) + 8 * (g & 1) + j) >> shift; \
            VALUE(16 * g + 2 * j, MAD(s, TO_F(u & 3u), m)); \
            VALUE(16 * g + 2 * j + 1, MAD(s, TO_F(u >> 8 & 3u), m)); \
        } \
    }

#elif WEIGHT_Q3_K
// As Q2_K, with a third bit that subtracts 4 where it is not set, and six-bit scales.
#define BLOCK_LEN 256
#define UNITS 55
#define BLOCK_VALUES \
    F d = HALF(54); \
    for (int g = 0; g < 16; g++) { \
        U low = BYTE(96 + (g & 7)) >> (uint)(4 * (g / 8)) & 15u, top = BYTE(104 + (g & 3)) >> (uint)(2 * (g / 4)) & 3u; \
        F s = d * (TO_F(low | top << 4) - 32.0f); \
        uint run = g / 2, shift = 2 * (run & 3); \
        for (int j = 0; j < 8; j++) { \
            U u = UNIT(16 + 16 * (g / 8) + 8 * (g & 1) + j) >> shift, mask = UNIT(8 * (g & 1) + j) >> run; \
            VALUE(16 * g + 2 * j, s * (TO_F((u & 3u) | (mask & 1u) << 2) - 4.0f)); \
            VALUE(16 * g + 2 * j + 1, s * (TO_F((u >> 8 & 3u) | (mask >> 8 & 1u) << 2) - 4.0f)); \
        } \
    }

#elif WEIGHT_Q4_K || WEIGHT_Q5_K
// Groups of 32 with six-bit scales and minima in twelve bytes; two groups share the bytes of their codes. A fifth bit is in a byte
// that all groups share.
#define BLOCK_LEN 256
#if WEIGHT_Q4_K
#define UNITS 72
#define CODES 8
#define CODE(at) (u & 15u << (at))
#define FIFTHS
#else
#define UNITS 88
#define CODES 24
#define CODE(at) ((u & 15u << (at)) | (fifths >> (uint)((at) / 8 * 8 + g + (at) / 4 % 2) & 1u) << ((at) + 4))
#define FIFTHS U fifths = UNIT(8 + j);
#endif
#define SCALE_OF(g) ((g) < 4 ? BYTE(4 + (g)) & 63u : (BYTE(8 + (g)) & 15u) | BYTE((g)) >> 6 << 4)
#define LOW_OF(g) ((g) < 4 ? BYTE(8 + (g)) & 63u : BYTE(8 + (g)) >> 4 | BYTE(4 + (g)) >> 6 << 4)
#define BLOCK_VALUES \
    F d = HALF(0), dmin = HALF(1); \
    for (int g = 0; g < 8; g += 2) { \
        F s = d * TO_F(SCALE_OF(g)), m = -(dmin * TO_F(LOW_OF(g))), s8 = s * 0x1p-8f; \
        F t = d * TO_F(SCALE_OF(g + 1)) * 0x1p-4f, n = -(dmin * TO_F(LOW_OF(g + 1))), t8 = t * 0x1p-8f; \
        for (int j = 0; j < 16; j++) { \
            U u = UNIT(CODES + 8 * g + j); \
            FIFTHS \
            VALUE(32 * g + 2 * j, MAD(s, TO_F(CODE(0)), m)); \
            VALUE(32 * g + 2 * j + 1, MAD(s8, TO_F(CODE(8)), m)); \
            VALUE(32 * g + 2 * j + 32, MAD(t, TO_F(CODE(4)), n)); \
            VALUE(32 * g + 2 * j + 33, MAD(t8, TO_F(CODE(12)), n)); \
        } \
    }

#elif WEIGHT_Q6_K
// Groups of 16 with signed scales. Each half of 128 values has 64 bytes of low nibbles, which two quarters share, and 32 of top bits,
// which all four share.
#define BLOCK_LEN 256
#define UNITS 105
#define SCALE_OF(g) d * TO_S8(BYTE(192 + (g)))
#define CODE(low, at, top_at) TO_F((low >> (at) & 15u) | (top >> (top_at) & 3u) << 4) - 32.0f
#define BLOCK_VALUES \
    F d = HALF(104); \
    for (int i = 0; i < 4; i++) { \
        int g = 8 * (i / 2) + (i & 1), side = 8 * (i & 1); \
        F s0 = SCALE_OF(g), s1 = SCALE_OF(g + 2), s2 = SCALE_OF(g + 4), s3 = SCALE_OF(g + 6); \
        for (int j = 0; j < 8; j++) { \
            U a = UNIT(32 * (i / 2) + side + j), b = UNIT(32 * (i / 2) + 16 + side + j); \
            U top = UNIT(64 + 16 * (i / 2) + side + j); \
            int k = 16 * g + 2 * j; \
            VALUE(k, s0 * (CODE(a, 0, 0))); \
            VALUE(k + 1, s0 * (CODE(a, 8, 8))); \
            VALUE(k + 32, s1 * (CODE(b, 0, 2))); \
            VALUE(k + 33, s1 * (CODE(b, 8, 10))); \
            VALUE(k + 64, s2 * (CODE(a, 4, 4))); \
            VALUE(k + 65, s2 * (CODE(a, 12, 12))); \
            VALUE(k + 96, s3 * (CODE(b, 4, 6))); \
            VALUE(k + 97, s3 * (CODE(b, 12, 14))); \
        } \
    }
#endif

__constant float levels[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                               1.0f, 13.0f, 25.0f, 38.0f, 53.0f, 69.0f, 89.0f, 113.0f};
float level_of(uint code) { return levels[code]; }
