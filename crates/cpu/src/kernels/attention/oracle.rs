//! Attention written for clarity: f64, one row at a time, no tiles; and a paged cache to test with.

use qwen_formats::{DType, blocks};

use super::schedule::Sequences;
use crate::isa::Isa;
use crate::kernels::cache::{CacheView, CacheViewMut};
use crate::kernels::kv_append::{KvAppendArgs, kv_append};
use crate::kernels::testing::Random;
use crate::matrix::Matrix;
use crate::parallel::Serial;

/// Softmax(scale q.k) v over the given positions.
pub(crate) fn attend_row(q: &[f32], keys: &[Vec<f64>], values: &[Vec<f64>], scale: f64) -> Vec<f64> {
    let scores: Vec<f64> =
        keys.iter().map(|k| scale * q.iter().zip(k).map(|(&q, &k)| f64::from(q) * k).sum::<f64>()).collect();
    let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - best).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let dim = values.first().map_or(0, Vec::len);
    (0..dim).map(|d| weights.iter().zip(values).map(|(w, v)| w * v[d]).sum::<f64>() / sum).collect()
}

/// Cached keys and values of some sequences, with their place in blocks chosen at random.
pub(crate) struct Cache {
    pub(crate) args: KvAppendArgs,
    pub(crate) dtype: DType,
    pub(crate) bytes: Vec<u8>,
    pub(crate) block_bytes: usize,
    /// Table row of each sequence, unused entries -1.
    pub(crate) tables: Vec<Vec<i32>>,
    /// Per sequence the rows that were appended.
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl Cache {
    /// A cache that holds `contexts[s]` random tokens of sequence s. `data` gives contents, `layout` places.
    pub(crate) fn random(
        args: KvAppendArgs,
        dtype: DType,
        contexts: &[usize],
        data: &mut Random,
        layout: &mut Random,
    ) -> Self {
        let (k_cols, v_cols) = (args.num_key_value_heads * args.head_dim, args.num_key_value_heads * args.value_dim);
        let keys = contexts.iter().map(|&n| data.values(n * k_cols, 1.0)).collect();
        let values = contexts.iter().map(|&n| data.values(n * v_cols, 1.0)).collect();
        Self::place(args, dtype, keys, values, layout)
    }

    /// The same contents, placed anew.
    pub(crate) fn replaced(&self, layout: &mut Random) -> Self {
        Self::place(self.args, self.dtype, self.keys.clone(), self.values.clone(), layout)
    }

    /// The same with NaN for keys and values of a position, where they are.
    pub(crate) fn spoiled(&self, s: usize, position: usize) -> Self {
        let heads = self.args.num_key_value_heads;
        let (k, v) = (heads * self.args.head_dim, heads * self.args.value_dim);
        let (mut keys, mut values) = (self.keys.clone(), self.values.clone());
        keys[s][position * k..][..k].fill(f32::NAN);
        values[s][position * v..][..v].fill(f32::NAN);
        Self::place(self.args, self.dtype, keys, values, &mut Random::new(10))
    }

    /// Sequence `s` alone.
    pub(crate) fn alone(&self, s: usize, layout: &mut Random) -> Self {
        Self::place(self.args, self.dtype, vec![self.keys[s].clone()], vec![self.values[s].clone()], layout)
    }

    fn place(
        args: KvAppendArgs,
        dtype: DType,
        keys: Vec<Vec<f32>>,
        values: Vec<Vec<f32>>,
        layout: &mut Random,
    ) -> Self {
        let (k_cols, v_cols) = (args.num_key_value_heads * args.head_dim, args.num_key_value_heads * args.value_dim);
        let contexts: Vec<usize> = keys.iter().map(|k| k.len() / k_cols).collect();
        let widest = contexts.iter().map(|n| n.div_ceil(args.block_size)).max().unwrap_or(0) + 1;
        let needed: usize = contexts.iter().map(|n| n.div_ceil(args.block_size)).sum();
        let mut free: Vec<i32> = (0..needed as i32 + 3).collect();
        layout.shuffle(&mut free);
        let block_bytes = args.block_size * (k_cols + v_cols) * dtype.block_bytes();
        // NaN everywhere that no token is: reading it would show.
        let mut bytes = vec![0xff; free.len() * block_bytes];
        let mut tables = Vec::new();
        for (s, &n) in contexts.iter().enumerate() {
            let mut table: Vec<i32> = free.split_off(free.len() - n.div_ceil(args.block_size));
            let slots: Vec<i32> = (0..n)
                .map(|i| table[i / args.block_size] * args.block_size as i32 + (i % args.block_size) as i32)
                .collect();
            kv_append(
                Isa::Scalar,
                &Serial,
                &args,
                Matrix::dense(&keys[s], n, k_cols),
                Matrix::dense(&values[s], n, v_cols),
                &slots,
                CacheViewMut::new(&mut bytes, dtype, block_bytes),
            )
            .unwrap();
            table.resize(widest, -1);
            tables.push(table);
        }
        Self { args, dtype, bytes, block_bytes, tables, keys, values }
    }

    pub(crate) fn view(&self) -> CacheView<'_> {
        CacheView::new(&self.bytes, self.dtype, self.block_bytes)
    }

    pub(crate) fn table(&self) -> Vec<i32> {
        self.tables.concat()
    }

    /// Rounded as the cache does it: key (or value) of one position and head.
    fn rounded(&self, row: &[f32]) -> Vec<f64> {
        let bytes: Vec<u8> = row
            .iter()
            .flat_map(|&x| match self.dtype {
                DType::F16 => crate::kernels::math::f32_to_f16(x).to_le_bytes().to_vec(),
                DType::BF16 => crate::kernels::math::f32_to_bf16(x).to_le_bytes().to_vec(),
                _ => x.to_le_bytes().to_vec(),
            })
            .collect();
        let mut back = vec![0.0; row.len()];
        blocks::dequantize(self.dtype, &bytes, &mut back).unwrap();
        back.into_iter().map(f64::from).collect()
    }

    pub(crate) fn key(&self, s: usize, position: usize, head: usize) -> Vec<f64> {
        let dim = self.args.head_dim;
        self.rounded(&self.keys[s][(position * self.args.num_key_value_heads + head) * dim..][..dim])
    }

    pub(crate) fn value(&self, s: usize, position: usize, head: usize) -> Vec<f64> {
        let dim = self.args.value_dim;
        self.rounded(&self.values[s][(position * self.args.num_key_value_heads + head) * dim..][..dim])
    }
}

/// Owned index tensors of a step.
pub(crate) struct Step {
    pub(crate) query_start: Vec<i32>,
    pub(crate) context_len: Vec<i32>,
    pub(crate) table: Vec<i32>,
}

impl Step {
    /// Sequences with `(query tokens, context)` each.
    pub(crate) fn new(cache: &Cache, sequences: &[(usize, usize)]) -> Self {
        let mut query_start = vec![0];
        for &(tokens, _) in sequences {
            query_start.push(query_start[query_start.len() - 1] + tokens as i32);
        }
        Self { query_start, context_len: sequences.iter().map(|s| s.1 as i32).collect(), table: cache.table() }
    }

    pub(crate) fn rows(&self) -> usize {
        *self.query_start.last().unwrap() as usize
    }

    pub(crate) fn view(&self) -> Sequences<'_> {
        let count = self.context_len.len();
        Sequences {
            query_start: &self.query_start,
            context_len: &self.context_len,
            block_table: Matrix::dense(&self.table, count, self.table.len() / count),
        }
    }
}
