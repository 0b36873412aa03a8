// The C ABI between the Qwen inference runtime and a device plugin.
// Generated from crates/hal-abi by its test `header`; do not edit. Guide: docs/hal.md.
//
// A plugin is a shared object libhal_NAME.so that exports qhal_plugin_manifest and qhal_plugin_query.

#ifndef QWEN_HAL_H
#define QWEN_HAL_H

#include <stdint.h>
#include <stddef.h>

// Objects of the plugin, which alone knows what they are.
typedef struct qhal_device qhal_device;
typedef struct qhal_buffer qhal_buffer;
typedef struct qhal_stream qhal_stream;
typedef struct qhal_event qhal_event;
typedef struct qhal_plan qhal_plan;
typedef struct qhal_cmdlist qhal_cmdlist;
typedef struct qhal_comm qhal_comm;


// Major version: both sides must have the same.
#define QHAL_ABI_MAJOR 0

// Minor version of this header.
//
// | minor | what it added |
// |---|---|
// | 1 | the first that was published |
// | 2 | the tables of command lists and collectives |
#define QHAL_ABI_MINOR 2

// Most dimensions of a tensor.
#define QHAL_MAX_RANK 8

// Bytes of text in a `qhal_error`, terminating zero included.
#define QHAL_ERROR_TEXT 208

// `bits` holds an i64.
#define QHAL_ATTR_TYPE_I64 0

// `bits` holds an f64.
#define QHAL_ATTR_TYPE_F64 1

// Patches an operand that a launch reads, or the source of a copy (index 0).
#define QHAL_PATCH_INPUT 1

// Patches an operand that a launch writes, or the target of a copy (index 0).
#define QHAL_PATCH_OUTPUT 2

// Patches the workspace of a launch (index 0).
#define QHAL_PATCH_WORKSPACE 3

// Patches the value of a symbol of a launch.
#define QHAL_PATCH_SYMBOL 4

// Every rank gets the reduction of `count` elements of all ranks.
#define QHAL_COLLECTIVE_ALL_REDUCE 1

// Every rank gets the `count` elements of each rank, in order of rank: the target has ranks x count.
#define QHAL_COLLECTIVE_ALL_GATHER 2

// Rank r gets the reduction of part r, of `count` elements: the source has ranks x count.
#define QHAL_COLLECTIVE_REDUCE_SCATTER 3

// Every rank gets the `count` elements of rank `peer`; other ranks may pass no source.
#define QHAL_COLLECTIVE_BROADCAST 4

// Rank r gets part r of each rank, in order of rank: source and target have ranks x count.
#define QHAL_COLLECTIVE_ALL_TO_ALL 5

// Gives `count` elements to rank `peer`, whose next `QHAL_COLLECTIVE_RECV` from this rank takes them. No target.
#define QHAL_COLLECTIVE_SEND 6

// Takes `count` elements from rank `peer`. No source.
#define QHAL_COLLECTIVE_RECV 7

// Sum. Integers wrap around. Halves may be rounded after each addition.
#define QHAL_REDUCE_SUM 1

// Maximum. NaN if one value is NaN.
#define QHAL_REDUCE_MAX 2

// Sum of each element in order of rank, beginning with rank 0: its bits depend on neither the count nor the element's position. May
// not be supported.
#define QHAL_REDUCE_SUM_IN_ORDER 3

// An absent operand.
#define QHAL_DTYPE_NONE UINT32_MAX

// IEEE single precision. Codes below 100 are those of GGUF, block formats included (2 = Q4_0, 12 = Q4_K, ...).
#define QHAL_DTYPE_F32 0

// IEEE half precision.
#define QHAL_DTYPE_F16 1

// 8-bit integer.
#define QHAL_DTYPE_I8 24

// 32-bit integer.
#define QHAL_DTYPE_I32 26

// 64-bit integer.
#define QHAL_DTYPE_I64 27

// bfloat16.
#define QHAL_DTYPE_BF16 30

// 8-bit float, 4 exponent bits, no infinities, largest 448.
#define QHAL_DTYPE_F8_E4M3 100

// 8-bit float, 5 exponent bits.
#define QHAL_DTYPE_F8_E5M2 101

// Bytes.
#define QHAL_DTYPE_U8 102

// Products of f32 values.
#define QHAL_COMPUTE_F32 1

// Activations rounded to int8, one scale per 32 inputs; integer products.
#define QHAL_COMPUTE_I8_G32 2

// The same with one scale per 16 inputs.
#define QHAL_COMPUTE_I8_G16 3

// Activations as the sum of two int8 terms per 32 inputs (the second holds the rounding error of the first).
#define QHAL_COMPUTE_I8X2_G32 4

// Activations rounded to bfloat16 (ties to even), f32 accumulation.
#define QHAL_COMPUTE_BF16 5

// By group of 32 inputs of a row: as I8X2_G32 if one value's square is more than `QHAL_SPIKE_SHARE` of the sum of the whole row's
// squares (in f32; near the share either form will do), else as I8_G32.
#define QHAL_COMPUTE_I8S_G32 6

// Share of a row's energy that makes a value a spike.
#define QHAL_SPIKE_SHARE 0.125

// Copy rows of a table. In: ids `[T]` i32, table `[V, H]` any dtype. Out: `[T, H]` f32. An id outside 0..V gives a row of zeros.
#define QHAL_OP_EMBED 1

// Select rows. In: x `[T, H]` f32, rows `[R]` i32. Out: `[R, H]`. An index outside 0..T gives a row of zeros.
#define QHAL_OP_GATHER_ROWS 2

// y = x W^T + b for several weights that share x.
// In: x `[T, K]` f32; then for each of SEGMENTS: W_i `[N_i, K]` any dtype, and, if its quant scheme is BLOCK_SCALE, its scales;
// then, if HAS_BIAS, b_i `[N_i]` f32 or absent for each segment; then the operands of epilogues.
// Out: `[T, N_0 + N_1 + ...]` f32. With the GLU epilogue SEGMENTS is 2, N_0 = N_1 and out is `[T, N_0]` = act(y_0) * y_1.
// With the ADD epilogue the operand `[T, N]` is added last; it may be the output's own memory.
// The op's `compute` holds for every segment that has no attribute `SEGMENT_COMPUTE + i`. Products are summed in the type that the
// description calls `accumulate`: f32, or f16, which rounds as the device does, with ACCUMULATE_SPAN.
#define QHAL_OP_GEMM 3

// The same per expert, over rows sorted by expert. In: x; offsets `[E + 1]` i32; rows `[T, k]` i32 (source row of x for each
// sorted row; absent: row r reads x row r, x is `[T, k, K]`); then W_i `[E, N_i, K]` with scales as in GEMM.
// Out: `[T, k, sum N_i]` f32 in sorted order.
#define QHAL_OP_GROUPED_GEMM 4

// Root-mean-square norm over each group of AXIS consecutive elements of a row: y = x / sqrt(mean(x^2) + EPS) * w.
// In: x `[T, C]` f32, w `[AXIS]` any float. Out: `[T, C]` f32, in place allowed.
#define QHAL_OP_NORM 5

// Rotary embedding of NUM_HEADS heads of HEAD_DIM elements: elements ROTARY_OFFSET..+ROTARY_DIM of each head are rotated by
// position * `inv_freq[i]`, cos and sin multiplied by ATTENTION_FACTOR; the rest is copied.
// In: x `[T, NUM_HEADS * HEAD_DIM]` f32, positions `[T]` i32, inv_freq `[ROTARY_DIM / 2]` f32. Out: as x, in place allowed.
// STYLE half pairs (i, i + d/2), interleaved pairs (2i, 2i + 1).
#define QHAL_OP_ROPE 6

// y = act(a) * b. In: a `[T, I]`, b `[T, I]` f32. Out: `[T, I]`. In place allowed.
#define QHAL_OP_GLU 7

// y = a (OP) b. In: a `[T, C]`, b `[T, C]`, or `[T, 1]` with BROADCAST. Out: `[T, C]`, in place allowed.
#define QHAL_OP_BINARY 8

// y = f(x). In: x `[T, C]`. Out: `[T, C]`, in place allowed.
#define QHAL_OP_UNARY 9

// Conversion between float dtypes, round to nearest even. In: x `[T, C]`. Out: `[T, C]`.
#define QHAL_OP_CAST 10

// Writes keys and values of T tokens to the paged cache. In: k `[T, NUM_KV_HEADS * HEAD_DIM]` f32,
// v `[T, NUM_KV_HEADS * VALUE_DIM]` f32, slots `[T]` i32 (block * BLOCK_SIZE + index in the block; negative: skip).
// Out: cache `[blocks, block elements]`, dtype of the cache. With JOINED (latent attention) a block is
// `[BLOCK_SIZE, HEAD_DIM + VALUE_DIM]` with k first; otherwise its inner order is the device's own:
// the CPU uses `[NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]` keys followed by `[NUM_KV_HEADS, BLOCK_SIZE, VALUE_DIM]` values, and for
// bfloat16 an order of pairs.
#define QHAL_OP_KV_APPEND 11

// Causal attention of T query tokens of S sequences over the paged cache. In: q `[T, NUM_HEADS * HEAD_DIM]` f32, cache,
// query_start `[S]` i32 (first row of each sequence; its slice holds one value more, the end of the last), context_len `[S]`
// i32 (cached tokens, this step's included), block_table `[S, B]` i32. Out: `[T, NUM_HEADS * VALUE_DIM]` f32.
// Query row r of sequence s is at position p = `context_len[s]` - (`query_start[s+1]` - r) and sees positions
// max(0, p - WINDOW + 1)..=p (WINDOW 0: all). score = SCALE * q.k, softmax in f32, sum of p v.
// With `compute` BF16, for a cache of bfloat16, q and the weights of the softmax are rounded to bfloat16 (ties to even), before or
// after SCALE and the division by their sum; products are summed in f32. Any other form than F32 and BF16 is refused.
#define QHAL_OP_ATTENTION 12

// Multi-head latent attention. In: q `[T, NUM_HEADS * (NOPE_DIM + ROPE_DIM)]` f32 (rotary part rotated), kv_b
// `[NUM_HEADS * (NOPE_DIM + VALUE_DIM), LATENT_DIM]` any float (per head the key rows, then the value rows), cache (joined:
// latent then rotary key per token), query_start, context_len, block_table as in ATTENTION.
// Out: `[T, NUM_HEADS * VALUE_DIM]` f32.
// FORM expanded: k_h = `[W_k,h c | rope]`, v_h = W_v,h c. FORM absorbed: q_h W_k,h against c, then W_v,h of the sum. Equal but
// for rounding.
#define QHAL_OP_MLA_ATTENTION 13

// Chooses experts. In: logits `[T, E]` f32, bias `[E]` f32 or absent. Out: ids `[T, k]` i32, weights `[T, k]` f32, best first.
// s = softmax or sigmoid of the logits; choice by s + bias, ties to the lower index, within the TOPK_GROUP best of
// NUM_GROUPS groups (group score: sum of its two best, or its best); weights are s of the chosen, divided by their sum
// (+ 1e-20) if RENORMALISE, times SCALE.
#define QHAL_OP_ROUTE 14

// Sorts (token, choice) pairs by expert, stable. In: ids `[T, k]` i32. Out: offsets `[E + 1]` i32, rows `[T, k]` i32 (token of each
// sorted row), slots `[T, k]` i32 (sorted row of each pair).
#define QHAL_OP_DISPATCH 15

// `y[t]` = sum over j of `weights[t, j]` * `x[slots[t, j]]`, in order of j, plus the addend.
// In: x `[T, k, H]` f32 sorted, slots `[T, k]` i32, weights `[T, k]` f32, addend `[T, H]` f32 or absent. Out: `[T, H]`.
#define QHAL_OP_COMBINE 16

// Copies a strided matrix. In: x `[T, C]`. Out: `[T, C]`, same dtype.
#define QHAL_OP_COPY 17

// Softmax over each row. In: x `[T, C]` f32. Out: `[T, C]` f32, in place allowed.
#define QHAL_OP_SOFTMAX 18

// i64: number of weights of a GEMM.
#define QHAL_ATTR_SEGMENTS 1

// i64 0/1: biases follow the weights.
#define QHAL_ATTR_HAS_BIAS 2

// i64: `QHAL_GEMM_*`, what the product is for; a hint.
#define QHAL_ATTR_GEMM_TYPE 3

// f64: epsilon of a norm.
#define QHAL_ATTR_EPS 4

// i64: elements per norm group.
#define QHAL_ATTR_AXIS 5

// i64: query heads.
#define QHAL_ATTR_NUM_HEADS 6

// i64: key/value heads.
#define QHAL_ATTR_NUM_KV_HEADS 7

// i64: elements of a query/key head.
#define QHAL_ATTR_HEAD_DIM 8

// i64: elements of a value head.
#define QHAL_ATTR_VALUE_DIM 9

// i64: first rotated element of a head.
#define QHAL_ATTR_ROTARY_OFFSET 10

// i64: rotated elements of a head.
#define QHAL_ATTR_ROTARY_DIM 11

// i64: `QHAL_ROPE_*`.
#define QHAL_ATTR_STYLE 12

// f64: factor on cos and sin.
#define QHAL_ATTR_ATTENTION_FACTOR 13

// i64: tokens of a cache block.
#define QHAL_ATTR_BLOCK_SIZE 14

// f64: factor on scores, or on router weights.
#define QHAL_ATTR_SCALE 15

// i64: sliding window in tokens, 0 none.
#define QHAL_ATTR_WINDOW 16

// i64 0/1: joined cache layout.
#define QHAL_ATTR_JOINED 17

// i64: `QHAL_MLA_*`.
#define QHAL_ATTR_FORM 18

// i64: non-rotary elements of a latent-attention query head.
#define QHAL_ATTR_NOPE_DIM 19

// i64: rotary elements of a latent-attention query head.
#define QHAL_ATTR_ROPE_DIM 20

// i64: elements of the latent.
#define QHAL_ATTR_LATENT_DIM 21

// i64: `QHAL_SCORE_*`.
#define QHAL_ATTR_SCORE 22

// i64: experts per token.
#define QHAL_ATTR_TOP_K 23

// i64: groups of experts, 1 none.
#define QHAL_ATTR_NUM_GROUPS 24

// i64: groups that may be chosen from.
#define QHAL_ATTR_TOPK_GROUP 25

// i64: `QHAL_GROUP_SCORE_*`.
#define QHAL_ATTR_GROUP_SCORE 26

// i64 0/1: weights are divided by their sum.
#define QHAL_ATTR_RENORMALISE 27

// i64: experts.
#define QHAL_ATTR_NUM_EXPERTS 28

// i64: `QHAL_ACT_*`, `QHAL_UNARY_*` or `QHAL_BINARY_*`.
#define QHAL_ATTR_FUNCTION 29

// i64 0/1: the second operand has one column.
#define QHAL_ATTR_BROADCAST 30

// i64: for sums narrower than f32 (`accumulate` of the description): products after which the accumulator is added to an f32 sum and
// begun anew. Absent: never.
#define QHAL_ATTR_ACCUMULATE_SPAN 31

// i64 0/1: the table is the weight of a product on the device too, so that a plan may want it in that product's packed form.
#define QHAL_ATTR_TIED 32

// i64: `QHAL_COMPUTE_*` of GEMM segment i is attribute `SEGMENT_COMPUTE + i`.
#define QHAL_ATTR_SEGMENT_COMPUTE 256

// A plain product.
#define QHAL_GEMM_PLAIN 0

// Query, key and value projections of one input.
#define QHAL_GEMM_FUSED_QKV 1

// Gate and up projections of one input.
#define QHAL_GEMM_FUSED_GATE_UP 2

// Experts.
#define QHAL_GEMM_MOE_GROUPED 3

// The output head.
#define QHAL_GEMM_LM_HEAD 4

// out = act(y_0) * y_1; `param` is `QHAL_ACT_*`.
#define QHAL_EPILOGUE_GLU 1

// out = y + operand `input`.
#define QHAL_EPILOGUE_ADD 2

// x / (1 + exp(-x)).
#define QHAL_ACT_SILU 0

// Gelu, tanh form.
#define QHAL_ACT_GELU_TANH 1

// 1 / (1 + exp(-x)).
#define QHAL_UNARY_SIGMOID 2

// a + b.
#define QHAL_BINARY_ADD 0

// a * b.
#define QHAL_BINARY_MUL 1

// Pairs (i, i + d/2).
#define QHAL_ROPE_HALF 0

// Pairs (2i, 2i + 1).
#define QHAL_ROPE_INTERLEAVED 1

// Keys and values are built from the latent.
#define QHAL_MLA_EXPANDED 0

// The up-projections are applied to the query and the result.
#define QHAL_MLA_ABSORBED 1

// Softmax over all experts.
#define QHAL_SCORE_SOFTMAX 0

// Sigmoid per expert.
#define QHAL_SCORE_SIGMOID 1

// A group's score is its best.
#define QHAL_GROUP_SCORE_MAX 0

// A group's score is the sum of its two best.
#define QHAL_GROUP_SCORE_TOP2_SUM 1

// The same call may succeed later.
#define QHAL_ERROR_RETRYABLE 1

// Later work on the same stream will fail as well.
#define QHAL_ERROR_STICKY 2

// The device must be opened anew.
#define QHAL_ERROR_DEVICE_LOST 4

// The cause is lack of memory.
#define QHAL_ERROR_OUT_OF_MEMORY 8

// `cpu_features`: x86-64 AVX2, FMA and F16C.
#define QHAL_CPU_AVX2 (1 << 0)

// `cpu_features`: x86-64 AVX-512 F, BW, VL and DQ.
#define QHAL_CPU_AVX512 (1 << 1)

// `cpu_features`: AArch64 Advanced SIMD.
#define QHAL_CPU_NEON (1 << 2)

// Runs on the host's cores.
#define QHAL_KIND_CPU 1

// A graphics processor.
#define QHAL_KIND_GPU 2

// A neural-network accelerator.
#define QHAL_KIND_NPU 3

// Figures are modelled, results computed on the host.
#define QHAL_KIND_SIMULATED 4

// Computes nothing.
#define QHAL_KIND_NULL 5

// Asynchronous copies.
#define QHAL_FEATURE_ASYNC_COPY (1 << 0)

// Events.
#define QHAL_FEATURE_EVENTS (1 << 1)

// Time between events.
#define QHAL_FEATURE_EVENT_TIMING (1 << 2)

// Page-locked host memory.
#define QHAL_FEATURE_PINNED (1 << 3)

// Buffers can be mapped.
#define QHAL_FEATURE_MAP (1 << 4)

// Host memory can be imported without a copy.
#define QHAL_FEATURE_IMPORT_HOST (1 << 5)

// dma-buf descriptors can be imported.
#define QHAL_FEATURE_IMPORT_DMABUF (1 << 6)

// Devices can copy to each other.
#define QHAL_FEATURE_P2P (1 << 7)

// Extension `cmdlist`.
#define QHAL_FEATURE_CMDLIST (1 << 8)

// Extension `vmm`.
#define QHAL_FEATURE_VMM (1 << 9)

// Extension `collectives`.
#define QHAL_FEATURE_COLLECTIVES (1 << 10)

// Extension `region`; reserved, not to be set.
#define QHAL_FEATURE_REGION (1 << 11)

// Extension `partition`.
#define QHAL_FEATURE_PARTITION (1 << 12)

// Kernels read and write host memory directly; no staging is needed.
#define QHAL_FEATURE_UNIFIED (1 << 13)

// Work of a stream is complete when the call that enqueued it returns.
#define QHAL_FEATURE_INLINE (1 << 14)

// Values of the type can be stored.
#define QHAL_DTYPE_CAN_STORE 1

// Values can be converted to and from f32.
#define QHAL_DTYPE_CAN_CONVERT 2

// Arithmetic exists.
#define QHAL_DTYPE_CAN_COMPUTE 4

// Can be an accumulator.
#define QHAL_DTYPE_CAN_ACCUMULATE 8

// The matrix unit takes it.
#define QHAL_DTYPE_CAN_MATRIX 16

// `memory_total` holds a value.
#define QHAL_CAPS_MEMORY_TOTAL (1 << 0)

// `max_allocation` holds a value.
#define QHAL_CAPS_MAX_ALLOCATION (1 << 1)

// `buffer_alignment` holds a value.
#define QHAL_CAPS_BUFFER_ALIGNMENT (1 << 2)

// `vmm_granularity` holds a value.
#define QHAL_CAPS_VMM_GRANULARITY (1 << 3)

// `compute_units` holds a value.
#define QHAL_CAPS_COMPUTE_UNITS (1 << 4)

// `vector_width` holds a value.
#define QHAL_CAPS_VECTOR_WIDTH (1 << 5)

// `matrix_tile` holds a value.
#define QHAL_CAPS_MATRIX_TILE (1 << 6)

// `numa_node` holds a value.
#define QHAL_CAPS_NUMA_NODE (1 << 7)

// `cache_bytes` holds a value.
#define QHAL_CAPS_CACHE_BYTES (1 << 8)

// `scratch_bytes` holds a value.
#define QHAL_CAPS_SCRATCH_BYTES (1 << 9)

// `bandwidth` holds a value.
#define QHAL_CAPS_BANDWIDTH (1 << 10)

// Works as it should.
#define QHAL_HEALTH_OK 1

// Works with errors.
#define QHAL_HEALTH_DEGRADED 2

// Works slower than it could.
#define QHAL_HEALTH_THROTTLED 3

// Does not answer.
#define QHAL_HEALTH_UNRESPONSIVE 4

// Gone.
#define QHAL_HEALTH_LOST 5

// The same device.
#define QHAL_LINK_SAME 1

// Dies of one package.
#define QHAL_LINK_ON_PACKAGE 2

// The vendor's fabric.
#define QHAL_LINK_FABRIC 3

// PCIe below one root.
#define QHAL_LINK_PCIE_SAME_ROOT 4

// PCIe across roots.
#define QHAL_LINK_PCIE_CROSS_ROOT 5

// Through host memory.
#define QHAL_LINK_HOST_STAGED 6

// Through a network.
#define QHAL_LINK_NETWORK 7

// No way.
#define QHAL_LINK_ISOLATED 8

// In device memory.
#define QHAL_MEMORY_DEVICE 1

// The host can map it.
#define QHAL_MEMORY_HOST_VISIBLE 2

// No flush is needed.
#define QHAL_MEMORY_HOST_COHERENT 4

// Cached on the host.
#define QHAL_MEMORY_HOST_CACHED 8

// One memory for host and device.
#define QHAL_MEMORY_UNIFIED 16

// Page-locked host memory.
#define QHAL_MEMORY_PINNED 32

// Weights.
#define QHAL_USAGE_WEIGHT 1

// Cache of keys and values.
#define QHAL_USAGE_KV 2

// Activations.
#define QHAL_USAGE_ACTIVATION 4

// Workspace of plans.
#define QHAL_USAGE_WORKSPACE 8

// Copies to and from the host.
#define QHAL_USAGE_STAGING 16

// Can be handed to another process or device.
#define QHAL_USAGE_EXPORTABLE 32

// Lives as long as the model.
#define QHAL_SCOPE_PERSISTENT 1

// Grows with requests.
#define QHAL_SCOPE_DYNAMIC 2

// Lives within one step.
#define QHAL_SCOPE_TEMPORARY 3

// Import of a host range; the host keeps it valid and, if read-only, unchanged until the buffer is freed.
#define QHAL_IMPORT_HOST 1

// Import of a dma-buf descriptor.
#define QHAL_IMPORT_DMABUF 2

// Import of a peer's buffer.
#define QHAL_IMPORT_PEER 3

// May be read.
#define QHAL_ACCESS_READ 1

// May be written.
#define QHAL_ACCESS_WRITE 2

// Plain values, or a block format that is self-contained (all GGUF types).
#define QHAL_QUANT_NONE 0

// The next operand holds f32 scales, one per `block` of rows x columns, multiplied.
#define QHAL_QUANT_BLOCK_SCALE 1

// Many tokens of one or several prompts.
#define QHAL_PHASE_PREFILL 1

// One token per sequence.
#define QHAL_PHASE_DECODE 2

// Both.
#define QHAL_PHASE_MIXED 3

// Bit-equal to the definition.
#define QHAL_TOLERANCE_EXACT 1

// float32 rounding.
#define QHAL_TOLERANCE_TIGHT 2

// Half-precision rounding.
#define QHAL_TOLERANCE_NORMAL 3

// 8-bit rounding.
#define QHAL_TOLERANCE_LOOSE 4

// Judged by distributions only.
#define QHAL_TOLERANCE_STATISTICAL 5

// Not at all.
#define QHAL_SUPPORT_NO 0

// Correct, but not in the device's own way.
#define QHAL_SUPPORT_EMULATED 1

// Yes.
#define QHAL_SUPPORT_NATIVE 2

// Yes, with parameters chosen by measurement.
#define QHAL_SUPPORT_TUNED 3

// May be recorded into a command list (`qhal_cmdlist_api`).
#define QHAL_PLAN_CAPTURE_SAFE 1

// Same inputs, same bits.
#define QHAL_PLAN_DETERMINISTIC 2

// A row's bits do not depend on the other rows or their number.
#define QHAL_PLAN_BATCH_INVARIANT 4

// At least one input has `packed_bytes`; it must go through `plan_prepack` first.
#define QHAL_PLAN_NEEDS_PREPACK 8

// Most operands whose packing a plan can announce.
#define QHAL_MAX_PACKED 16

// The plan takes this variant.
#define QHAL_VARIANT_CHOSEN 1

// Extension id of `qhal_vmm_api`.
#define QHAL_EXT_VMM 1

// Extension id of `qhal_cmdlist_api`.
#define QHAL_EXT_CMDLIST 2

// Extension id of `qhal_collectives_api`.
#define QHAL_EXT_COLLECTIVES 3

// Extension id of regions: sub-graphs planned as one. Reserved; no table is defined, and nothing may be claimed.
#define QHAL_EXT_REGION 4

// Extension id of profiling.
#define QHAL_EXT_PROFILING 5

// Extension id of partitions.
#define QHAL_EXT_PARTITION 6

// Extension id of `qhal_variants_api`.
#define QHAL_EXT_VARIANTS 7

// What a call answers: `QHAL_OK` or one of the codes below.
typedef int32_t qhal_status;

// A borrowed, not zero-terminated UTF-8 string. Frozen.
typedef struct qhal_str {
    // First byte; may be null when `len` is 0.
    const uint8_t *data;
    // Length in bytes.
    uint64_t len;
} qhal_str;

// An option. Frozen.
typedef struct qhal_kv {
    // Name.
    struct qhal_str key;
    // Value as text.
    struct qhal_str value;
} qhal_kv;

// A typed attribute of an op. Frozen.
typedef struct qhal_attr {
    // One of the `QHAL_ATTR_*` keys of `ops`.
    uint32_t key;
    // `QHAL_ATTR_TYPE_I64` or `QHAL_ATTR_TYPE_F64`.
    uint32_t value_type;
    // The bits of the i64 or f64.
    uint64_t bits;
} qhal_attr;

// A range of a buffer. A null buffer stands for an absent optional operand. Frozen.
typedef struct qhal_slice {
    // The memory object.
    qhal_buffer *buffer;
    // First byte.
    uint64_t offset;
    // Bytes.
    uint64_t size;
} qhal_slice;

// Details of a failure, in memory of the caller, so that it works when no memory is left.
typedef struct qhal_error {
    // Size of this struct.
    uint32_t struct_size;
    // The status code once more.
    qhal_status code;
    // `QHAL_ERROR_*` bits.
    uint32_t flags;
    // Operand or element that the error is about; `u32::MAX` if none.
    uint32_t op_index;
    // Code of the vendor's runtime, 0 if none.
    int64_t vendor_code;
    // Zero-terminated UTF-8: expected, found, what to do.
    uint8_t message[QHAL_ERROR_TEXT];
} qhal_error;

// Static facts of a plugin; reading them has no side effect.
typedef struct qhal_manifest {
    // Size of this struct.
    uint32_t struct_size;
    // ABI major that the plugin was built with.
    uint32_t abi_major;
    // ABI minor that the plugin was built with.
    uint32_t abi_minor;
    // Oldest host minor that the plugin accepts.
    uint32_t min_host_minor;
    // Short name, used in `--device name:index`.
    struct qhal_str name;
    // Vendor, for people.
    struct qhal_str vendor;
    // Version of the plugin (semver).
    struct qhal_str version;
    // Build identity, for caches and reports.
    struct qhal_str build_id;
    // `QHAL_KIND_*`.
    uint32_t kind;
    // 0 none, 1 address, 2 thread, 3 memory sanitizer.
    uint32_t sanitizer;
    // CPU features that must be present before the plugin may be used (`QHAL_CPU_*`).
    uint64_t cpu_features;
    // Rank among plugins that serve the same device; higher wins.
    uint32_t score;
    // Zero.
    uint32_t reserved;
} qhal_manifest;

// Identity of a device. It is a field of `qhal_device_info`, so it cannot grow within a major version.
typedef struct qhal_device_id {
    // Size of this struct.
    uint32_t struct_size;
    // Index in the plugin.
    uint32_t index;
    // Stable unique id, zero where there is none.
    uint8_t uuid[16];
    // PCI domain, bus, device, function in bits 32.., 16.., 8.., 0..; `u64::MAX` if none.
    uint64_t bus_address;
} qhal_device_id;

// What can be told of a device without opening it.
typedef struct qhal_device_info {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_KIND_*`.
    uint32_t kind;
    // Identity.
    struct qhal_device_id id;
    // Name for people, zero-terminated.
    uint8_t name[64];
    // Name for caches: changes when results or speed may change. Zero-terminated. What comes before a colon, if there is one, is
    // the device's model, several names with slashes between them: the host chooses by it among devices of different models.
    uint8_t fingerprint[64];
    // Driver and firmware version, zero-terminated.
    uint8_t driver[64];
    // Memory in bytes, 0 unknown.
    uint64_t memory_total;
} qhal_device_info;

// What a device can do with one dtype.
typedef struct qhal_dtype_caps {
    // Size of this struct.
    uint32_t struct_size;
    // Code of `ops`.
    uint32_t dtype;
    // `QHAL_DTYPE_CAN_*` bits.
    uint32_t bits;
    // 0 unknown, 1 declared by a data sheet, 2 measured.
    uint32_t peak_source;
    // Peak operations per second (a multiply-add is two), 0 unknown.
    double peak_ops;
} qhal_dtype_caps;

// Constant facts of an open device. A field counts only if its bit is in `valid_fields`.
typedef struct qhal_device_caps {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_KIND_*`.
    uint32_t kind;
    // `QHAL_CAPS_*` bits of the fields that hold a value.
    uint64_t valid_fields;
    // `QHAL_CAPS_*` bits of the fields that are estimates.
    uint64_t estimated_fields;
    // Memory in bytes.
    uint64_t memory_total;
    // Largest single allocation.
    uint64_t max_allocation;
    // Alignment that every slice's offset needs beyond the natural one (the element's size; 1 for block formats).
    uint64_t buffer_alignment;
    // Granularity of `vmm` commits.
    uint64_t vmm_granularity;
    // Cores, compute units or clusters.
    uint32_t compute_units;
    // Bytes of a vector register, or threads of a warp.
    uint32_t vector_width;
    // Tile of the matrix unit: rows, columns, depth; zero where there is none.
    uint32_t matrix_tile[3];
    // NUMA node, `u32::MAX` unknown.
    uint32_t numa_node;
    // Cache bytes per level, 0 where there is none.
    uint64_t cache_bytes[4];
    // Scratch memory per compute unit.
    uint64_t scratch_bytes;
    // `QHAL_FEATURE_*`.
    uint64_t features;
    // Peak memory bandwidth in bytes per second.
    double bandwidth;
    // 0 unknown, 1 declared, 2 measured.
    uint32_t bandwidth_source;
    // Entries of `dtypes`.
    uint32_t num_dtypes;
    // Table of dtypes, valid as long as the device is open.
    const struct qhal_dtype_caps *dtypes;
} qhal_device_caps;

// State of a device at a moment. A field counts only if its bit is in `valid_fields` (bit n = n-th field after it).
typedef struct qhal_health {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_HEALTH_*`.
    uint32_t state;
    // Which of the following fields hold a value.
    uint64_t valid_fields;
    // Bit 0: free memory in bytes.
    uint64_t memory_free;
    // Bit 1: used memory in bytes.
    uint64_t memory_used;
    // Bit 2: memory held by the driver or allocator but unused.
    uint64_t memory_reserved;
    // Bit 3: utilisation of compute, 0..1.
    double utilisation;
    // Bit 4: degrees Celsius.
    double temperature;
    // Bit 5: watts.
    double power;
    // Bit 6: reasons for throttling, vendor-defined bits.
    uint64_t throttle_reasons;
    // Bit 7: corrected memory errors.
    uint64_t memory_errors_corrected;
    // Bit 8: uncorrected memory errors.
    uint64_t memory_errors_uncorrected;
    // Bit 9: link errors.
    uint64_t link_errors;
    // Bit 10: host time of the last sign of progress.
    uint64_t heartbeat_ns;
    // Bit 11: last sticky error.
    int64_t last_error;
} qhal_health;

// A directed link between two devices.
typedef struct qhal_link {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_LINK_*`.
    uint32_t class_;
    // Bit 0 copy, 1 load/store, 2 coherent, 3 atomics.
    uint32_t flags;
    // Hops.
    uint32_t hops;
    // Bytes per second, 0 unknown.
    double bandwidth;
    // Nanoseconds, 0 unknown.
    double latency_ns;
} qhal_link;

// Wanted memory.
typedef struct qhal_buffer_desc {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_MEMORY_*` bits.
    uint32_t memory;
    // Bytes.
    uint64_t size;
    // Power of two; 0 = the device's own.
    uint64_t alignment;
    // `QHAL_USAGE_*` bits.
    uint32_t usage;
    // `QHAL_SCOPE_*`.
    uint32_t scope;
    // Expected final size in bytes for what grows, 0 unknown.
    uint64_t growth_hint;
    // Preferred NUMA node, `u32::MAX` any.
    uint32_t numa_node;
    // Zero.
    uint32_t reserved;
    // For reports.
    struct qhal_str name;
} qhal_buffer_desc;

// Memory that exists already.
typedef struct qhal_import_desc {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_IMPORT_*`.
    uint32_t kind;
    // Host address, for `QHAL_IMPORT_HOST`.
    void *host;
    // Descriptor, for `QHAL_IMPORT_DMABUF`.
    int64_t fd;
    // Buffer of another device, for `QHAL_IMPORT_PEER`.
    qhal_buffer *peer;
    // Bytes.
    uint64_t size;
    // `QHAL_ACCESS_*` bits.
    uint32_t access;
    // `QHAL_USAGE_*` bits.
    uint32_t usage;
    // For reports.
    struct qhal_str name;
} qhal_import_desc;

// Wanted queue.
typedef struct qhal_stream_desc {
    // Size of this struct.
    uint32_t struct_size;
    // 0 normal, positive more urgent.
    int32_t priority;
    // For reports.
    struct qhal_str name;
} qhal_stream_desc;

// A copy of `rows` runs of `row_bytes`. One row is a plain copy. A side is a slice, or host memory if its buffer is null.
typedef struct qhal_copy_desc {
    // Size of this struct.
    uint32_t struct_size;
    // Zero.
    uint32_t flags;
    // Target, unless `dst_host` is set.
    struct qhal_slice dst;
    // Source, unless `src_host` is set.
    struct qhal_slice src;
    // Host target or null; must stay valid until the copy is done.
    void *dst_host;
    // Host source or null; must stay valid until the copy is done.
    const void *src_host;
    // Bytes of a row.
    uint64_t row_bytes;
    // Rows.
    uint64_t rows;
    // Bytes from row to row in the target.
    uint64_t dst_pitch;
    // Bytes from row to row in the source.
    uint64_t src_pitch;
} qhal_copy_desc;

// A tensor operand. Dimension `i` is fixed if `dim_symbol[i]` is 0; otherwise its value at launch is
// `symbol_values[dim_symbol[i] - 1]`, within `dim_min..=dim_max`, and `dims[i]` holds an expected value.
typedef struct qhal_tensor_desc {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_DTYPE` code of `ops`.
    uint32_t dtype;
    // Number of dimensions.
    uint32_t rank;
    // `QHAL_QUANT_*`.
    uint32_t quant_scheme;
    // Sizes, outermost first.
    int64_t dims[QHAL_MAX_RANK];
    // Elements from one index to the next; the innermost is 1. 0 = dense at the sizes of each launch, so that inner
    // dimensions may be symbols. Block-quantised tensors are dense.
    int64_t strides[QHAL_MAX_RANK];
    // Smallest value of each dimension.
    int64_t dim_min[QHAL_MAX_RANK];
    // Largest value of each dimension.
    int64_t dim_max[QHAL_MAX_RANK];
    // 0, or 1 + index of a symbol.
    uint32_t dim_symbol[QHAL_MAX_RANK];
    // 0 = as in the file; otherwise a packed layout that a plan of the same device announced.
    uint32_t layout_id;
    // Zero.
    uint32_t flags;
    // Block geometry of a scaled scheme: rows, columns.
    uint32_t block[2];
} qhal_tensor_desc;

// Something small done to the result while it is in registers.
typedef struct qhal_epilogue {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_EPILOGUE_*` of `ops`.
    uint32_t kind;
    // Operand that it reads, `u32::MAX` none.
    uint32_t input;
    // Kind-specific.
    uint32_t param;
} qhal_epilogue;

// One op.
typedef struct qhal_op_desc {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_OP_*` of `ops`.
    uint32_t op_kind;
    // Version of the op's definition.
    uint32_t op_version;
    // `QHAL_PHASE_*`.
    uint32_t phase;
    // `QHAL_COMPUTE_*`: the form in which products are formed.
    uint32_t compute;
    // DType code of accumulators.
    uint32_t accumulate;
    // `QHAL_TOLERANCE_*`.
    uint32_t tolerance;
    // Operands read.
    uint32_t num_inputs;
    // Operands written.
    uint32_t num_outputs;
    // Attributes.
    uint32_t num_attrs;
    // Epilogues, in order.
    uint32_t num_epilogues;
    // Symbols that launches give values for.
    uint32_t num_symbols;
    // `num_inputs` descriptions.
    const struct qhal_tensor_desc *inputs;
    // `num_outputs` descriptions.
    const struct qhal_tensor_desc *outputs;
    // `num_attrs` attributes.
    const struct qhal_attr *attrs;
    // `num_epilogues` epilogues.
    const struct qhal_epilogue *epilogues;
    // Reserved for extensions, null.
    const void *next;
} qhal_op_desc;

// Answer of `qhal_plugin_api::op_supports`.
typedef struct qhal_support {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_SUPPORT_*`.
    uint32_t level;
    // Estimate at the expected dims, 0 unknown.
    double estimated_ns;
    // Bytes moved at the expected dims, 0 unknown.
    double estimated_bytes;
    // Why not, zero-terminated.
    uint8_t reason[128];
} qhal_support;

// Wishes for a plan.
typedef struct qhal_plan_opts {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_PLAN_*` bits that the plan must have.
    uint32_t required_flags;
    // Most bytes of workspace, 0 no limit.
    uint64_t max_workspace;
} qhal_plan_opts;

// What a plan needs and promises.
typedef struct qhal_plan_info {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_PLAN_*` bits.
    uint32_t flags;
    // Bit n: output 0 may share memory with input n.
    uint64_t in_place;
    // Bytes of workspace at the largest dims.
    uint64_t workspace_bytes;
    // Alignment of the workspace.
    uint64_t workspace_alignment;
    // Bytes of the packed form per input, 0 = takes it as it is.
    uint64_t packed_bytes[QHAL_MAX_PACKED];
    // Identity of the packed form per input: equal ids and sources give equal bytes.
    uint32_t packed_layout[QHAL_MAX_PACKED];
    // Operations at the expected dims.
    double flops;
    // Bytes read at the expected dims.
    double bytes_read;
    // Bytes written at the expected dims.
    double bytes_written;
    // Kernel chosen, zero-terminated.
    uint8_t kernel[64];
    // Identity for the tuning store.
    uint64_t content_hash;
} qhal_plan_info;

// Operands and sizes of one launch. Order and number of slices are those of the description.
typedef struct qhal_launch_args {
    // Size of this struct.
    uint32_t struct_size;
    // Entries of `inputs`.
    uint32_t num_inputs;
    // Entries of `outputs`.
    uint32_t num_outputs;
    // Entries of `symbol_values`.
    uint32_t num_symbols;
    // Operands read.
    const struct qhal_slice *inputs;
    // Operands written.
    const struct qhal_slice *outputs;
    // Workspace.
    struct qhal_slice workspace;
    // Value of each symbol.
    const int64_t *symbol_values;
} qhal_launch_args;

// Untyped user data of a callback.
typedef void *qhal_user;

// Body of a parallel loop: (user, task index).
typedef void (*qhal_task_fn)(qhal_user, uint64_t);

// What the host offers to a plugin.
typedef struct qhal_host_api {
    // Size of this struct.
    uint32_t struct_size;
    // Most tasks that run at the same time in `parallel_for`, the caller's thread included.
    uint32_t num_threads;
    // First argument of every function below.
    void *context;
    // (context, level 1 error .. 5 trace, target, text).
    void (*log)(void*, uint32_t, struct qhal_str, struct qhal_str);
    // (context, bytes, alignment) to memory or null.
    void *(*host_alloc)(void*, uint64_t, uint64_t);
    // (context, memory, bytes, alignment).
    void (*host_free)(void*, void*, uint64_t, uint64_t);
    // (context, tasks, body, user): runs the body once for each task on the host's compute pool, returns when all are
    // done; what they wrote is visible to the caller. The body must not panic or call `parallel_for`.
    void (*parallel_for)(void*, uint64_t, qhal_task_fn, qhal_user);
    // (context, key, out, capacity) to the value's length, -1 if there is none.
    int64_t (*tuning_get)(void*, struct qhal_str, uint8_t*, uint64_t);
    // (context, key, value).
    void (*tuning_put)(void*, struct qhal_str, struct qhal_str);
    // (context, name) to a token.
    uint64_t (*trace_begin)(void*, struct qhal_str);
    // (context, token).
    void (*trace_end)(void*, uint64_t);
    // Monotonic clock.
    uint64_t (*monotonic_ns)(void*);
    // Seed for whatever the plugin randomises.
    uint64_t (*random_seed)(void*);
} qhal_host_api;

// The thirty functions of a plugin. The last argument `err` of each may be null. Mandatory entries are marked (M); the
// others may be null and are then refused or emulated by the host.
typedef struct qhal_plugin_api {
    // Size of this struct.
    uint32_t struct_size;
    // ABI minor that the table was built with.
    uint32_t abi_minor;
    // (M) Once, before anything else.
    qhal_status (*plugin_init)(const struct qhal_kv*, uint32_t, struct qhal_error*);
    // (M) Once, after all devices are closed.
    qhal_status (*plugin_shutdown)(struct qhal_error*);
    // (M) How many devices.
    qhal_status (*device_count)(uint32_t*, struct qhal_error*);
    // (M) Cheap facts; creates no context.
    qhal_status (*device_info)(uint32_t, struct qhal_device_info*, struct qhal_error*);
    // (M) Opens a device.
    qhal_status (*device_open)(uint32_t, const struct qhal_kv*, uint32_t, qhal_device**, struct qhal_error*);
    // (M) Closes it; every child is gone by then.
    qhal_status (*device_close)(qhal_device*, struct qhal_error*);
    // (M) Constant facts.
    qhal_status (*device_caps)(qhal_device*, struct qhal_device_caps*, struct qhal_error*);
    // State now; never blocks; any thread, during work.
    qhal_status (*device_health)(qhal_device*, struct qhal_health*, struct qhal_error*);
    // Link to a peer.
    qhal_status (*device_link)(qhal_device*, const struct qhal_device_id*, struct qhal_link*, struct qhal_error*);
    // Extension table by id (`QHAL_EXT_*`) and least version; the device may be null.
    qhal_status (*query_extension)(qhal_device*, uint32_t, uint32_t, const void**, struct qhal_error*);
    // (M) Memory of undefined content.
    qhal_status (*buffer_alloc)(qhal_device*, const struct qhal_buffer_desc*, qhal_buffer**, struct qhal_error*);
    // Wraps existing memory.
    qhal_status (*buffer_import)(qhal_device*, const struct qhal_import_desc*, qhal_buffer**, struct qhal_error*);
    // (M) The caller has proved that it is idle.
    qhal_status (*buffer_free)(qhal_buffer*, struct qhal_error*);
    // (buffer, offset, length, access) to a host address.
    qhal_status (*buffer_map)(qhal_buffer*, uint64_t, uint64_t, uint32_t, void**, struct qhal_error*);
    // Ends the mapping.
    qhal_status (*buffer_unmap)(qhal_buffer*, struct qhal_error*);
    // (M) A queue.
    qhal_status (*stream_create)(qhal_device*, const struct qhal_stream_desc*, qhal_stream**, struct qhal_error*);
    // (M) Destroys an idle queue.
    qhal_status (*stream_destroy)(qhal_stream*, struct qhal_error*);
    // (M) Waits up to so many nanoseconds, 0 polls; OK, NOT_READY, or the stream's first error.
    qhal_status (*stream_wait)(qhal_stream*, uint64_t, struct qhal_error*);
    // (M) Enqueues a copy.
    qhal_status (*copy)(qhal_stream*, const struct qhal_copy_desc*, struct qhal_error*);
    // Enqueues a fill with a pattern of 1, 2, 4, 8 or 16 bytes.
    qhal_status (*fill)(qhal_stream*, struct qhal_slice, const void*, uint32_t, struct qhal_error*);
    // A marker.
    qhal_status (*event_create)(qhal_device*, uint32_t, qhal_event**, struct qhal_error*);
    // Destroys it.
    qhal_status (*event_destroy)(qhal_event*, struct qhal_error*);
    // Marks the work enqueued so far.
    qhal_status (*event_record)(qhal_stream*, qhal_event*, struct qhal_error*);
    // Later work on the stream waits for the event and inherits its failure.
    qhal_status (*stream_wait_event)(qhal_stream*, qhal_event*, struct qhal_error*);
    // The host waits; as `stream_wait`.
    qhal_status (*event_wait)(qhal_event*, uint64_t, struct qhal_error*);
    // (M) Pure and fast; allocates nothing on the device. OK with level NO and a reason if `plan_create` would refuse.
    qhal_status (*op_supports)(qhal_device*, const struct qhal_op_desc*, struct qhal_support*, struct qhal_error*);
    // (M) Prepares an op for ranges of shapes.
    qhal_status (*plan_create)(qhal_device*,
                               const struct qhal_op_desc*,
                               const struct qhal_plan_opts*,
                               qhal_plan**,
                               struct qhal_plan_info*,
                               struct qhal_error*);
    // One-time layout of a weight: (plan, stream, input index, source as in the file, target of `packed_bytes`).
    qhal_status (*plan_prepack)(qhal_plan*,
                                qhal_stream*,
                                uint32_t,
                                struct qhal_slice,
                                struct qhal_slice,
                                struct qhal_error*);
    // (M) Enqueues the op.
    qhal_status (*plan_launch)(qhal_plan*, qhal_stream*, const struct qhal_launch_args*, struct qhal_error*);
    // (M) Destroys an idle plan.
    qhal_status (*plan_destroy)(qhal_plan*, struct qhal_error*);
} qhal_plugin_api;

// Extension `vmm`: address space first, memory later. A reserved buffer is used like any other where it is committed,
// and freed with `buffer_free`. Offsets and lengths are multiples of `vmm_granularity`.
typedef struct qhal_vmm_api {
    // Size of this struct.
    uint32_t struct_size;
    // Version of the extension.
    uint32_t version;
    // Reserves `desc.size` bytes of addresses.
    qhal_status (*reserve)(qhal_device*, const struct qhal_buffer_desc*, qhal_buffer**, struct qhal_error*);
    // Backs (offset, length) with zeroed memory.
    qhal_status (*commit)(qhal_buffer*, uint64_t, uint64_t, struct qhal_error*);
    // Gives the memory of (offset, length) back.
    qhal_status (*decommit)(qhal_buffer*, uint64_t, uint64_t, struct qhal_error*);
} qhal_vmm_api;

// A way to compute launches of some sizes. Results are the same bits whichever variant is taken.
typedef struct qhal_variant {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_VARIANT_*` bits.
    uint32_t flags;
    // Index of the symbol whose value decides, `u32::MAX` if the variant holds for every launch.
    uint32_t symbol;
    // Zero.
    uint32_t reserved;
    // Smallest value of the symbol.
    int64_t min;
    // Largest value of the symbol.
    int64_t max;
    // Family of kernels, zero-terminated.
    uint8_t family[32];
    // Tiling within the family, zero-terminated.
    uint8_t tiling[64];
    // What `qhal_variants_api` is asked with to get it, zero-terminated.
    uint8_t name[32];
} qhal_variant;

// Extension `variants`: which kernels a plan takes for which sizes, which others it could take, and plans that take those.
typedef struct qhal_variants_api {
    // Size of this struct.
    uint32_t struct_size;
    // Version of the extension.
    uint32_t version;
    // Variant number `index` of a plan: those that are taken first, then those that could be. OUT_OF_RANGE behind the last.
    qhal_status (*plan_variant)(qhal_plan*, uint32_t, struct qhal_variant*, struct qhal_error*);
    // As `plan_create`, with the variant of this name wherever it applies; UNIMPLEMENTED if the op has no such variant.
    qhal_status (*plan_create_as)(qhal_device*,
                                  const struct qhal_op_desc*,
                                  const struct qhal_plan_opts*,
                                  struct qhal_str,
                                  qhal_plan**,
                                  struct qhal_plan_info*,
                                  struct qhal_error*);
} qhal_variants_api;

// What one replay uses in place of what was recorded. An operand that was recorded as absent stays absent, and none becomes absent.
typedef struct qhal_patch {
    // Size of this struct.
    uint32_t struct_size;
    // The command, counted from 0 in the order of recording.
    uint32_t command;
    // `QHAL_PATCH_*`.
    uint32_t kind;
    // Operand or symbol.
    uint32_t index;
    // The slice, unless a symbol is patched.
    struct qhal_slice slice;
    // The value of a symbol.
    int64_t value;
} qhal_patch;

// Extension `cmdlist`: launches and copies recorded once and enqueued together as often as wanted. A replay gives the bits that the
// same launches one by one would give. Only plans with `QHAL_PLAN_CAPTURE_SAFE` can be recorded.
//
// A list belongs to a device and is used by one thread at a time. What is recorded is copied: arrays of arguments may go at once. Plans
// and buffers that a list names live until it is destroyed, those that a patch names until its replay is done.
typedef struct qhal_cmdlist_api {
    // Size of this struct.
    uint32_t struct_size;
    // Version of the extension, 1.
    uint32_t version;
    // An empty list that takes commands.
    qhal_status (*begin)(qhal_device*, qhal_cmdlist**, struct qhal_error*);
    // Adds a launch; nothing is enqueued. FAILED_PRECONDITION if the plan is not capture-safe, or the list has ended.
    qhal_status (*record_launch)(qhal_cmdlist*, qhal_plan*, const struct qhal_launch_args*, struct qhal_error*);
    // Adds a copy within the device; host memory is refused. FAILED_PRECONDITION if the list has ended.
    qhal_status (*record_copy)(qhal_cmdlist*, const struct qhal_copy_desc*, struct qhal_error*);
    // The list takes no more commands and can be replayed.
    qhal_status (*end)(qhal_cmdlist*, struct qhal_error*);
    // Enqueues the commands in order on a stream of the list's device, with `count` patches that hold for this replay alone, sorted by
    // command. Allocates nothing on the device and does not wait. A patch that cannot be is refused before anything is enqueued.
    // FAILED_PRECONDITION if the list has not ended.
    qhal_status (*replay)(qhal_cmdlist*, qhal_stream*, const struct qhal_patch*, uint32_t, struct qhal_error*);
    // Destroys it. Replays that are pending end as they would have, or this is refused with FAILED_PRECONDITION and the list stays.
    qhal_status (*destroy)(qhal_cmdlist*, struct qhal_error*);
} qhal_cmdlist_api;

// Wanted communicator.
typedef struct qhal_comm_desc {
    // Size of this struct.
    uint32_t struct_size;
    // Number of ranks.
    uint32_t num_devices;
    // The device of each rank, all of this plugin.
    qhal_device *const *devices;
    // Nanoseconds that a rank waits for the others before the communicator fails; 0 = the plugin's own limit.
    uint64_t timeout_ns;
} qhal_comm_desc;

// One rank's part of a collective.
typedef struct qhal_collective_desc {
    // Size of this struct.
    uint32_t struct_size;
    // `QHAL_COLLECTIVE_*`.
    uint32_t kind;
    // Type of the elements; what is only moved may be of any plain type.
    uint32_t dtype;
    // `QHAL_REDUCE_*` for all_reduce and reduce_scatter, else 0.
    uint32_t reduction;
    // Root of a broadcast, other side of send and recv, else 0.
    uint32_t peer;
    // Zero.
    uint32_t flags;
    // Elements, as the kind says.
    uint64_t count;
    // What this rank gives.
    struct qhal_slice src;
    // What this rank gets. It may be the very source of all_reduce and broadcast; the source of all_gather may be this rank's part of it,
    // and it may be this rank's part of the source of reduce_scatter. Otherwise the two do not overlap. Offsets are multiples of the
    // device's buffer alignment, so these two are in place only where a part's size is one too.
    struct qhal_slice dst;
} qhal_collective_desc;

// Extension `collectives`: exchange between devices of one plugin.
//
// Each rank enqueues its part on a stream of its device, from any thread; it is done when all ranks' parts are there and data has moved.
// The n-th collective that is enqueued for a rank belongs with the n-th of every other rank (send and recv: with the n-th of the same
// pair). On a device with `QHAL_FEATURE_INLINE` the call returns when the collective is done, so that each rank needs a thread.
//
// **Order.** How a result is summed depends on the number of ranks, the count and the element's position alone: the same inputs give the
// same bits whichever rank comes first, and every rank gets the same bits.
//
// **Failure.** Ranks whose parts do not fit each other, a rank that does not come in time, and one whose stream or device fails make the
// communicator fail: every rank's stream gets an error (INVALID_ARGUMENT, DEADLINE_EXCEEDED, ABORTED; DEVICE_LOST where the device itself
// is lost), later collectives are refused with it, and nobody waits for ever. A failed communicator can only be destroyed.
typedef struct qhal_collectives_api {
    // Size of this struct.
    uint32_t struct_size;
    // Version of the extension, 1.
    uint32_t version;
    // A communicator. UNIMPLEMENTED for devices that the plugin cannot join, such as one that is named twice.
    qhal_status (*comm_create)(const struct qhal_comm_desc*, qhal_comm**, struct qhal_error*);
    // Destroys it; no collective of it is pending.
    qhal_status (*comm_destroy)(qhal_comm*, struct qhal_error*);
    // Whether a collective of this kind, type, reduction and count can be enqueued, and its estimated time and bytes that a rank sends;
    // slices are not looked at. OK with level NO and a reason if not.
    qhal_status (*supports)(qhal_comm*, const struct qhal_collective_desc*, struct qhal_support*, struct qhal_error*);
    // Enqueues a rank's part: (communicator, rank, stream of that rank's device, part).
    qhal_status (*enqueue)(qhal_comm*, uint32_t, qhal_stream*, const struct qhal_collective_desc*, struct qhal_error*);
} qhal_collectives_api;

// Done.
#define QHAL_OK 0

// Stopped at the caller's wish.
#define QHAL_CANCELLED 1

// No better code fits.
#define QHAL_UNKNOWN 2

// An argument is wrong whatever the state.
#define QHAL_INVALID_ARGUMENT 3

// A time limit passed.
#define QHAL_DEADLINE_EXCEEDED 4

// Something named does not exist.
#define QHAL_NOT_FOUND 5

// Something to be created exists.
#define QHAL_ALREADY_EXISTS 6

// The operating system or the driver refuses.
#define QHAL_PERMISSION_DENIED 7

// Out of memory or of another bounded resource.
#define QHAL_RESOURCE_EXHAUSTED 8

// The object is in the wrong state for this call.
#define QHAL_FAILED_PRECONDITION 9

// Given up because of a conflict; may be tried again.
#define QHAL_ABORTED 10

// An offset, size or shape is outside of what was planned or allocated.
#define QHAL_OUT_OF_RANGE 11

// The plugin does not have this function, op, type or shape.
#define QHAL_UNIMPLEMENTED 12

// A defect of the plugin.
#define QHAL_INTERNAL 13

// Not possible at the moment.
#define QHAL_UNAVAILABLE 14

// Data is lost or corrupt.
#define QHAL_DATA_LOSS 15

// The device is gone; every object of it is dead.
#define QHAL_DEVICE_LOST 17

// Polled work is still running; not an error.
#define QHAL_NOT_READY 18

#if defined(_WIN32)
#define QHAL_EXPORT __declspec(dllexport)
#else
#define QHAL_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// The two symbols that a plugin exports. The manifest is static data: no side effects, no driver call.
QHAL_EXPORT const qhal_manifest *qhal_plugin_manifest(void);
// The table, or null if the plugin declines this host. The host table stays valid for the life of the process.
QHAL_EXPORT const qhal_plugin_api *qhal_plugin_query(uint32_t host_major,
                                                     uint32_t host_minor,
                                                     const qhal_host_api *host);

#ifdef __cplusplus
}
#endif

#endif  /* QWEN_HAL_H */
