// Rows of a table as in the file, by index. The words of weights.cl for single values at any address.
#undef F
#undef U
#undef TO_F
#undef TO_S8
#undef BITS_FLOAT
#undef BITS_HALF
#undef BITS_E4M3
#undef LEVEL_OF
#undef UNIT
#define F float
#define U uint
#define TO_F(u) convert_float(u)
#define TO_S8(u) convert_float(as_int((u) << 24) >> 24)
#define BITS_FLOAT(u) as_float(u)
#define BITS_HALF(u) half_bits(u)
#define BITS_E4M3(u) e4m3_bits(u)
#define LEVEL_OF(u) level_of(u)
#define UNIT(j) unit_at(block, (j))
#define VALUE(k, w) to[k] = (w);

uint unit_at(__global const uchar *block, int j) {
    uint value = 0;
    for (int byte = 0; byte < UNIT_BYTES; byte++) {
        value |= (uint)block[j * UNIT_BYTES + byte] << 8 * byte;
    }
    return value;
}

// One work-item a block of a row; an id outside of the table gives zeros.
__attribute__((reqd_work_group_size(8, 1, 1)))
__kernel void embed(IN(ids), IN(table), OUT(out), int blocks, int rows, int out_stride) {
    I32_IN(ids); BYTES_IN(table); F32_OUT(out);
    int i = get_global_id(0), t = get_global_id(1), id = ids[t];
    if (i >= blocks) {
        return;
    }
    __global float *to = out + (size_t)t * out_stride + (size_t)i * BLOCK_LEN;
    if (id < 0 || id >= rows) {
        for (int k = 0; k < BLOCK_LEN; k++) {
            to[k] = 0.0f;
        }
        return;
    }
    __global const uchar *block = table + ((size_t)id * blocks + i) * (UNITS * UNIT_BYTES);
    BLOCK_VALUES
}
