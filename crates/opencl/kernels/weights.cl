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

// 32 values, four-bit codes: low nibbles are values 0 to 15, high ones 16 to 31.
#define NIBBLES(first, MEANS) \
    for (int j = 0; j < 8; j++) { \
        U u = UNIT((first) + j); \
        VALUE(2 * j, MEANS(u & 15u, 2 * j)); \
        VALUE(2 * j + 1, MEANS(u >> 8 & 15u, 2 * j + 1)); \
        VALUE(2 * j + 16, MEANS(u >> 4 & 15u, 2 * j + 16)); \
        VALUE(2 * j + 17, MEANS(u >> 12 & 15u, 2 * j + 17)); \
    }

#if WEIGHT_Q4_0
#define BLOCK_LEN 32
#define UNITS 9
#define MEANING(c, e) d * (TO_F(c) - 8.0f)
#define BLOCK_VALUES F d = HALF(0); NIBBLES(1, MEANING)

#elif WEIGHT_Q4_1
#define BLOCK_LEN 32
#define UNITS 10
#define MEANING(c, e) MAD(d, TO_F(c), m)
#define BLOCK_VALUES F d = HALF(0), m = HALF(1); NIBBLES(2, MEANING)

#elif WEIGHT_Q5_0
#define BLOCK_LEN 32
#define UNITS 11
#define MEANING(c, e) d * (TO_F((c) | (high >> (uint)(e) & 1u) << 4) - 16.0f)
#define BLOCK_VALUES F d = HALF(0); U high = UNIT(1) | UNIT(2) << 16; NIBBLES(3, MEANING)

#elif WEIGHT_Q5_1
#define BLOCK_LEN 32
#define UNITS 12
#define MEANING(c, e) MAD(d, TO_F((c) | (high >> (uint)(e) & 1u) << 4), m)
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
#define MEANING(c, e) d * LEVEL_OF(c)
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
// Groups of 32 with six-bit scales and minima in twelve bytes.
#define BLOCK_LEN 256
#if WEIGHT_Q4_K
#define UNITS 72
#define CODES 8
#define FIFTH(j, at) 0u
#else
#define UNITS 88
#define CODES 24
#define FIFTH(j, at) (UNIT(8 + (j)) >> (uint)(8 * (at) + g) & 1u) << 4
#endif
#define BLOCK_VALUES \
    F d = HALF(0), dmin = HALF(1); \
    for (int g = 0; g < 8; g++) { \
        int q = g & 3; \
        U a = BYTE(4 + q), b = BYTE(8 + q), c = BYTE(12 + q); \
        U scale = g < 4 ? a & 63u : (c & 15u) | a >> 6 << 4, low = g < 4 ? b & 63u : c >> 4 | b >> 6 << 4; \
        F s = d * TO_F(scale), m = -(dmin * TO_F(low)); \
        uint shift = 4 * (g & 1); \
        for (int j = 0; j < 16; j++) { \
            U u = UNIT(CODES + 16 * (g / 2) + j) >> shift; \
            VALUE(32 * g + 2 * j, MAD(s, TO_F((u & 15u) | FIFTH(j, 0)), m)); \
            VALUE(32 * g + 2 * j + 1, MAD(s, TO_F((u >> 8 & 15u) | FIFTH(j, 1)), m)); \
        } \
    }

#elif WEIGHT_Q6_K
// Groups of 16 with signed scales; halves of 128 values have 64 bytes of low nibbles and 32 of top bits.
#define BLOCK_LEN 256
#define UNITS 105
#define BLOCK_VALUES \
    F d = HALF(104); \
    for (int g = 0; g < 16; g++) { \
        int half_ = g / 8, quarter = g / 2 & 3, side = 8 * (g & 1); \
        F s = d * TO_S8(BYTE(192 + g)); \
        uint shift = 4 * (quarter / 2), shift_top = 2 * quarter; \
        for (int j = 0; j < 8; j++) { \
            U u = UNIT(32 * half_ + 16 * (quarter & 1) + side + j) >> shift; \
            U top = UNIT(64 + 16 * half_ + side + j) >> shift_top; \
            VALUE(16 * g + 2 * j, s * (TO_F((u & 15u) | (top & 3u) << 4) - 32.0f)); \
            VALUE(16 * g + 2 * j + 1, s * (TO_F((u >> 8 & 15u) | (top >> 8 & 3u) << 4) - 32.0f)); \
        } \
    }
#endif

__constant float levels[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                               1.0f, 13.0f, 25.0f, 38.0f, 53.0f, 69.0f, 89.0f, 113.0f};
float level_of(uint code) { return levels[code]; }
