//! The absorbed form: q' = q W_k per head, attention of q' over the cached rows themselves, W_v of the weighted latent.
//!
//! Some tokens at a time: q' [tokens, heads, latent + rope] and the weighted latents [tokens, heads, latent] lie in the
//! workspace. A task of the projections is one head, whose weights are read once for all tokens: bound by their bytes.

use std::marker::PhantomData;

use super::{ABSORBED_ROWS, ABSORBED_TOKENS, Cached, KernelError, KvB, MlaArgs, OP, Problem, schedule};
use crate::isa::Isa;
use crate::kernels::attention::micro::{Strided, TileRows, multiply};
use crate::kernels::simd::storage::{F32, Storage, with_storage};
use crate::kernels::simd::{Kernel, LANES, Simd, dispatch};
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;

/// Value rows that are dotted at a time.
const VALUE_ROWS: usize = 4;

pub(super) struct Absorbed<'a> {
    pub(super) isa: Isa,
    pub(super) parallel: &'a dyn Parallel,
    pub(super) args: &'a MlaArgs,
    pub(super) kv_b: KvB<'a>,
    pub(super) problem: Problem<'a>,
}

/// Memory that threads use in disjoint parts.
#[derive(Clone, Copy)]
struct Memory(*mut f32);

// SAFETY: tasks use disjoint parts.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn at(self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

impl Absorbed<'_> {
    pub(super) fn run(&self, workspace: &mut [u8]) -> Result<(), KernelError> {
        let (args, rows) = (self.args, self.problem.q.rows);
        let threads = self.parallel.threads().max(1);
        let bytes = args.absorbed_values(rows, threads) * 4;
        if workspace.len() < bytes {
            return Err(KernelError::Workspace { op: OP, expected: bytes, found: workspace.len() });
        }
        let (own, rest) = workspace.split_at_mut(bytes);
        let skew = own.as_ptr().align_offset(LANES * 4).min(LANES * 4);
        let tokens = rows.min(ABSORBED_TOKENS);
        let queries: *mut f32 = own[skew..].as_mut_ptr().cast();
        let latents = queries.wrapping_add(tokens * args.num_heads * args.absorbed_stride());
        let staged = Memory(latents.wrapping_add(tokens * args.num_heads * args.latent_dim));
        for first_row in (0..rows).step_by(tokens.max(1)) {
            let n = tokens.min(rows - first_row);
            let query_cols = args.num_heads * args.absorbed_stride();
            let latent_cols = args.num_heads * args.latent_dim;
            // SAFETY: parts of the workspace, cut above for `tokens` rows; the op's own rows.
            let (q, latent, problem) = unsafe {
                let q = MatrixMut::from_raw(queries, n, query_cols, query_cols);
                let latent = MatrixMut::from_raw(latents, n, latent_cols, latent_cols);
                let problem = Problem {
                    q: Matrix::from_raw(queries, n, query_cols, query_cols),
                    head_stride: args.absorbed_stride(),
                    out: latent,
                    first_row,
                    key_value_heads: 1,
                    group: args.num_heads,
                    ..self.problem
                };
                (q, latent, problem)
            };
            self.absorb(first_row, q, staged);
            schedule::run(self.isa, self.parallel, &problem, &Cached { max_rows: ABSORBED_ROWS }, rest)?;
            self.project(first_row, latent);
        }
        Ok(())
    }

    /// Calls `body(head, worker)` for every head.
    fn for_heads(&self, body: &(dyn Fn(usize, usize) + Sync)) {
        let heads = self.args.num_heads;
        let workers = self.parallel.threads().clamp(1, heads);
        self.parallel.run(workers, &|worker| {
            for head in worker * heads / workers..(worker + 1) * heads / workers {
                body(head, worker);
            }
        });
    }

    /// Rows of a head in `kv_b`, in values.
    fn head_rows(&self, head: usize) -> usize {
        head * (self.args.nope_dim + self.args.value_dim) * self.args.latent_dim
    }

    fn absorb(&self, first_row: usize, q: MatrixMut<'_, f32>, staged: Memory) {
        let padded = self.args.latent_dim.next_multiple_of(LANES);
        with_storage!(self.kv_b.dtype, W => self.for_heads(&|head, worker| {
            dispatch(self.isa, AbsorbHead::<W> {
                args: self.args,
                source: self.problem.q,
                first_row,
                head,
                weight: self.kv_b.bytes[self.head_rows(head) * W::BYTES..].as_ptr(),
                staged: staged.at(worker * self.args.nope_dim * padded),
                q,
                storage: PhantomData,
            });
        }), ());
    }

    fn project(&self, first_row: usize, latent: MatrixMut<'_, f32>) {
        let keys = self.args.nope_dim * self.args.latent_dim;
        with_storage!(self.kv_b.dtype, W => self.for_heads(&|head, _| {
            dispatch(self.isa, ProjectHead::<W> {
                args: self.args,
                first_row,
                head,
                weight: self.kv_b.bytes[(self.head_rows(head) + keys) * W::BYTES..].as_ptr(),
                latent,
                out: self.problem.out,
                storage: PhantomData,
            });
        }), ());
    }
}

/// q' of one head: the latent part, then the rotary part as it is.
struct AbsorbHead<'a, W> {
    args: &'a MlaArgs,
    source: Matrix<'a, f32>,
    first_row: usize,
    head: usize,
    weight: *const u8,
    /// Room for the weight with padded rows, if they aren't whole vectors.
    staged: *mut f32,
    q: MatrixMut<'a, f32>,
    storage: PhantomData<W>,
}

impl<W: Storage> Kernel for AbsorbHead<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let args = self.args;
        let (nope, latent) = (args.nope_dim, args.latent_dim);
        let padded = latent.next_multiple_of(LANES);
        let direct = padded == latent;
        // SAFETY: the weight has the head's rows; source and q' rows have the head's columns, this task's own.
        unsafe {
            if !direct {
                for row in 0..nope {
                    for i in (0..latent).step_by(LANES) {
                        let x = W::load_up_to(s, self.weight.add((row * latent + i) * W::BYTES), latent - i);
                        s.store(self.staged.add(row * padded + i), x);
                    }
                }
            }
            let mut token = 0;
            while token < self.q.rows {
                let n = S::TILE_ROWS.min(self.q.rows - token);
                let mut rows = TileRows { n, ..TileRows::EMPTY };
                for i in 0..n {
                    rows.a[i] = self.source.row_ptr(self.first_row + token + i).add(self.head * args.query_dim());
                    rows.c[i] = self.q.row_ptr(token + i).add(self.head * args.absorbed_stride());
                }
                if direct {
                    let b = Strided::<W>::new(self.weight, latent);
                    multiply::<S, _, false>(s, &rows, b, 0..nope, 0..padded / LANES);
                } else {
                    let b = Strided::<F32>::new(self.staged.cast_const().cast(), padded);
                    multiply::<S, _, false>(s, &rows, b, 0..nope, 0..padded / LANES);
                }
                for i in 0..n {
                    std::ptr::copy_nonoverlapping(rows.a[i].add(nope), rows.c[i].add(latent), args.rope_dim);
                }
                token += n;
            }
        }
    }
}

/// W_v of the weighted latents of one head.
struct ProjectHead<'a, W> {
    args: &'a MlaArgs,
    first_row: usize,
    head: usize,
    weight: *const u8,
    latent: MatrixMut<'a, f32>,
    out: MatrixMut<'a, f32>,
    storage: PhantomData<W>,
}

impl<W: Storage> Kernel for ProjectHead<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (value, latent) = (self.args.value_dim, self.args.latent_dim);
        for token in 0..self.latent.rows {
            // SAFETY: the weight has the head's value rows; latent and output rows have the head's columns.
            unsafe {
                let x = self.latent.row_ptr(token).add(self.head * latent).cast_const();
                let out = self.out.row_ptr(self.first_row + token).add(self.head * value);
                let mut row = 0;
                while row + VALUE_ROWS <= value {
                    dots::<S, W, VALUE_ROWS>(s, self.weight.add(row * latent * W::BYTES), x, latent, out.add(row));
                    row += VALUE_ROWS;
                }
                while row < value {
                    dots::<S, W, 1>(s, self.weight.add(row * latent * W::BYTES), x, latent, out.add(row));
                    row += 1;
                }
            }
        }
    }
}

/// Products of `N` rows with `x`: one accumulator a row, lanes added at the end.
///
/// # Safety
/// `rows` holds `N` rows of `len` values, `x` has `len` values, `out` has `N` places.
#[inline(always)]
unsafe fn dots<S: Simd, W: Storage, const N: usize>(s: S, rows: *const u8, x: *const f32, len: usize, out: *mut f32) {
    let mut sums = [s.splat(0.0); N];
    for i in (0..len).step_by(LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let v = F32::load_up_to(s, x.add(i).cast(), len - i);
            for (n, sum) in sums.iter_mut().enumerate() {
                let w = W::load_up_to(s, rows.add((n * len + i) * W::BYTES), len - i);
                *sum = s.fma(w, v, *sum);
            }
        }
    }
    for (n, sum) in sums.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { *out.add(n) = s.reduce_add(sum) };
    }
}
