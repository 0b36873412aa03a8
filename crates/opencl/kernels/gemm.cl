// Products with packed weights, for tiles of ROWS rows of x. Included once for each ROWS; all give the same bits.
//
// A work-group makes V outputs of ROWS rows. Its SPLIT work-items take a chunk of the inner dimension each, in rounds; the sums of
// chunks are added in their order.

#define NAME(name) JOIN(name, ROWS)

#define VALUE(k, w) \
    { \
        floatv w_ = (w) SCALED_BY; \
        _Pragma("unroll") \
        for (int r = 0; r < ROWS; r++) { \
            sum[(k) & 1][r] = MAD(w_, (floatv)(x[at[r] + k0 + (k)]), sum[(k) & 1][r]); \
        } \
    }

#if SCALED
// Factors of outputs n0 on, in the column of input k0.
floatv NAME(factors)(__global const float *scales, int n0, int N, int k0, int K, int scale_rows, int scale_cols) {
    float part[V];
    int across = (K + scale_cols - 1) / scale_cols;
    for (int v = 0; v < V; v++) {
        part[v] = scales[(size_t)(min(n0 + v, N - 1) / scale_rows) * across + k0 / scale_cols];
    }
    return VLOAD(0, part);
}
#define SCALED_BY * factor
#else
#define SCALED_BY
#endif

void NAME(product)(__global const unit *w, __global const float *x, const size_t *at, int K, __global const float *scales, int n0,
                   int N, int scale_rows, int scale_cols, floatv *total
#if SPLIT > 1
                   , __local floatv *parts
#endif
) {
    int blocks = K / BLOCK_LEN, chunks = (blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS;
    for (int r = 0; r < ROWS; r++) {
        total[r] = 0.0f;
    }
    for (int first = 0; first < chunks; first += SPLIT) {
        // Two, so that an addition need not wait for the one before.
        floatv sum[2][ROWS];
        for (int r = 0; r < ROWS; r++) {
            sum[0][r] = sum[1][r] = 0.0f;
        }
        int begin = (first + (int)get_local_id(0)) * CHUNK_BLOCKS, end = min(begin + CHUNK_BLOCKS, blocks);
#if SCALED
        floatv factor = 0.0f;
#endif
        for (int i = begin; i < end; i++) {
            __global const unit *block = w + (size_t)i * (UNITS * PANEL);
            int k0 = i * BLOCK_LEN;
#if SCALED
            if (i == begin || k0 % scale_cols == 0) {
                factor = NAME(factors)(scales, n0, N, k0, K, scale_rows, scale_cols);
            }
#endif
            BLOCK_VALUES
        }
#if SPLIT == 1
        for (int r = 0; r < ROWS; r++) {
            total[r] += sum[0][r] + sum[1][r];
        }
#else
        for (int r = 0; r < ROWS; r++) {
            parts[get_local_id(0) * ROWS + r] = sum[0][r] + sum[1][r];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int part = 0; part < SPLIT && first + part < chunks; part++) {
            for (int r = 0; r < ROWS; r++) {
                total[r] += parts[part * ROWS + r];
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
#endif
    }
}

#if SPLIT > 1
#define PARTS __local floatv parts[SPLIT * ROWS];
#define WITH_PARTS , parts
#else
#define PARTS
#define WITH_PARTS
#endif

// y plus bias; then plus the addend, or act(what is there) times it.
void NAME(finish)(floatv y, __global const float *bias, int has_bias, __global const float *addend, __global float *out, int n0, int N,
                  int end, int function) {
    int n = min(V, N - n0);
    if (has_bias) {
        y += load_up_to(bias + n0, n);
    }
    if (end == END_ADD) {
        y += load_up_to(addend + n0, n);
    } else if (end == END_GLU) {
        y = activate(load_up_to(out + n0, n), function) * y;
    }
    store_up_to(y, out + n0, n);
}

__attribute__((reqd_work_group_size(SPLIT, 1, 1)))
__kernel void NAME(gemm)(IN(x), IN(w), IN(scales), IN(bias), IN(addend), OUT(out), int T, int K, int N, int x_stride, int out_stride,
                         int addend_stride, int has_bias, int end, int function, int scale_rows, int scale_cols) {
    PARTS
    F32_IN(x); F32_IN(scales); F32_IN(bias); F32_IN(addend); F32_OUT(out);
    int n0 = get_group_id(0) * V, t0 = get_group_id(1) * ROWS;
    __global const unit *w = (__global const unit *)(w_buffer + w_at)
        + (size_t)(n0 / PANEL) * (K / BLOCK_LEN) * (UNITS * PANEL) + n0 % PANEL;
    size_t at[ROWS];
    floatv total[ROWS];
    for (int r = 0; r < ROWS; r++) {
        at[r] = (size_t)min(t0 + r, T - 1) * x_stride;
    }
    NAME(product)(w, x, at, K, scales, n0, N, scale_rows, scale_cols, total WITH_PARTS);
    if (get_local_id(0) == 0) {
        for (int r = 0; r < ROWS; r++) {
            if (t0 + r < T) {
                size_t t = t0 + r;
                NAME(finish)(total[r], bias, has_bias, addend + t * addend_stride, out + t * out_stride, n0, N, end, function);
            }
        }
    }
}

// T rows sorted by expert. A tile belongs to one expert; which one is found by counting tiles along the offsets.
__attribute__((reqd_work_group_size(SPLIT, 1, 1)))
__kernel void NAME(grouped)(IN(x), IN(w), IN(scales), IN(bias), IN(offsets), IN(rows), OUT(out), int T, int K, int N, int x_stride,
                            int out_stride, int has_bias, int end, int function, int scale_rows, int scale_cols, int experts,
                            int has_rows, int x_rows, FAULTS) {
    PARTS
    F32_IN(x); F32_IN(scales); F32_IN(bias); I32_IN(offsets); I32_IN(rows); F32_OUT(out);
    int n0 = get_group_id(0) * V, tile = get_group_id(1), expert = 0, t0 = 0, stop = 0, last = 0;
    if (tile == 0 && n0 == 0 && get_local_id(0) == 0 && (offsets[0] != 0 || offsets[experts] != T)) {
        tell(faults, 4, experts, offsets[experts]);
    }
    for (; expert < experts; expert++) {
        t0 = clamp(offsets[expert], last, T);
        stop = clamp(offsets[expert + 1], t0, T);
        last = stop;
        int tiles = (stop - t0 + ROWS - 1) / ROWS;
        if (tile < tiles) {
            break;
        }
        tile -= tiles;
    }
    if (expert == experts) {
        return;
    }
    t0 += tile * ROWS;
    int panels = (N + PANEL - 1) / PANEL;
    __global const unit *w = (__global const unit *)(w_buffer + w_at)
        + ((size_t)expert * panels + n0 / PANEL) * (K / BLOCK_LEN) * (UNITS * PANEL) + n0 % PANEL;
    size_t at[ROWS];
    floatv total[ROWS];
    for (int r = 0; r < ROWS; r++) {
        int t = min(t0 + r, stop - 1), source = has_rows ? rows[t] : t;
        if (source < 0 || source >= x_rows) {
            tell(faults, 3, t, source);
            source = 0;
        }
        at[r] = (size_t)source * x_stride;
    }
    size_t scale_count = SCALED ? (size_t)((N + scale_rows - 1) / scale_rows) * ((K + scale_cols - 1) / scale_cols) : 0;
    NAME(product)(w, x, at, K, scales + expert * scale_count, n0, N, scale_rows, scale_cols, total WITH_PARTS);
    if (get_local_id(0) == 0) {
        for (int r = 0; r < ROWS; r++) {
            if (t0 + r < stop) {
                size_t t = t0 + r;
                NAME(finish)(total[r], bias + (size_t)expert * N, has_bias, bias, out + t * out_stride, n0, N, end, function);
            }
        }
    }
}

#undef NAME
#undef VALUE
#undef SCALED_BY
#undef PARTS
#undef WITH_PARTS
