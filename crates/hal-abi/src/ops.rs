//! The op vocabulary: kinds, operands, attributes, formulas.
//!
//! Shapes use T tokens of the step, S sequences, R selected rows, k experts per token, E experts. Activations are f32 with
//! a row stride (`strides[0]`) that may exceed the row, so that an operand can be a column range of a wider one. Integers
//! are i32. Optional operands are passed as a null slice and described with dtype [`QHAL_DTYPE_NONE`].
//!
//! Rows of a result depend only on their own inputs: a reduction runs in an order fixed by the reduced axis.

/// An absent operand.
pub const QHAL_DTYPE_NONE: u32 = u32::MAX;
/// IEEE single precision. Codes below 100 are those of GGUF, block formats included (2 = Q4_0, 12 = Q4_K, ...).
pub const QHAL_DTYPE_F32: u32 = 0;
/// IEEE half precision.
pub const QHAL_DTYPE_F16: u32 = 1;
/// 8-bit integer.
pub const QHAL_DTYPE_I8: u32 = 24;
/// 32-bit integer.
pub const QHAL_DTYPE_I32: u32 = 26;
/// 64-bit integer.
pub const QHAL_DTYPE_I64: u32 = 27;
/// bfloat16.
pub const QHAL_DTYPE_BF16: u32 = 30;
/// 8-bit float, 4 exponent bits, no infinities, largest 448.
pub const QHAL_DTYPE_F8_E4M3: u32 = 100;
/// 8-bit float, 5 exponent bits.
pub const QHAL_DTYPE_F8_E5M2: u32 = 101;
/// Bytes.
pub const QHAL_DTYPE_U8: u32 = 102;

/// Geometry of a dtype: (values per block, bytes per block), plain types have blocks of one value. `None` for codes that
/// this version does not define.
#[must_use]
pub const fn dtype_block(dtype: u32) -> Option<(u32, u32)> {
    Some(match dtype {
        QHAL_DTYPE_I8 | QHAL_DTYPE_F8_E4M3 | QHAL_DTYPE_F8_E5M2 | QHAL_DTYPE_U8 => (1, 1),
        QHAL_DTYPE_F16 | QHAL_DTYPE_BF16 => (1, 2),
        QHAL_DTYPE_F32 | QHAL_DTYPE_I32 => (1, 4),
        QHAL_DTYPE_I64 => (1, 8),
        // GGUF: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS.
        2 => (32, 18),
        3 => (32, 20),
        6 => (32, 22),
        7 => (32, 24),
        8 => (32, 34),
        10 => (256, 84),
        11 => (256, 110),
        12 => (256, 144),
        13 => (256, 176),
        14 => (256, 210),
        20 => (32, 18),
        23 => (256, 136),
        _ => return None,
    })
}

/// Products of f32 values.
pub const QHAL_COMPUTE_F32: u32 = 1;
/// Activations rounded to int8, one scale per 32 inputs; integer products.
pub const QHAL_COMPUTE_I8_G32: u32 = 2;
/// The same with one scale per 16 inputs.
pub const QHAL_COMPUTE_I8_G16: u32 = 3;
/// Activations as the sum of two int8 terms per 32 inputs (the second holds the rounding error of the first).
pub const QHAL_COMPUTE_I8X2_G32: u32 = 4;
/// Activations rounded to bfloat16 (ties to even), f32 accumulation.
pub const QHAL_COMPUTE_BF16: u32 = 5;
/// By group of 32 inputs of a row: as I8X2_G32 if one value's square is more than [`QHAL_SPIKE_SHARE`] of the sum of the whole row's
/// squares (in f32; near the share either form will do), else as I8_G32.
pub const QHAL_COMPUTE_I8S_G32: u32 = 6;
/// Share of a row's energy that makes a value a spike.
pub const QHAL_SPIKE_SHARE: f32 = 0.125;

/// Copy rows of a table. In: ids `[T]` i32, table `[V, H]` any dtype. Out: `[T, H]` f32. An id outside 0..V gives a row of zeros.
pub const QHAL_OP_EMBED: u32 = 1;
/// Select rows. In: x `[T, H]` f32, rows `[R]` i32. Out: `[R, H]`. An index outside 0..T gives a row of zeros.
pub const QHAL_OP_GATHER_ROWS: u32 = 2;
/// y = x W^T + b for several weights that share x.
/// In: x `[T, K]` f32; then for each of SEGMENTS: W_i `[N_i, K]` any dtype, and, if its quant scheme is BLOCK_SCALE, its scales;
/// then, if HAS_BIAS, b_i `[N_i]` f32 or absent for each segment; then the operands of epilogues.
/// Out: `[T, N_0 + N_1 + ...]` f32. With the GLU epilogue SEGMENTS is 2, N_0 = N_1 and out is `[T, N_0]` = act(y_0) * y_1.
/// With the ADD epilogue the operand `[T, N]` is added last; it may be the output's own memory.
/// The op's `compute` holds for every segment that has no attribute `SEGMENT_COMPUTE + i`. Products are summed in the type that the
/// description calls `accumulate`: f32, or f16, which rounds as the device does, with ACCUMULATE_SPAN.
pub const QHAL_OP_GEMM: u32 = 3;
/// The same per expert, over rows sorted by expert. In: x; offsets `[E + 1]` i32; rows `[T, k]` i32 (source row of x for each
/// sorted row; absent: row r reads x row r, x is `[T, k, K]`); then W_i `[E, N_i, K]` with scales as in GEMM.
/// Out: `[T, k, sum N_i]` f32 in sorted order.
pub const QHAL_OP_GROUPED_GEMM: u32 = 4;
/// Root-mean-square norm over each group of AXIS consecutive elements of a row: y = x / sqrt(mean(x^2) + EPS) * w.
/// In: x `[T, C]` f32, w `[AXIS]` any float. Out: `[T, C]` f32, in place allowed.
pub const QHAL_OP_NORM: u32 = 5;
/// Rotary embedding of NUM_HEADS heads of HEAD_DIM elements: elements ROTARY_OFFSET..+ROTARY_DIM of each head are rotated by
/// position * `inv_freq[i]`, cos and sin multiplied by ATTENTION_FACTOR; the rest is copied.
/// In: x `[T, NUM_HEADS * HEAD_DIM]` f32, positions `[T]` i32, inv_freq `[ROTARY_DIM / 2]` f32. Out: as x, in place allowed.
/// STYLE half pairs (i, i + d/2), interleaved pairs (2i, 2i + 1).
pub const QHAL_OP_ROPE: u32 = 6;
/// y = act(a) * b. In: a `[T, I]`, b `[T, I]` f32. Out: `[T, I]`. In place allowed.
pub const QHAL_OP_GLU: u32 = 7;
/// y = a (OP) b. In: a `[T, C]`, b `[T, C]`, or `[T, 1]` with BROADCAST. Out: `[T, C]`, in place allowed.
pub const QHAL_OP_BINARY: u32 = 8;
/// y = f(x). In: x `[T, C]`. Out: `[T, C]`, in place allowed.
pub const QHAL_OP_UNARY: u32 = 9;
/// Conversion between float dtypes, round to nearest even. In: x `[T, C]`. Out: `[T, C]`.
pub const QHAL_OP_CAST: u32 = 10;
/// Writes keys and values of T tokens to the paged cache. In: k `[T, NUM_KV_HEADS * HEAD_DIM]` f32,
/// v `[T, NUM_KV_HEADS * VALUE_DIM]` f32, slots `[T]` i32 (block * BLOCK_SIZE + index in the block; negative: skip).
/// Out: cache `[blocks, block elements]`, dtype of the cache. With JOINED (latent attention) a block is
/// `[BLOCK_SIZE, HEAD_DIM + VALUE_DIM]` with k first; otherwise its inner order is the device's own:
/// the CPU uses `[NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]` keys followed by `[NUM_KV_HEADS, BLOCK_SIZE, VALUE_DIM]` values, and for
/// bfloat16 an order of pairs.
pub const QHAL_OP_KV_APPEND: u32 = 11;
/// Causal attention of T query tokens of S sequences over the paged cache. In: q `[T, NUM_HEADS * HEAD_DIM]` f32, cache,
/// query_start `[S]` i32 (first row of each sequence; its slice holds one value more, the end of the last), context_len `[S]`
/// i32 (cached tokens, this step's included), block_table `[S, B]` i32. Out: `[T, NUM_HEADS * VALUE_DIM]` f32.
/// Query row r of sequence s is at position p = `context_len[s]` - (`query_start[s+1]` - r) and sees positions
/// max(0, p - WINDOW + 1)..=p (WINDOW 0: all). score = SCALE * q.k, softmax in f32, sum of p v.
/// With `compute` BF16, for a cache of bfloat16, q and the weights of the softmax are rounded to bfloat16 (ties to even), before or
/// after SCALE and the division by their sum; products are summed in f32. Any other form than F32 and BF16 is refused.
pub const QHAL_OP_ATTENTION: u32 = 12;
/// Multi-head latent attention. In: q `[T, NUM_HEADS * (NOPE_DIM + ROPE_DIM)]` f32 (rotary part rotated), kv_b
/// `[NUM_HEADS * (NOPE_DIM + VALUE_DIM), LATENT_DIM]` any float (per head the key rows, then the value rows), cache (joined:
/// latent then rotary key per token), query_start, context_len, block_table as in ATTENTION.
/// Out: `[T, NUM_HEADS * VALUE_DIM]` f32.
/// FORM expanded: k_h = `[W_k,h c | rope]`, v_h = W_v,h c. FORM absorbed: q_h W_k,h against c, then W_v,h of the sum. Equal but
/// for rounding.
pub const QHAL_OP_MLA_ATTENTION: u32 = 13;
/// Chooses experts. In: logits `[T, E]` f32, bias `[E]` f32 or absent. Out: ids `[T, k]` i32, weights `[T, k]` f32, best first.
/// s = softmax or sigmoid of the logits; choice by s + bias, ties to the lower index, within the TOPK_GROUP best of
/// NUM_GROUPS groups (group score: sum of its two best, or its best); weights are s of the chosen, divided by their sum
/// (+ 1e-20) if RENORMALISE, times SCALE.
pub const QHAL_OP_ROUTE: u32 = 14;
/// Sorts (token, choice) pairs by expert, stable. In: ids `[T, k]` i32. Out: offsets `[E + 1]` i32, rows `[T, k]` i32 (token of each
/// sorted row), slots `[T, k]` i32 (sorted row of each pair).
pub const QHAL_OP_DISPATCH: u32 = 15;
/// `y[t]` = sum over j of `weights[t, j]` * `x[slots[t, j]]`, in order of j, plus the addend.
/// In: x `[T, k, H]` f32 sorted, slots `[T, k]` i32, weights `[T, k]` f32, addend `[T, H]` f32 or absent. Out: `[T, H]`.
pub const QHAL_OP_COMBINE: u32 = 16;
/// Copies a strided matrix. In: x `[T, C]`. Out: `[T, C]`, same dtype.
pub const QHAL_OP_COPY: u32 = 17;
/// Softmax over each row. In: x `[T, C]` f32. Out: `[T, C]` f32, in place allowed.
pub const QHAL_OP_SOFTMAX: u32 = 18;

/// Name of an op kind in messages and reports, `unknown` for codes that this version does not define.
#[must_use]
pub const fn op_name(op_kind: u32) -> &'static str {
    match op_kind {
        QHAL_OP_EMBED => "embed",
        QHAL_OP_GATHER_ROWS => "gather_rows",
        QHAL_OP_GEMM => "gemm",
        QHAL_OP_GROUPED_GEMM => "grouped_gemm",
        QHAL_OP_NORM => "norm",
        QHAL_OP_ROPE => "rope",
        QHAL_OP_GLU => "glu",
        QHAL_OP_BINARY => "binary",
        QHAL_OP_UNARY => "unary",
        QHAL_OP_CAST => "cast",
        QHAL_OP_KV_APPEND => "kv_append",
        QHAL_OP_ATTENTION => "attention",
        QHAL_OP_MLA_ATTENTION => "mla_attention",
        QHAL_OP_ROUTE => "route",
        QHAL_OP_DISPATCH => "dispatch",
        QHAL_OP_COMBINE => "combine",
        QHAL_OP_COPY => "copy",
        QHAL_OP_SOFTMAX => "softmax",
        _ => "unknown",
    }
}

/// i64: number of weights of a GEMM.
pub const QHAL_ATTR_SEGMENTS: u32 = 1;
/// i64 0/1: biases follow the weights.
pub const QHAL_ATTR_HAS_BIAS: u32 = 2;
/// i64: `QHAL_GEMM_*`, what the product is for; a hint.
pub const QHAL_ATTR_GEMM_TYPE: u32 = 3;
/// f64: epsilon of a norm.
pub const QHAL_ATTR_EPS: u32 = 4;
/// i64: elements per norm group.
pub const QHAL_ATTR_AXIS: u32 = 5;
/// i64: query heads.
pub const QHAL_ATTR_NUM_HEADS: u32 = 6;
/// i64: key/value heads.
pub const QHAL_ATTR_NUM_KV_HEADS: u32 = 7;
/// i64: elements of a query/key head.
pub const QHAL_ATTR_HEAD_DIM: u32 = 8;
/// i64: elements of a value head.
pub const QHAL_ATTR_VALUE_DIM: u32 = 9;
/// i64: first rotated element of a head.
pub const QHAL_ATTR_ROTARY_OFFSET: u32 = 10;
/// i64: rotated elements of a head.
pub const QHAL_ATTR_ROTARY_DIM: u32 = 11;
/// i64: `QHAL_ROPE_*`.
pub const QHAL_ATTR_STYLE: u32 = 12;
/// f64: factor on cos and sin.
pub const QHAL_ATTR_ATTENTION_FACTOR: u32 = 13;
/// i64: tokens of a cache block.
pub const QHAL_ATTR_BLOCK_SIZE: u32 = 14;
/// f64: factor on scores, or on router weights.
pub const QHAL_ATTR_SCALE: u32 = 15;
/// i64: sliding window in tokens, 0 none.
pub const QHAL_ATTR_WINDOW: u32 = 16;
/// i64 0/1: joined cache layout.
pub const QHAL_ATTR_JOINED: u32 = 17;
/// i64: `QHAL_MLA_*`.
pub const QHAL_ATTR_FORM: u32 = 18;
/// i64: non-rotary elements of a latent-attention query head.
pub const QHAL_ATTR_NOPE_DIM: u32 = 19;
/// i64: rotary elements of a latent-attention query head.
pub const QHAL_ATTR_ROPE_DIM: u32 = 20;
/// i64: elements of the latent.
pub const QHAL_ATTR_LATENT_DIM: u32 = 21;
/// i64: `QHAL_SCORE_*`.
pub const QHAL_ATTR_SCORE: u32 = 22;
/// i64: experts per token.
pub const QHAL_ATTR_TOP_K: u32 = 23;
/// i64: groups of experts, 1 none.
pub const QHAL_ATTR_NUM_GROUPS: u32 = 24;
/// i64: groups that may be chosen from.
pub const QHAL_ATTR_TOPK_GROUP: u32 = 25;
/// i64: `QHAL_GROUP_SCORE_*`.
pub const QHAL_ATTR_GROUP_SCORE: u32 = 26;
/// i64 0/1: weights are divided by their sum.
pub const QHAL_ATTR_RENORMALISE: u32 = 27;
/// i64: experts.
pub const QHAL_ATTR_NUM_EXPERTS: u32 = 28;
/// i64: `QHAL_ACT_*`, `QHAL_UNARY_*` or `QHAL_BINARY_*`.
pub const QHAL_ATTR_FUNCTION: u32 = 29;
/// i64 0/1: the second operand has one column.
pub const QHAL_ATTR_BROADCAST: u32 = 30;
/// i64: for sums narrower than f32 (`accumulate` of the description): products after which the accumulator is added to an f32 sum and
/// begun anew. Absent: never.
pub const QHAL_ATTR_ACCUMULATE_SPAN: u32 = 31;
/// i64 0/1: the table is the weight of a product on the device too, so that a plan may want it in that product's packed form.
pub const QHAL_ATTR_TIED: u32 = 32;
/// i64: `QHAL_COMPUTE_*` of GEMM segment i is attribute `SEGMENT_COMPUTE + i`.
pub const QHAL_ATTR_SEGMENT_COMPUTE: u32 = 0x100;

/// A plain product.
pub const QHAL_GEMM_PLAIN: i64 = 0;
/// Query, key and value projections of one input.
pub const QHAL_GEMM_FUSED_QKV: i64 = 1;
/// Gate and up projections of one input.
pub const QHAL_GEMM_FUSED_GATE_UP: i64 = 2;
/// Experts.
pub const QHAL_GEMM_MOE_GROUPED: i64 = 3;
/// The output head.
pub const QHAL_GEMM_LM_HEAD: i64 = 4;

/// out = act(y_0) * y_1; `param` is `QHAL_ACT_*`.
pub const QHAL_EPILOGUE_GLU: u32 = 1;
/// out = y + operand `input`.
pub const QHAL_EPILOGUE_ADD: u32 = 2;

/// x / (1 + exp(-x)).
pub const QHAL_ACT_SILU: i64 = 0;
/// Gelu, tanh form.
pub const QHAL_ACT_GELU_TANH: i64 = 1;
/// 1 / (1 + exp(-x)).
pub const QHAL_UNARY_SIGMOID: i64 = 2;

/// a + b.
pub const QHAL_BINARY_ADD: i64 = 0;
/// a * b.
pub const QHAL_BINARY_MUL: i64 = 1;

/// Pairs (i, i + d/2).
pub const QHAL_ROPE_HALF: i64 = 0;
/// Pairs (2i, 2i + 1).
pub const QHAL_ROPE_INTERLEAVED: i64 = 1;

/// Keys and values are built from the latent.
pub const QHAL_MLA_EXPANDED: i64 = 0;
/// The up-projections are applied to the query and the result.
pub const QHAL_MLA_ABSORBED: i64 = 1;

/// Softmax over all experts.
pub const QHAL_SCORE_SOFTMAX: i64 = 0;
/// Sigmoid per expert.
pub const QHAL_SCORE_SIGMOID: i64 = 1;

/// A group's score is its best.
pub const QHAL_GROUP_SCORE_MAX: i64 = 0;
/// A group's score is the sum of its two best.
pub const QHAL_GROUP_SCORE_TOP2_SUM: i64 = 1;
