// Ops whose row of the result depends on its row of the inputs only. Matrices are [rows, cols] with a stride in elements.

// Faults of an event become those of a stream that waits for it.
__attribute__((reqd_work_group_size(1, 1, 1)))
__kernel void inherit(__global const int *from, FAULTS) {
    if (from[0] != 0) {
        tell(faults, from[0], from[1], from[2]);
    }
}

__attribute__((reqd_work_group_size(16, 1, 1)))
__kernel void gather_rows(IN(x), IN(rows), OUT(out), int cols, int x_rows, int x_stride, int out_stride) {
    F32_IN(x); I32_IN(rows); F32_OUT(out);
    int c = get_global_id(0) * V, t = get_global_id(1), row = rows[t];
    if (c < cols) {
        floatv value = row < 0 || row >= x_rows ? (floatv)(0.0f) : load_up_to(x + (size_t)row * x_stride + c, cols - c);
        store_up_to(value, out + (size_t)t * out_stride + c, cols - c);
    }
}

// A group of LANES work-items a row and group of `axis` columns. Lanes sum vectors in turn; their sums are added in their order.
#if LANES > 1
#define ROW_SHARED __local float shares[LANES];
#else
#define ROW_SHARED
#endif
#if LANES > 1
float sum_of_lanes(float x, __local float *shares) {
    shares[get_local_id(0)] = x;
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) {
        sum += shares[i];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return sum;
}
float max_of_lanes(float x, __local float *shares) {
    shares[get_local_id(0)] = x;
    barrier(CLK_LOCAL_MEM_FENCE);
    float largest = shares[0];
    for (int i = 1; i < LANES; i++) {
        largest = fmax(largest, shares[i]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return largest;
}
#define SUM_OF_LANES(x) sum_of_lanes((x), shares)
#define MAX_OF_LANES(x) max_of_lanes((x), shares)
#else
#define SUM_OF_LANES(x) (x)
#define MAX_OF_LANES(x) (x)
#endif

__attribute__((reqd_work_group_size(LANES, 1, 1)))
__kernel void norm(IN(x), IN(w), OUT(out), int axis, int x_stride, int out_stride, int type, float eps) {
    ROW_SHARED
    F32_IN(x); BYTES_IN(w); F32_OUT(out);
    size_t group = get_group_id(0), row = get_group_id(1);
    x += row * x_stride + group * axis;
    out += row * out_stride + group * axis;
    floatv squares = 0.0f;
    for (int c = get_local_id(0) * V; c < axis; c += LANES * V) {
        floatv value = load_up_to(x + c, axis - c);
        squares = MAD(value, value, squares);
    }
    float factor = 1.0f / sqrt(SUM_OF_LANES(sum_of(squares)) / axis + eps);
    for (int c = get_local_id(0) * V; c < axis; c += LANES * V) {
        int n = min(V, axis - c);
        store_up_to(load_up_to(x + c, n) * factor * values_at(w, type, c, n), out + c, n);
    }
}

__attribute__((reqd_work_group_size(LANES, 1, 1)))
__kernel void softmax(IN(x), OUT(out), int cols, int x_stride, int out_stride) {
    ROW_SHARED
    F32_IN(x); F32_OUT(out);
    size_t row = get_group_id(1);
    x += row * x_stride;
    out += row * out_stride;
    float largest = -INFINITY;
    for (int c = get_local_id(0); c < cols; c += LANES) {
        largest = fmax(largest, x[c]);
    }
    largest = MAX_OF_LANES(largest);
    floatv sums = 0.0f;
    for (int c = get_local_id(0) * V; c < cols; c += LANES * V) {
        int n = min(V, cols - c);
        float part[V];
        VSTORE(exp(load_up_to(x + c, n) - largest), 0, part);
        for (int i = n; i < V; i++) {
            part[i] = 0.0f;
        }
        floatv value = VLOAD(0, part);
        sums += value;
        store_up_to(value, out + c, n);
    }
    float sum = SUM_OF_LANES(sum_of(sums));
    for (int c = get_local_id(0) * V; c < cols; c += LANES * V) {
        store_up_to(load_up_to(out + c, cols - c) / sum, out + c, cols - c);
    }
}

// One work-item V pairs of every head of a row, or so many elements that are not rotated: angles are the same for all heads. Elements
// of a pair are written by the work-item that read both.
__attribute__((reqd_work_group_size(4, 1, 1)))
__kernel void rope(IN(x), IN(positions), IN(inv_freq), OUT(out), int heads, int head_dim, int x_stride, int out_stride, int offset,
                   int pairs, int interleaved, float factor) {
    F32_IN(x); I32_IN(positions); F32_IN(inv_freq); F32_OUT(out);
    int i = get_global_id(0) * V, t = get_global_id(1), groups = (pairs + V - 1) / V * V;
    x += (size_t)t * x_stride;
    out += (size_t)t * out_stride;
    if (i < groups) {
        int n = min(V, pairs - i);
        floatv angle = (float)positions[t] * load_up_to(inv_freq + i, n);
        float cosine[V], sine[V];
        VSTORE(cos(angle) * factor, 0, cosine);
        VSTORE(sin(angle) * factor, 0, sine);
        int first = offset + (interleaved ? 2 * i : i), apart = interleaved ? 1 : pairs, step = interleaved ? 2 : 1;
        for (int head = 0; head < heads; head++) {
            for (int j = 0; j < n; j++) {
                int at = head * head_dim + first + j * step;
                float a = x[at], b = x[at + apart];
                out[at] = a * cosine[j] - b * sine[j];
                out[at + apart] = b * cosine[j] + a * sine[j];
            }
        }
    } else {
        for (int rest = i - groups; rest < min(i - groups + V, head_dim - 2 * pairs); rest++) {
            int at = rest < offset ? rest : rest + 2 * pairs;
            for (int head = 0; head < heads; head++) {
                out[head * head_dim + at] = x[head * head_dim + at];
            }
        }
    }
}

__attribute__((reqd_work_group_size(16, 1, 1)))
__kernel void glu(IN(a), IN(b), OUT(out), int cols, int a_stride, int b_stride, int out_stride, int function) {
    F32_IN(a); F32_IN(b); F32_OUT(out);
    int c = get_global_id(0) * V, n = cols - c;
    size_t t = get_global_id(1);
    if (n > 0) {
        floatv value = activate(load_up_to(a + t * a_stride + c, n), function) * load_up_to(b + t * b_stride + c, n);
        store_up_to(value, out + t * out_stride + c, n);
    }
}

__attribute__((reqd_work_group_size(16, 1, 1)))
__kernel void unary(IN(x), OUT(out), int cols, int x_stride, int out_stride, int function) {
    F32_IN(x); F32_OUT(out);
    int c = get_global_id(0) * V, n = cols - c;
    size_t t = get_global_id(1);
    if (n > 0) {
        store_up_to(activate(load_up_to(x + t * x_stride + c, n), function), out + t * out_stride + c, n);
    }
}

__attribute__((reqd_work_group_size(16, 1, 1)))
__kernel void binary(IN(a), IN(b), OUT(out), int cols, int a_stride, int b_stride, int out_stride, int multiply, int broadcast) {
    F32_IN(a); F32_IN(b); F32_OUT(out);
    int c = get_global_id(0) * V, n = cols - c;
    size_t t = get_global_id(1);
    if (n > 0) {
        floatv x = load_up_to(a + t * a_stride + c, n);
        floatv y = broadcast ? (floatv)(b[t * b_stride]) : load_up_to(b + t * b_stride + c, n);
        store_up_to(multiply ? x * y : x + y, out + t * out_stride + c, n);
    }
}

__attribute__((reqd_work_group_size(64, 1, 1)))
__kernel void cast(IN(x), OUT(out), int cols, int x_stride, int out_stride, int from, int to) {
    BYTES_IN(x); BYTES_OUT(out);
    int c = get_global_id(0);
    size_t t = get_global_id(1);
    if (c < cols) {
        store_as(out, to, t * out_stride + c, value_at(x, from, t * x_stride + c));
    }
}

// Elements of `bytes` bytes.
__attribute__((reqd_work_group_size(64, 1, 1)))
__kernel void copy(IN(x), OUT(out), int cols, int x_stride, int out_stride, int bytes) {
    BYTES_IN(x); BYTES_OUT(out);
    int c = get_global_id(0);
    size_t t = get_global_id(1);
    if (c < cols) {
        for (int byte = 0; byte < bytes; byte++) {
            out[(t * out_stride + c) * bytes + byte] = x[(t * x_stride + c) * bytes + byte];
        }
    }
}

// One work-item V elements of a token's key or value of a head, the keys first. The cache's layout is in attention.cl; `type` is that of
// its elements.
__attribute__((reqd_work_group_size(8, 1, 1)))
__kernel void kv_append(IN(k), IN(v), IN(slots), OUT(cache), int heads, int key_dim, int value_dim, int block_size, int k_stride,
                        int v_stride, int joined, int blocks, int block_stride, int type, FAULTS) {
    F32_IN(k); F32_IN(v); I32_IN(slots); BYTES_OUT(cache);
    int key_vectors = (key_dim + V - 1) / V, vectors = key_vectors + (value_dim + V - 1) / V;
    int head = get_global_id(0) / vectors, at = get_global_id(0) % vectors, t = get_global_id(1), slot = slots[t];
    if (head >= heads || slot < 0) {
        return;
    }
    int block = slot / block_size, place = slot % block_size;
    if (block >= blocks) {
        tell(faults, 1, t, slot);
        return;
    }
    size_t to = (size_t)block * block_stride;
    if (at < key_vectors) {
        int c = at * V, n = key_dim - c;
        to += joined ? (size_t)place * (key_dim + value_dim) : ((size_t)head * block_size + place) * key_dim;
        store_values(cache, type, to + c, load_up_to(k + (size_t)t * k_stride + (size_t)head * key_dim + c, n), n);
    } else {
        int c = (at - key_vectors) * V, n = value_dim - c;
        to += joined ? (size_t)place * (key_dim + value_dim) + key_dim
            : (size_t)block_size * ((size_t)heads * key_dim + (size_t)head * value_dim) + (size_t)place * value_dim;
        store_values(cache, type, to + c, load_up_to(v + (size_t)t * v_stride + (size_t)head * value_dim + c, n), n);
    }
}
