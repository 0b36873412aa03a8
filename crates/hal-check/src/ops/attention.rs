//! The paged cache: what is appended is attended to. The inner order of a cache block is the device's own, so appending is
//! tested through attention; the joined layout of latent attention is fixed and compared byte by byte in `functions`.

use half::{bf16, f16};
use qwen_hal::abi::ops::*;
use qwen_hal::{Dim, OpDesc, TensorDesc};

use super::{Build, T, f, i, ints, n, reals, wide};
use crate::case::{Body, Case};
use crate::execute::{Company, Expected, Made, Operand};
use crate::limits::{ATTENTION, ATTENTION_BF16, EXACT};
use crate::oracle;
use crate::random::Random;

const BLOCK: usize = 4;
/// Tokens of a block for products of bfloat16, which devices may want in sixteens.
const WIDE_BLOCK: usize = 16;
const BLOCKS: usize = 16;
/// Sequences of a step.
const S: Dim = Dim::symbol(1, 1, 4);
/// Columns of the block table.
const B: Dim = Dim::symbol(2, 1, 8);

/// (query tokens of this step, cached tokens with this step's) for each sequence.
type Sequences = &'static [(usize, usize)];

const PREFILL: Sequences = &[(5, 5)];
const DECODE: Sequences = &[(1, 9), (1, 1), (1, 14)];
const CHUNK: Sequences = &[(4, 11)];
const MIXED: Sequences = &[(3, 10), (1, 6), (5, 5)];

const CACHES: [(u32, &str); 3] = [(QHAL_DTYPE_F32, "f32"), (QHAL_DTYPE_F16, "f16"), (QHAL_DTYPE_BF16, "bf16")];

/// A value as the cache keeps it.
fn stored(dtype: u32, value: f32) -> f64 {
    match dtype {
        QHAL_DTYPE_F16 => f16::from_f32(value).to_f64(),
        QHAL_DTYPE_BF16 => bf16::from_f32(value).to_f64(),
        _ => f64::from(value),
    }
}

/// Where tokens lie: each sequence has blocks of its own, in no order.
struct Paging {
    table: Vec<Vec<i32>>,
    slots: Vec<i32>,
    query_start: Vec<i32>,
    context_len: Vec<i32>,
    columns: usize,
}

impl Paging {
    fn new(sequences: Sequences) -> Self {
        Self::with(sequences, BLOCK)
    }
    /// With blocks of so many tokens.
    fn with(sequences: Sequences, block_size: usize) -> Self {
        // 7 is prime to 16, so this visits every block once.
        let mut free = (0..BLOCKS).map(|at| (at * 7 + 3) % BLOCKS);
        let columns = sequences.iter().map(|(_, len)| len.div_ceil(block_size)).max().unwrap_or(1);
        let (mut table, mut slots, mut query_start) = (Vec::new(), Vec::new(), vec![0]);
        for (queries, len) in sequences {
            let blocks: Vec<i32> = free.by_ref().take(len.div_ceil(block_size)).map(|block| block as i32).collect();
            slots.extend((0..*len).map(|p| blocks[p / block_size] * block_size as i32 + (p % block_size) as i32));
            let mut row = blocks;
            // Behind the context anything may stand.
            row.resize(columns, 0);
            table.push(row);
            query_start.push(query_start[query_start.len() - 1] + *queries as i32);
        }
        let context_len = sequences.iter().map(|(_, len)| *len as i32).collect();
        Self { table, slots, query_start, context_len, columns }
    }
    fn symbols(&self) -> Vec<i64> {
        let rows = self.query_start[self.query_start.len() - 1];
        vec![i64::from(rows), self.context_len.len() as i64, self.columns as i64]
    }
    fn operands(&self) -> [Operand; 3] {
        [ints(&self.query_start), ints(&self.context_len), ints(&self.table.concat())]
    }
    fn rows(&self, sequence: usize) -> std::ops::Range<usize> {
        self.query_start[sequence] as usize..self.query_start[sequence + 1] as usize
    }
    /// (sequence, position) of each query row.
    fn positions(&self) -> Vec<(usize, usize)> {
        let of = |s: usize| {
            let rows = self.rows(s);
            let first = self.context_len[s] as usize - rows.len();
            rows.enumerate().map(move |(at, _)| (s, first + at))
        };
        (0..self.table.len()).flat_map(of).collect()
    }
    /// First appended token of each sequence.
    fn first(&self, sequence: usize) -> usize {
        self.context_len[..sequence].iter().map(|len| *len as usize).sum()
    }
}

struct Shape {
    block: usize,
    kv_heads: usize,
    head: usize,
    value: usize,
    joined: bool,
    dtype: u32,
}

impl Shape {
    fn cache(&self) -> TensorDesc {
        TensorDesc::new(self.dtype, &[n(BLOCKS), n(self.block * self.kv_heads * (self.head + self.value))])
    }
    /// Appends `tokens` keys and values; one token more has no slot and is skipped.
    fn append(&self, k: &[f32], v: &[f32], slots: &[i32]) -> Build {
        // More rows than a step of the other ops has.
        let rows = Dim::symbol(0, 1, 64);
        let (mut k, mut v, mut slots) = (k.to_vec(), v.to_vec(), slots.to_vec());
        k.extend(vec![1e9; self.kv_heads * self.head]);
        v.extend(vec![1e9; self.kv_heads * self.value]);
        slots.push(-1);
        Build::new(OpDesc::new(QHAL_OP_KV_APPEND))
            .int(QHAL_ATTR_NUM_KV_HEADS, self.kv_heads)
            .int(QHAL_ATTR_HEAD_DIM, self.head)
            .int(QHAL_ATTR_VALUE_DIM, self.value)
            .int(QHAL_ATTR_BLOCK_SIZE, self.block)
            .int(QHAL_ATTR_JOINED, usize::from(self.joined))
            .input(f(&[rows, n(self.kv_heads * self.head)]), reals(&k))
            .input(f(&[rows, n(self.kv_heads * self.value)]), reals(&v))
            .input(i(&[rows]), ints(&slots))
            .output(self.cache())
    }
}

fn made(build: Build, rows: usize) -> Operand {
    Operand::Made(Box::new(Made { op: build.op, inputs: build.inputs, symbols: vec![rows as i64] }))
}

/// Each sequence alone must give the bits that it gives in company.
fn by_sequences(mut case: Case, paging: &Paging, q: &[f32], q_cols: usize, out_cols: usize) -> Case {
    let Body::Op(op) = &mut case.body else { return case };
    for s in 0..paging.table.len() {
        let rows = paging.rows(s);
        let mut inputs = op.inputs.clone();
        let last = inputs.len() - 3;
        inputs[0] = reals(&q[rows.start * q_cols..rows.end * q_cols]);
        inputs[last] = ints(&[0, rows.len() as i32]);
        inputs[last + 1] = ints(&[paging.context_len[s]]);
        inputs[last + 2] = ints(&paging.table[s]);
        op.company.push(Company {
            inputs,
            symbols: vec![rows.len() as i64, 1, paging.columns as i64],
            at: rows.start * out_cols * 4..rows.end * out_cols * 4,
        });
    }
    case
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (dtype, dtype_name) in CACHES {
        for (sequences, name) in [(PREFILL, "prefill"), (DECODE, "decode"), (CHUNK, "chunk"), (MIXED, "mixed")] {
            cases.push(attention(
                (dtype, QHAL_COMPUTE_F32),
                sequences,
                &format!("attention/{dtype_name}.{name}"),
                (4, 2, 32, 0),
            ));
        }
    }
    cases.push(attention((QHAL_DTYPE_F16, QHAL_COMPUTE_F32), MIXED, "attention/f16.window", (4, 4, 16, 3)));
    cases.push(attention((QHAL_DTYPE_F16, QHAL_COMPUTE_F32), DECODE, "attention/f16.one_kv_head", (7, 1, 64, 0)));
    cases.push(attention((QHAL_DTYPE_F16, QHAL_COMPUTE_F32), DECODE, "attention/f16.head_of_80", (2, 2, 80, 0)));
    let pairs = (QHAL_DTYPE_BF16, QHAL_COMPUTE_BF16);
    for (sequences, name) in [(PREFILL, "prefill"), (DECODE, "decode"), (CHUNK, "chunk"), (MIXED, "mixed")] {
        cases.push(attention(pairs, sequences, &format!("attention/bf16.products_of_bf16.{name}"), (4, 2, 32, 0)));
    }
    cases.push(attention(pairs, MIXED, "attention/bf16.products_of_bf16.window", (4, 4, 16, 3)));
    for (dtype, name) in CACHES {
        let shape = Shape { block: BLOCK, kv_heads: 2, head: 16, value: 16, joined: false, dtype };
        let paging = Paging::new(MIXED);
        let mut random = Random::new(81);
        let tokens = paging.slots.len();
        let (k, v) = (random.f32s(tokens * 32), random.f32s(tokens * 32));
        let build = shape.append(&k, &v, &paging.slots);
        cases.push(build.case(1, format!("kv_append/{name}"), &[tokens as i64 + 1], Vec::new(), EXACT));
    }
    cases
}

fn attention(
    (dtype, compute): (u32, u32),
    sequences: Sequences,
    name: &str,
    (heads, kv_heads, dim, window): (usize, usize, usize, usize),
) -> Case {
    let (block, limit) = match compute {
        QHAL_COMPUTE_BF16 => (WIDE_BLOCK, ATTENTION_BF16),
        _ => (BLOCK, ATTENTION),
    };
    let paging = Paging::with(sequences, block);
    let shape = Shape { block, kv_heads, head: dim, value: dim, joined: false, dtype };
    let mut random = Random::new(82 + u64::from(dtype));
    let tokens = paging.slots.len();
    let (k, v) = (random.f32s(tokens * kv_heads * dim), random.f32s(tokens * kv_heads * dim));
    let positions = paging.positions();
    // Large enough for peaked scores.
    let q: Vec<f32> = random.f32s(positions.len() * heads * dim).iter().map(|q| q * 3.0).collect();
    let scale = 1.0 / (dim as f64).sqrt();
    let mut expected = Vec::new();
    for (row, (sequence, position)) in positions.iter().enumerate() {
        let seen = if window == 0 { 0 } else { (position + 1).saturating_sub(window) }..=*position;
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let of = |data: &[f32], p: usize| -> Vec<f64> {
                let at = ((paging.first(*sequence) + p) * kv_heads + kv_head) * dim;
                data[at..at + dim].iter().map(|value| stored(dtype, *value)).collect()
            };
            let keys: Vec<_> = seen.clone().map(|p| of(&k, p)).collect();
            let values: Vec<_> = seen.clone().map(|p| of(&v, p)).collect();
            let query = wide(&q[(row * heads + head) * dim..][..dim]);
            expected.extend(oracle::attend(&query, &keys, &values, scale));
        }
    }
    let [query_start, context_len, table] = paging.operands();
    let width = heads * dim;
    let build = Build::new(OpDesc::new(QHAL_OP_ATTENTION).compute(compute))
        .int(QHAL_ATTR_NUM_HEADS, heads)
        .int(QHAL_ATTR_NUM_KV_HEADS, kv_heads)
        .int(QHAL_ATTR_HEAD_DIM, dim)
        .int(QHAL_ATTR_VALUE_DIM, dim)
        .int(QHAL_ATTR_BLOCK_SIZE, block)
        .int(QHAL_ATTR_WINDOW, window)
        .real(QHAL_ATTR_SCALE, scale)
        .input(f(&[T, n(width)]), reals(&q))
        .input(shape.cache(), made(shape.append(&k, &v, &paging.slots), tokens + 1))
        .input(i(&[S]), query_start)
        .input(i(&[S]), context_len)
        .input(i(&[S, B]), table)
        .output(f(&[T, n(width)]));
    let case = build.case(1, name, &paging.symbols(), vec![Expected::Real(expected)], limit);
    by_sequences(case, &paging, &q, width, width)
}

pub(super) fn latent_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (form, form_name) in [(QHAL_MLA_EXPANDED, "expanded"), (QHAL_MLA_ABSORBED, "absorbed")] {
        for (dtype, dtype_name) in CACHES {
            for (sequences, name) in [(PREFILL, "prefill"), (DECODE, "decode"), (MIXED, "mixed")] {
                let name = format!("mla_attention/{form_name}.{dtype_name}.{name}");
                cases.push(latent(form, dtype, sequences, &name));
            }
        }
    }
    cases.push(joined_append());
    cases
}

/// The cache of latent attention has a fixed layout: per token the latent, then the rotary key. Every slot is written, so that
/// every byte is known.
fn joined_append() -> Case {
    let shape = Shape { block: BLOCK, kv_heads: 1, head: 12, value: 4, joined: true, dtype: QHAL_DTYPE_F16 };
    let tokens = BLOCKS * BLOCK - 1;
    let mut random = Random::new(85);
    let (c, k) = (random.f32s((tokens + 1) * 12), random.f32s((tokens + 1) * 4));
    let slots: Vec<i32> = (0..=tokens).map(|at| (at * 5 % (tokens + 1)) as i32).collect();
    let mut bytes = vec![0_u8; (tokens + 1) * 32];
    for (token, slot) in slots.iter().enumerate() {
        let values = c[token * 12..][..12].iter().chain(&k[token * 4..][..4]);
        for (at, value) in values.enumerate() {
            let to = *slot as usize * 32 + at * 2;
            bytes[to..to + 2].copy_from_slice(&f16::from_f32(*value).to_le_bytes());
        }
    }
    let rows = Dim::symbol(0, 1, 64);
    let build = Build::new(OpDesc::new(QHAL_OP_KV_APPEND))
        .int(QHAL_ATTR_NUM_KV_HEADS, 1)
        .int(QHAL_ATTR_HEAD_DIM, 12)
        .int(QHAL_ATTR_VALUE_DIM, 4)
        .int(QHAL_ATTR_BLOCK_SIZE, BLOCK)
        .int(QHAL_ATTR_JOINED, 1)
        .input(f(&[rows, n(12)]), reals(&c))
        .input(f(&[rows, n(4)]), reals(&k))
        .input(i(&[rows]), ints(&slots))
        .output(shape.cache());
    build.case(2, "kv_append/joined", &[tokens as i64 + 1], vec![Expected::Exact(bytes)], EXACT)
}

fn latent(form: i64, dtype: u32, sequences: Sequences, name: &str) -> Case {
    let (heads, nope, rope, value, latent) = (2_usize, 16_usize, 8_usize, 12_usize, 32_usize);
    let paging = Paging::new(sequences);
    let shape = Shape { block: BLOCK, kv_heads: 1, head: latent, value: rope, joined: true, dtype };
    let mut random = Random::new(91 + u64::from(dtype));
    let tokens = paging.slots.len();
    let (c, k_rope) = (random.f32s(tokens * latent), random.f32s(tokens * rope));
    let kv_b = random.f32s(heads * (nope + value) * latent);
    let positions = paging.positions();
    let q = random.f32s(positions.len() * heads * (nope + rope));
    let scale = 1.0 / ((nope + rope) as f64).sqrt();
    let mut expected = Vec::new();
    for (row, (sequence, position)) in positions.iter().enumerate() {
        let token = |p: usize| paging.first(*sequence) + p;
        let kept = |data: &[f32], width: usize, p: usize| -> Vec<f64> {
            data[token(p) * width..][..width].iter().map(|value| stored(dtype, *value)).collect()
        };
        for head in 0..heads {
            let weight = |at: usize| wide(&kv_b[(head * (nope + value) + at) * latent..][..latent]);
            let project = |p: usize, rows: std::ops::Range<usize>| -> Vec<f64> {
                let c = kept(&c, latent, p);
                rows.map(|at| oracle::dot(&weight(at), &c)).collect()
            };
            let key = |p: usize| [project(p, 0..nope), kept(&k_rope, rope, p)].concat();
            let keys: Vec<_> = (0..=*position).map(key).collect();
            let values: Vec<_> = (0..=*position).map(|p| project(p, nope..nope + value)).collect();
            let query = wide(&q[(row * heads + head) * (nope + rope)..][..nope + rope]);
            expected.extend(oracle::attend(&query, &keys, &values, scale));
        }
    }
    let [query_start, context_len, table] = paging.operands();
    let (q_cols, out_cols) = (heads * (nope + rope), heads * value);
    let build = Build::new(OpDesc::new(QHAL_OP_MLA_ATTENTION))
        .int(QHAL_ATTR_NUM_HEADS, heads)
        .int(QHAL_ATTR_NOPE_DIM, nope)
        .int(QHAL_ATTR_ROPE_DIM, rope)
        .int(QHAL_ATTR_VALUE_DIM, value)
        .int(QHAL_ATTR_LATENT_DIM, latent)
        .int(QHAL_ATTR_BLOCK_SIZE, BLOCK)
        .code(QHAL_ATTR_FORM, form)
        .real(QHAL_ATTR_SCALE, scale)
        .input(f(&[T, n(q_cols)]), reals(&q))
        .input(f(&[n(heads * (nope + value)), n(latent)]), reals(&kv_b))
        .input(shape.cache(), made(shape.append(&c, &k_rope, &paging.slots), tokens + 1))
        .input(i(&[S]), query_start)
        .input(i(&[S]), context_len)
        .input(i(&[S, B]), table)
        .output(f(&[T, n(out_cols)]));
    let case = build.case(2, name, &paging.symbols(), vec![Expected::Real(expected)], ATTENTION);
    by_sequences(case, &paging, &q, q_cols, out_cols)
}
