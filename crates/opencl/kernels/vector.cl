// Words of weights.cl for V outputs at a time.
#define F floatv
#define U uintv
#define TO_F(u) CONVERT_FLOATV(u)
#define TO_S8(u) CONVERT_FLOATV(AS_INTV((u) << 24) >> 24)
#define BITS_FLOAT(u) AS_FLOATV(u)
#define BITS_HALF(u) half_bits_each(u)
#define BITS_E4M3(u) e4m3_bits_each(u)
#define LEVEL_OF(u) level_of_each(u)

floatv half_bits_each(uintv h) {
    uintv magnitude = h & 0x7fffu, shifted = (magnitude << 13) + (112u << 23);
    floatv value = AS_FLOATV(shifted);
    value = select(value, AS_FLOATV(shifted + (1u << 23)) - as_float(113u << 23), magnitude < 0x400u);
    value = select(value, AS_FLOATV(shifted + (112u << 23)), magnitude >= 0x7c00u);
    return AS_FLOATV(AS_UINTV(value) | (h & 0x8000u) << 16);
}

floatv e4m3_bits_each(uintv b) {
    uintv magnitude = b & 0x7fu;
    floatv value = AS_FLOATV((magnitude << 20) + (120u << 23));
    value = select(value, CONVERT_FLOATV(magnitude) * (1.0f / 512.0f), magnitude < 8u);
    value = select(value, (floatv)(as_float(0x7fc00000u)), magnitude == 0x7fu);
    return AS_FLOATV(AS_UINTV(value) | (b & 0x80u) << 24);
}

// By halves, as a table would be read value by value.
#define PICK(bit, no, yes) select((floatv)(no), (floatv)(yes), (u & bit) != 0u)
floatv level_of_each(uintv u) {
    floatv a = PICK(2u, PICK(1u, levels[0], levels[1]), PICK(1u, levels[2], levels[3]));
    floatv b = PICK(2u, PICK(1u, levels[4], levels[5]), PICK(1u, levels[6], levels[7]));
    floatv c = PICK(2u, PICK(1u, levels[8], levels[9]), PICK(1u, levels[10], levels[11]));
    floatv d = PICK(2u, PICK(1u, levels[12], levels[13]), PICK(1u, levels[14], levels[15]));
    return PICK(8u, PICK(4u, a, b), PICK(4u, c, d));
}

// Packed weights: rows in panels of PANEL, and unit j of block i of a panel's rows side by side, so that a vector of outputs is one
// load: [panel][block][unit][row of the panel]. Rows behind the last are 0.
#define PANEL 16
#if UNIT_BYTES == 1
typedef uchar unit;
#elif UNIT_BYTES == 2
typedef ushort unit;
#else
typedef uint unit;
#endif

// One work-item a unit of a block, for the rows of a panel. src: [experts, rows, blocks, units] as in the file, at any address.
__attribute__((reqd_work_group_size(64, 1, 1)))
__kernel void pack(IN(src), OUT(dst), int rows, int row_units) {
    BYTES_IN(src);
    int at = get_global_id(0), panel = get_global_id(1), expert = get_global_id(2), panels = get_global_size(1);
    if (at >= row_units) {
        return;
    }
    __global unit *to = (__global unit *)(dst_buffer + dst_at) + (((size_t)expert * panels + panel) * row_units + at) * PANEL;
    for (int i = 0; i < PANEL; i++) {
        int row = panel * PANEL + i;
        unit value = 0;
        if (row < rows) {
            __global const uchar *from = src + (((size_t)expert * rows + row) * row_units + at) * UNIT_BYTES;
            for (int byte = 0; byte < UNIT_BYTES; byte++) {
                value |= (unit)((uint)from[byte] << 8 * byte);
            }
        }
        to[i] = value;
    }
}

// Values of the inner dimension that are summed by themselves before they join the total: the order of a sum depends on nothing but K.
#define CHUNK 256
#define CHUNK_BLOCKS (CHUNK / BLOCK_LEN)
#define UNIT(j) CONVERT_UINTV(VLOAD(0, block + (j) * PANEL))

#define END_ADD 1
#define END_GLU 2
