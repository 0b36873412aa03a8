// Expert layers: route, dispatch, combine.

#define MAX_EXPERTS 1024

bool is_damaged(float x) { return isnan(x) || x == INFINITY; }

// The best of n values that is not taken, ties to the lower index.
int best(const __local float *values, const __local uchar *taken, int n) {
    int found = -1;
    for (int i = 0; i < n; i++) {
        if (!taken[i] && (found < 0 || values[i] > values[found])) {
            found = i;
        }
    }
    return max(found, 0);
}

// A group of LANES work-items a token: they make the scores, the first one chooses. A logit or biased score that is NaN or +inf
// makes the token's weights NaN; ids stay valid.
__attribute__((reqd_work_group_size(LANES, 1, 1)))
__kernel void route(IN(logits), IN(bias), OUT(ids), OUT(weights), int experts, int top_k, int groups, int top_groups, int top2_sum,
                    int sigmoid, int renormalise, int has_bias, int logits_stride, int ids_stride, int weights_stride, float scale) {
    __local float scores[MAX_EXPERTS];
    __local float choice[MAX_EXPERTS];
    __local float group_scores[MAX_EXPERTS];
    __local uchar taken[MAX_EXPERTS];
    __local uchar group_taken[MAX_EXPERTS];
    F32_IN(logits); F32_IN(bias); I32_OUT(ids); F32_OUT(weights);
    size_t row = get_group_id(1);
    logits += row * logits_stride;
    ids += row * ids_stride;
    weights += row * weights_stride;
    float largest = -INFINITY;
    bool damaged = false;
    for (int e = 0; e < experts; e++) {
        damaged |= is_damaged(logits[e]);
        largest = fmax(largest, isnan(logits[e]) ? -INFINITY : logits[e]);
    }
    for (int e = get_local_id(0); e < experts; e += LANES) {
        float logit = isnan(logits[e]) ? -INFINITY : logits[e];
        scores[e] = sigmoid ? 1.0f / (1.0f + exp(-logit)) : largest == -INFINITY ? 0.0f : exp(logit - largest);
        taken[e] = 0;
        group_taken[e] = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    for (int e = 0; e < experts; e++) {
        sum += scores[e];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int e = get_local_id(0); e < experts; e += LANES) {
        if (!sigmoid && sum > 0.0f) {
            scores[e] /= sum;
        }
        choice[e] = has_bias ? scores[e] + bias[e] : scores[e];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_local_id(0) != 0) {
        return;
    }
    for (int e = 0; e < experts; e++) {
        damaged |= is_damaged(choice[e]);
        choice[e] = isnan(choice[e]) ? -INFINITY : choice[e];
    }
    if (top_groups < groups) {
        int size = experts / groups;
        for (int g = 0; g < groups; g++) {
            float first = -INFINITY, second = -INFINITY;
            for (int i = 0; i < size; i++) {
                float value = choice[g * size + i];
                if (value > first) {
                    second = first;
                    first = value;
                } else if (value > second) {
                    second = value;
                }
            }
            float value = top2_sum && size > 1 ? first + second : first;
            group_scores[g] = isnan(value) ? -INFINITY : value;
        }
        for (int i = 0; i < top_groups; i++) {
            group_taken[best(group_scores, group_taken, groups)] = 1;
        }
        for (int e = 0; e < experts; e++) {
            taken[e] = !group_taken[e / size];
        }
    }
    float total = 0.0f;
    for (int j = 0; j < top_k; j++) {
        int expert = best(choice, taken, experts);
        taken[expert] = 1;
        ids[j] = expert;
        total += scores[expert];
    }
    float divisor = renormalise ? total + 1e-20f : 1.0f;
    for (int j = 0; j < top_k; j++) {
        weights[j] = damaged ? as_float(0x7fc00000u) : scores[ids[j]] / divisor * scale;
    }
}

// One group: every work-item counts and places the pairs of its experts, in the order of pairs.
__attribute__((reqd_work_group_size(LANES, 1, 1)))
__kernel void dispatch(IN(ids), OUT(offsets), OUT(rows), OUT(slots), int pairs, int top_k, int experts, FAULTS) {
    __local int starts[MAX_EXPERTS + 1];
    I32_IN(ids); I32_OUT(offsets); I32_OUT(rows); I32_OUT(slots);
    int lane = get_local_id(0);
    for (int e = lane; e < experts; e += LANES) {
        starts[e + 1] = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if LANES == 1
    for (int i = 0; i < pairs; i++) {
        int expert = ids[i];
        if (expert < 0 || expert >= experts) {
            tell(faults, 5, i, expert);
            expert = clamp(expert, 0, experts - 1);
        }
        starts[expert + 1]++;
    }
#else
    for (int i = lane; i < pairs; i += LANES) {
        int expert = ids[i];
        if (expert < 0 || expert >= experts) {
            tell(faults, 5, i, expert);
        }
        atomic_inc(&starts[clamp(expert, 0, experts - 1) + 1]);
    }
#endif
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane == 0) {
        starts[0] = 0;
        for (int e = 0; e < experts; e++) {
            starts[e + 1] += starts[e];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int e = lane; e <= experts; e += LANES) {
        offsets[e] = starts[e];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if LANES == 1
    for (int i = 0; i < pairs; i++) {
        int slot = starts[clamp(ids[i], 0, experts - 1)]++;
        rows[slot] = i / top_k;
        slots[i] = slot;
    }
#else
    for (int e = lane; e < experts; e += LANES) {
        int slot = starts[e];
        for (int i = 0; i < pairs; i++) {
            if (clamp(ids[i], 0, experts - 1) == e) {
                rows[slot] = i / top_k;
                slots[i] = slot++;
            }
        }
    }
#endif
}

__attribute__((reqd_work_group_size(16, 1, 1)))
__kernel void combine(IN(x), IN(slots), IN(weights), IN(addend), OUT(out), int cols, int top_k, int x_rows, int x_stride,
                      int slots_stride, int weights_stride, int addend_stride, int out_stride, int has_addend, FAULTS) {
    F32_IN(x); I32_IN(slots); F32_IN(weights); F32_IN(addend); F32_OUT(out);
    int c = get_global_id(0) * V, n = cols - c, t = get_global_id(1);
    if (n <= 0) {
        return;
    }
    floatv sum = 0.0f;
    for (int j = 0; j < top_k; j++) {
        int slot = slots[(size_t)t * slots_stride + j];
        if (slot < 0 || slot >= x_rows) {
            tell(faults, 6, t, slot);
            continue;
        }
        float weight = weights[(size_t)t * weights_stride + j];
        sum = MAD((floatv)(weight), load_up_to(x + (size_t)slot * x_stride + c, n), sum);
    }
    if (has_addend) {
        sum += load_up_to(addend + (size_t)t * addend_stride + c, n);
    }
    store_up_to(sum, out + (size_t)t * out_stride + c, n);
}
