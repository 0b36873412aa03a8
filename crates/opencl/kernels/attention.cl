// Attention and latent attention over the paged cache.
//
// A block of a split cache is [heads, block_size, KEY_DIM] keys, then [heads, block_size, VALUE_DIM] values; of a joined one (latent
// attention) [block_size, KEY_DIM], of which the first VALUE_DIM are the values. CACHE is the type of its elements.

#if CACHE == TYPE_F16
typedef half element;
#define LOAD_CACHE(from) VLOAD_HALF(0, (from))
#define LOAD_CACHE_ONE(from) vload_half(0, (from))
#elif CACHE == TYPE_BF16
typedef ushort element;
#define LOAD_CACHE(from) AS_FLOATV(CONVERT_UINTV(VLOAD(0, (from))) << 16)
#define LOAD_CACHE_ONE(from) bf16_bits(*(from))
#else
typedef float element;
#define LOAD_CACHE(from) VLOAD(0, (from))
#define LOAD_CACHE_ONE(from) (*(from))
#endif

#define TILE 64
#define KEY_VECTORS (KEY_DIM / V)
#define VALUE_VECTORS ((VALUE_DIM + V - 1) / V)
#define OWN_VECTORS ((VALUE_VECTORS + LANES - 1) / LANES)

// The sequence of a query row: the last one that begins at or before it.
int sequence_of(__global const int *query_start, int sequences, int row) {
    int low = 0, high = sequences;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (query_start[middle] <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

float score(__global const float *q, __global const element *key) {
    floatv sum = 0.0f;
    for (int i = 0; i < KEY_VECTORS; i++) {
        sum = MAD(VLOAD(i, q), LOAD_CACHE(key + i * V), sum);
    }
    float rest = 0.0f;
    for (int i = KEY_VECTORS * V; i < KEY_DIM; i++) {
        rest = MAD(q[i], LOAD_CACHE_ONE(key + i), rest);
    }
    return sum_of(sum) + rest;
}

floatv load_value(__global const element *from, int n) {
    if (n >= V) {
        return LOAD_CACHE(from);
    }
    float part[V];
    for (int i = 0; i < V; i++) {
        part[i] = i < n ? LOAD_CACHE_ONE(from + i) : 0.0f;
    }
    return VLOAD(0, part);
}

// A group of LANES work-items a query row and head: tiles of positions in their order, with the running maximum and sum. Lanes share a
// tile's scores and take vectors of the result each, so that the order of sums does not depend on their number.
__attribute__((reqd_work_group_size(LANES, 1, 1)))
__kernel void attention(IN(q), IN(cache), IN(query_start), IN(context_len), IN(block_table), OUT(out), int q_stride, int out_stride,
                        int sequences, int table_stride, int table_cols, int queries_per_head, int block_size, int blocks,
                        int block_stride, int joined, int kv_heads, int window, float scale, FAULTS) {
    SHARED float weights[TILE];
    SHARED int block_of[TILE];
    SHARED int place_of[TILE];
    F32_IN(q); I32_IN(query_start); I32_IN(context_len); I32_IN(block_table); F32_OUT(out);
    __global const element *cache = (__global const element *)(cache_buffer + cache_at);
    int head = get_group_id(0), row = get_group_id(1), lane = get_local_id(0), kv_head = head / queries_per_head;
    q += (size_t)row * q_stride + (size_t)head * KEY_DIM;
    out += (size_t)row * out_stride + (size_t)head * VALUE_DIM;

    int s = sequence_of(query_start, sequences, row), next = query_start[s + 1];
    int position = row < query_start[s] || row >= next ? -1 : context_len[s] - (next - row);
    if (position >= table_cols * block_size) {
        tell(faults, 2, row, position);
        position = -1;
    }
    block_table += (size_t)s * table_stride;
    int first = window > 0 ? max(0, position - window + 1) : 0;
    int key_pitch = KEY_DIM, value_pitch = VALUE_DIM;
    __global const element *keys = cache + (size_t)kv_head * block_size * KEY_DIM;
    __global const element *values = cache + (size_t)block_size * ((size_t)kv_heads * KEY_DIM + (size_t)kv_head * VALUE_DIM);
    if (joined) {
        keys = values = cache;
        value_pitch = KEY_DIM;
    }

    floatv own[OWN_VECTORS];
    for (int j = 0; j < OWN_VECTORS; j++) {
        own[j] = 0.0f;
    }
    float largest = -INFINITY, sum = 0.0f;
    for (int start = first; start <= position; start += TILE) {
        // Whole vectors; behind the last position a weight of nothing.
        int n = min(TILE, position + 1 - start), whole = (n + V - 1) / V * V;
        for (int i = n + lane; i < whole; i += LANES) {
            weights[i] = -INFINITY;
        }
        for (int i = lane; i < n; i += LANES) {
            int column = (start + i) / block_size, place = start + i - column * block_size, block = block_table[column];
            if (block < 0 || block >= blocks) {
                tell(faults, 2, row, block);
                block = 0;
            }
            block_of[i] = block;
            place_of[i] = place;
            weights[i] = scale * score(q, keys + (size_t)block * block_stride + (size_t)place * key_pitch);
        }
        MEET;
        float before = largest;
        floatv most = -INFINITY;
        for (int i = 0; i < whole; i += V) {
            most = fmax(most, VLOAD(0, weights + i));
        }
        largest = fmax(before, max_of(most));
        MEET;
        for (int i = lane * V; i < whole; i += LANES * V) {
            VSTORE(exp(VLOAD(0, weights + i) - largest), 0, weights + i);
        }
        MEET;
        float shrink = exp(before - largest);
        floatv part = 0.0f;
        for (int i = 0; i < whole; i += V) {
            part += VLOAD(0, weights + i);
        }
        sum = sum * shrink + sum_of(part);
        for (int j = 0; j < OWN_VECTORS; j++) {
            own[j] *= shrink;
        }
        for (int i = 0; i < n; i++) {
            __global const element *value = values + (size_t)block_of[i] * block_stride + (size_t)place_of[i] * value_pitch;
            float weight = weights[i];
            for (int j = 0; j < OWN_VECTORS; j++) {
                int c = (j * LANES + lane) * V;
                if (c < VALUE_DIM) {
                    own[j] = MAD((floatv)(weight), load_value(value + c, VALUE_DIM - c), own[j]);
                }
            }
        }
        MEET;
    }
    float factor = position < 0 ? 0.0f : 1.0f / sum;
    for (int j = 0; j < OWN_VECTORS; j++) {
        int c = (j * LANES + lane) * V;
        if (c < VALUE_DIM) {
            store_up_to(own[j] * factor, out + c, VALUE_DIM - c);
        }
    }
}

#ifdef NOPE_DIM
// Latent attention: the key up-projection goes into the query, then `attention` runs over the joined cache, then the value
// up-projection is applied to its result. kv_b: per head NOPE_DIM key rows, then OUT_DIM value rows of LATENT_DIM.
#define HEAD_ROWS (NOPE_DIM + OUT_DIM)

// One work-item V latents of a head of a row; behind the latents the rotary part is copied.
__attribute__((reqd_work_group_size(8, 1, 1)))
__kernel void absorb(IN(q), IN(kv_b), OUT(out), int q_stride, int type) {
    F32_IN(q); BYTES_IN(kv_b); F32_OUT(out);
    int c = get_global_id(0) * V, head = get_global_id(1), heads = get_global_size(1);
    size_t row = get_global_id(2);
    q += row * q_stride + (size_t)head * (NOPE_DIM + ROPE_DIM);
    out += (row * heads + head) * KEY_DIM;
    if (c < LATENT_DIM) {
        int n = min(V, LATENT_DIM - c);
        floatv sum = 0.0f;
        for (int i = 0; i < NOPE_DIM; i++) {
            size_t at = ((size_t)head * HEAD_ROWS + i) * LATENT_DIM + c;
            sum = MAD((floatv)(q[i]), values_at(kv_b, type, at, n), sum);
        }
        store_up_to(sum, out + c, n);
    }
    if (c == 0) {
        for (int i = 0; i < ROPE_DIM; i++) {
            out[LATENT_DIM + i] = q[NOPE_DIM + i];
        }
    }
}

// One work-item a value of a head of a row.
__attribute__((reqd_work_group_size(8, 1, 1)))
__kernel void expand(IN(latents), IN(kv_b), OUT(out), int out_stride, int type) {
    F32_IN(latents); BYTES_IN(kv_b); F32_OUT(out);
    int c = get_global_id(0), head = get_global_id(1), heads = get_global_size(1);
    size_t row = get_global_id(2);
    if (c >= OUT_DIM) {
        return;
    }
    latents += (row * heads + head) * LATENT_DIM;
    size_t at = ((size_t)head * HEAD_ROWS + NOPE_DIM + c) * LATENT_DIM;
    floatv sum = 0.0f;
    for (int i = 0; i < LATENT_DIM; i += V) {
        int n = min(V, LATENT_DIM - i);
        sum = MAD(load_up_to(latents + i, n), values_at(kv_b, type, at + i, n), sum);
    }
    out[row * out_stride + (size_t)head * OUT_DIM + c] = sum_of(sum);
}
#endif
