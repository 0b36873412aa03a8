//! Sixteen f32 lanes, with the same bits on every instruction set.
//!
//! A kernel is written once, generic over [`Simd`], and compiled several times by [`dispatch`]: with arrays
//! ([`Scalar`], the twin that the others are compared with) and with pairs of AVX2 registers and AVX-512 registers, or, on
//! aarch64, with fours of NEON registers.
//! Invariant: each method gives identical bits in all of them (NaN payloads aside), so a kernel's result does not depend on
//! the instruction set. A token of a vector type exists only where the processor has the instructions, which makes the
//! arithmetic safe to call; only access through pointers is not.
//!
//! Everything here and every kernel body is `inline(always)`: the instructions become available in the function that
//! [`dispatch`] or [`Simd::enter`] enters, so code that is not inlined into it (a closure, for instance) would call them
//! one by one.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
pub mod storage;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use scalar::Scalar;

use qwen_formats::blocks;

use crate::isa::Isa;

/// Lanes of a vector.
pub const LANES: usize = 16;

/// A token for an instruction set and the operations on vectors of [`LANES`] f32 values.
pub trait Simd: Copy + Send + Sync {
    /// The vector.
    type V: Copy;
    /// Rows of a register tile.
    const TILE_ROWS: usize;
    /// Vectors of a row of a register tile.
    const TILE_VECTORS: usize;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// From an array.
    fn of(self, x: [f32; LANES]) -> Self::V;
    /// To an array.
    fn to_array(self, x: Self::V) -> [f32; LANES];

    /// Sixteen values at `p`.
    ///
    /// # Safety
    /// `p` is valid for 16 reads; no alignment is needed, here and in all the following.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Writes sixteen values at `p`.
    ///
    /// # Safety
    /// `p` is valid for 16 writes.
    unsafe fn store(self, p: *mut f32, x: Self::V);
    /// Writes sixteen values at `p`, a multiple of 64, past the caches where the processor can; other threads see them after
    /// [`finish_streaming`].
    ///
    /// # Safety
    /// `p` is aligned so, and valid for 16 writes.
    #[inline(always)]
    unsafe fn store_streaming(self, p: *mut f32, x: Self::V) {
        // SAFETY: the caller's promise.
        unsafe { self.store(p, x) };
    }
    /// `n <= 16` values at `p`, `fill` in the other lanes.
    ///
    /// # Safety
    /// `p` is valid for `n` reads.
    #[inline(always)]
    unsafe fn load_partial(self, p: *const f32, n: usize, fill: f32) -> Self::V {
        let mut lanes = [fill; LANES];
        // SAFETY: n values by the caller's promise, at most 16 of the array.
        unsafe { std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n.min(LANES)) };
        self.of(lanes)
    }
    /// Writes the first `n <= 16` lanes at `p`.
    ///
    /// # Safety
    /// `p` is valid for `n` writes.
    #[inline(always)]
    unsafe fn store_partial(self, p: *mut f32, n: usize, x: Self::V) {
        let lanes = self.to_array(x);
        // SAFETY: as in `load_partial`.
        unsafe { std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n.min(LANES)) };
    }
    /// Sixteen half-precision values at `p`.
    ///
    /// # Safety
    /// `p` is valid for 16 reads.
    unsafe fn load_f16(self, p: *const u16) -> Self::V;
    /// Rounds to half precision (nearest even) and writes at `p`.
    ///
    /// # Safety
    /// `p` is valid for 16 writes.
    unsafe fn store_f16(self, p: *mut u16, x: Self::V);
    /// Sixteen bfloat16 values at `p`.
    ///
    /// # Safety
    /// `p` is valid for 16 reads.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// Rounds to bfloat16 (nearest even) and writes at `p`.
    ///
    /// # Safety
    /// `p` is valid for 16 writes.
    unsafe fn store_bf16(self, p: *mut u16, x: Self::V);
    /// Sixteen pairs of bfloat16 values at `p`: the first of each, and the second.
    ///
    /// # Safety
    /// `p` is valid for 32 reads.
    unsafe fn load_bf16_pairs(self, p: *const u16) -> [Self::V; 2];

    /// Sixteen E4M3 values at `p`.
    ///
    /// # Safety
    /// `p` is valid for 16 reads.
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> Self::V {
        // SAFETY: the caller's promise.
        let bytes = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        self.of(bytes.map(blocks::f8_e4m3_to_f32))
    }
    /// Sixteen E5M2 values at `p`.
    ///
    /// # Safety
    /// `p` is valid for 16 reads.
    #[inline(always)]
    unsafe fn load_e5m2(self, p: *const u8) -> Self::V {
        // SAFETY: the caller's promise.
        let bytes = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        self.of(bytes.map(blocks::f8_e5m2_to_f32))
    }

    /// a + b
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// a - b
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// a b
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// a / b
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a b + c, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// a if a > b, else b: `max(x, y)` is y where x is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// a if a < b, else b.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// x 2^n for whole n in -256..=256 and x in 0.5..2 (or NaN), rounded once.
    fn scale_by_power(self, x: Self::V, n: Self::V) -> Self::V;
    /// The sum of the lanes: lane i + lane i+8, then 4, 2, 1 apart.
    fn reduce_add(self, x: Self::V) -> f32;
    /// [`Simd::reduce_add`] of each of four vectors.
    #[inline(always)]
    fn reduce_add_four(self, x: [Self::V; 4]) -> [f32; 4] {
        [self.reduce_add(x[0]), self.reduce_add(x[1]), self.reduce_add(x[2]), self.reduce_add(x[3])]
    }
    /// The largest lane, by [`Simd::max`] in the order of [`Simd::reduce_add`].
    fn reduce_max(self, x: Self::V) -> f32;
    /// Asks for the cache line at `p`, which need not be readable, into the second-level cache.
    fn prefetch(self, p: *const u8);
    /// Runs a kernel as a function of its own, compiled for this instruction set. A kernel that is used in several places,
    /// or that is large, is entered so: code grows with the sum of the kernels and not with their product.
    fn enter<K: Kernel>(self, kernel: K) -> K::Output;
    /// Rows to columns.
    fn transpose(self, rows: [Self::V; LANES]) -> [Self::V; LANES];
    /// Sixteen rows of [`HALVES`] two-byte values to columns: value d of row i goes to `turned[d * stride + i]`. Row i is
    /// `offset` bytes after `rows[i]`.
    ///
    /// # Safety
    /// There are sixteen addresses, from each of which the values are readable; each column is writable.
    unsafe fn turn_halves(self, rows: *const *const u8, offset: usize, turned: *mut u16, stride: usize);
}

/// Makes what this thread has written with [`Simd::store_streaming`] ordinary writes, which a join shows to others.
pub fn finish_streaming() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: part of SSE, which every x86-64 has.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Values of a row that [`Simd::turn_halves`] turns: a cache line of them.
pub const HALVES: usize = 32;

/// A kernel body, to be compiled for an instruction set.
pub trait Kernel {
    /// What it returns.
    type Output;
    /// The body; must be `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs a kernel with `isa`, or with [`Scalar`] where the processor lacks it.
pub fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if isa >= Isa::Avx512 && avx512::supported() {
            // SAFETY: the instructions are there.
            return unsafe { avx512::run(kernel) };
        }
        if isa == Isa::Avx2 && avx2::supported() {
            // SAFETY: the instructions are there.
            return unsafe { avx2::run(kernel) };
        }
    }
    #[cfg(target_arch = "aarch64")]
    if isa == Isa::Neon {
        return neon::run(kernel);
    }
    let _ = isa;
    scalar::run(kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation on awkward values, as bits.
    struct Everything;

    impl Kernel for Everything {
        type Output = Vec<u32>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<u32> {
            let values: Vec<f32> = (0..256)
                .map(|i| {
                    let exponent = (i % 23) as f32 - 11.0;
                    (((i * 7919) % 1013) as f32 / 506.0 - 1.0) * (exponent * 1.7).exp2()
                })
                .chain([0.0, -0.0, 65504.0, 65520.0, 1e-7, 6e-8, 2.9e-8, f32::INFINITY, f32::NEG_INFINITY])
                .chain([1e-40, -1e-40, 3e38, 1.0, 0.333_333_34, 1.001_953_1, 2049.0])
                .collect();
            let mut bits = Vec::new();
            let (first, _) = values.as_chunks::<LANES>();
            for pair in first.windows(2) {
                let (a, b) = (s.of(pair[0]), s.of(pair[1]));
                for v in [
                    s.add(a, b),
                    s.sub(a, b),
                    s.mul(a, b),
                    s.div(a, s.add(s.splat(3.0), s.mul(b, b))),
                    s.fma(a, b, a),
                    s.max(a, b),
                    s.min(a, b),
                    s.scale_by_power(s.splat(1.5), s.splat(-130.0)),
                ] {
                    bits.extend(s.to_array(v).map(f32::to_bits));
                }
                let mut half = [0u16; LANES];
                let mut brain = [0u16; LANES];
                // SAFETY: arrays of 16.
                let back = unsafe {
                    s.store_f16(half.as_mut_ptr(), a);
                    s.store_bf16(brain.as_mut_ptr(), a);
                    (s.load_f16(half.as_ptr()), s.load_bf16(brain.as_ptr()))
                };
                bits.extend(half.map(u32::from));
                bits.extend(brain.map(u32::from));
                bits.extend(s.to_array(back.0).map(f32::to_bits));
                bits.extend(s.to_array(back.1).map(f32::to_bits));
                // SAFETY: two arrays of 16.
                let pairs = unsafe { s.load_bf16_pairs([brain, half].as_flattened().as_ptr()) };
                bits.extend(pairs.into_iter().flat_map(|x| s.to_array(x).map(f32::to_bits)));
                bits.push(s.reduce_add(a).to_bits());
                bits.push(s.reduce_max(a).to_bits());
            }
            let mut square = [s.splat(0.0); LANES];
            for (row, chunk) in square.iter_mut().zip(first) {
                *row = s.of(*chunk);
            }
            let turned = s.transpose(square);
            let four = [turned[0], turned[3], turned[15], turned[7]];
            assert_eq!(s.reduce_add_four(four).map(f32::to_bits), four.map(|x| s.reduce_add(x).to_bits()));
            for (i, row) in turned.into_iter().enumerate() {
                for (j, value) in s.to_array(row).into_iter().enumerate() {
                    assert_eq!(value.to_bits(), first[j][i].to_bits());
                }
            }
            bits.iter().map(|&b| if f32::from_bits(b).is_nan() { 0x7fc0_0000 } else { b }).collect()
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let expected = dispatch(Isa::Scalar, Everything);
        for isa in Isa::available() {
            assert!(dispatch(isa, Everything) == expected, "{}", isa.name());
        }
    }

    /// Sixteen rows of two-byte values, turned.
    struct TurnHalves<'a>(&'a [[u16; HALVES + 3]; LANES]);

    impl Kernel for TurnHalves<'_> {
        type Output = Vec<u16>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<u16> {
            let rows: Vec<*const u8> = self.0.iter().map(|row| row.as_ptr().cast()).collect();
            let mut turned = vec![0; HALVES * 20];
            // SAFETY: rows are three values longer than what is turned, columns four.
            unsafe { s.turn_halves(rows.as_ptr(), 6, turned.as_mut_ptr(), 20) };
            turned
        }
    }

    #[test]
    fn halves_are_turned() {
        let rows: [[u16; HALVES + 3]; LANES] = std::array::from_fn(|i| std::array::from_fn(|d| (i * 100 + d) as u16));
        for isa in Isa::available() {
            let turned = dispatch(isa, TurnHalves(&rows));
            for (d, column) in turned.chunks(20).enumerate() {
                for (i, &x) in column.iter().enumerate() {
                    let expected = rows.get(i).map_or(0, |row| row[d + 3]);
                    assert_eq!(x, expected, "{} {d} {i}", isa.name());
                }
            }
        }
    }

    /// All half-precision patterns, converted.
    struct AllHalves;

    impl Kernel for AllHalves {
        type Output = Vec<u32>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<u32> {
            let all: Vec<u16> = (0..=u16::MAX).collect();
            let (chunks, _) = all.as_chunks::<LANES>();
            let mut bits = Vec::new();
            for chunk in chunks {
                // SAFETY: arrays of 16.
                let (f, b) = unsafe { (s.load_f16(chunk.as_ptr()), s.load_bf16(chunk.as_ptr())) };
                bits.extend(s.to_array(f).map(f32::to_bits));
                bits.extend(s.to_array(b).map(f32::to_bits));
            }
            bits
        }
    }

    /// Rounding of bit patterns of all exponents, NaN with and without payload among them.
    struct Narrowed;

    impl Kernel for Narrowed {
        type Output = Vec<u16>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<u16> {
            let patterns: Vec<u32> = (0..=u32::MAX)
                .step_by(65_521)
                .chain(std::iter::repeat_n([0x7f80_0001, 0xff80_0001, 0x7fff_ffff, 0xffc0_2000], 4).flatten())
                .collect();
            let mut bits = Vec::new();
            for chunk in patterns.as_chunks::<LANES>().0 {
                let (mut half, mut brain) = ([0u16; LANES], [0u16; LANES]);
                // SAFETY: arrays of 16.
                unsafe {
                    // Read as memory: the value of a signalling NaN may not pass through arithmetic.
                    let x = s.load(chunk.as_ptr().cast());
                    s.store_f16(half.as_mut_ptr(), x);
                    s.store_bf16(brain.as_mut_ptr(), x);
                }
                bits.extend(half);
                bits.extend(brain);
            }
            bits
        }
    }

    #[test]
    fn every_instruction_set_rounds_to_sixteen_bits_alike() {
        let expected = dispatch(Isa::Scalar, Narrowed);
        for isa in Isa::available() {
            assert!(dispatch(isa, Narrowed) == expected, "{}", isa.name());
        }
    }

    #[test]
    fn every_sixteen_bit_float_converts_alike() {
        let expected = dispatch(Isa::Scalar, AllHalves);
        for isa in Isa::available() {
            assert!(dispatch(isa, AllHalves) == expected, "{}", isa.name());
        }
    }
}
