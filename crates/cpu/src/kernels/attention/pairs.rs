//! Products of bfloat16 pairs, sixteen at a time, with the same bits on every instruction set.
//!
//! A pair is two bfloat16 values in one 32-bit lane. A product adds, lane by lane, the second values' product and then the first
//! ones', each with a fused multiply-add: what `vdpbf16ps` does ([`avx512`]), and what two multiply-adds of f32 do elsewhere
//! ([`Fused`]). The exception are numbers below 2^-126, which the instruction takes for zero.
//!
//! A kernel over pairs is written once, generic over [`Pairs`], and entered by [`enter`] from one that is generic over [`Simd`].

use crate::kernels::simd::{Kernel, LANES, Simd};

/// A token for products of pairs.
pub(super) trait Pairs: Copy {
    /// The vectors of f32.
    type Simd: Simd;
    /// Sixteen pairs.
    type P: Copy;
    /// Rows of a register tile.
    const TILE_ROWS: usize;
    /// Bytes that a rounded value takes in scratch, where a pair is read to all lanes.
    const ROUNDED: usize;

    /// The token of vectors.
    fn simd(self) -> Self::Simd;
    /// Sixteen pairs as they lie in a cache.
    ///
    /// # Safety
    /// `p` is valid for 64 bytes of reads.
    unsafe fn load(self, p: *const u8) -> Self::P;
    /// The same with zeros for the first values, or for the second.
    ///
    /// # Safety
    /// As [`Pairs::load`].
    unsafe fn load_half(self, p: *const u8, second: bool) -> Self::P;
    /// Pair `k` of a rounded row in all lanes.
    ///
    /// # Safety
    /// The row has it.
    unsafe fn broadcast(self, row: *const u8, k: usize) -> Self::P;
    /// Rounds 32 values, which are no subnormal numbers, to a row (ties to even), and returns them as pairs.
    ///
    /// # Safety
    /// `row` is valid for writes of as many rounded values.
    unsafe fn round(self, row: *mut u8, x: [Lanes<Self>; 2]) -> Self::P;
    /// `sums` and the products of pairs.
    fn add(self, sums: Lanes<Self>, a: Self::P, b: Self::P) -> Lanes<Self>;
    /// Pairs of ones.
    fn ones(self) -> Self::P;
    /// Runs a kernel as a function of its own.
    fn enter<K: PairKernel>(self, kernel: K);
}

/// A vector of f32.
pub(super) type Lanes<P> = <<P as Pairs>::Simd as Simd>::V;

/// A kernel body, to be compiled for a kind of pairs.
pub(super) trait PairKernel {
    /// The body; must be `#[inline(always)]`.
    fn run<P: Pairs>(self, p: P);
}

/// Runs a kernel by the instruction for pairs, if the caller found that the processor `has` it, or else by `s`.
#[inline(always)]
pub(super) fn enter<S: Simd, K: PairKernel>(s: S, has: HasPairs, kernel: K) {
    #[cfg(target_arch = "x86_64")]
    if has.0 {
        // SAFETY: the processor has the instructions.
        return unsafe { avx512::run(kernel) };
    }
    let _ = has;
    s.enter(Entered(kernel));
}

/// Whether the processor has the instruction for pairs.
#[derive(Debug, Clone, Copy)]
pub(super) struct HasPairs(bool);

impl HasPairs {
    /// Whether it has and `isa` allows it.
    pub(super) fn with(isa: crate::isa::Isa) -> Self {
        Self(isa >= crate::isa::Isa::Avx512 && crate::isa::has_avx512_bf16())
    }
}

struct Entered<K>(K);

impl<K: PairKernel> Kernel for Entered<K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.0.run(Fused(s));
    }
}

/// Pairs by two multiply-adds of f32. Rounded rows are kept in f32.
#[derive(Clone, Copy)]
struct Fused<S>(S);

impl<S: Simd> Pairs for Fused<S> {
    type Simd = S;
    type P = [S::V; 2];
    // Of sixteen registers a vector of pairs takes two or four.
    const TILE_ROWS: usize = if S::TILE_VECTORS == 1 && S::TILE_ROWS > 5 { 5 } else { S::TILE_ROWS };
    const ROUNDED: usize = 4;

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> [S::V; 2] {
        // SAFETY: the caller's promise.
        unsafe { self.0.load_bf16_pairs(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_half(self, p: *const u8, second: bool) -> [S::V; 2] {
        // SAFETY: the caller's promise.
        let pairs = unsafe { self.load(p) };
        let zero = self.0.splat(0.0);
        if second { [zero, pairs[1]] } else { [pairs[0], zero] }
    }
    #[inline(always)]
    unsafe fn broadcast(self, row: *const u8, k: usize) -> [S::V; 2] {
        let row: *const f32 = row.cast();
        // SAFETY: the caller's promise.
        unsafe { [self.0.splat(*row.add(2 * k)), self.0.splat(*row.add(2 * k + 1))] }
    }
    #[inline(always)]
    unsafe fn round(self, row: *mut u8, x: [S::V; 2]) -> [S::V; 2] {
        let (s, mut halves) = (self.0, [0u16; 2 * LANES]);
        let row: *mut f32 = row.cast();
        // SAFETY: an array of 32; the caller's promise.
        unsafe {
            s.store_bf16(halves.as_mut_ptr(), x[0]);
            s.store_bf16(halves.as_mut_ptr().add(LANES), x[1]);
            s.store(row, s.load_bf16(halves.as_ptr()));
            s.store(row.add(LANES), s.load_bf16(halves.as_ptr().add(LANES)));
            s.load_bf16_pairs(halves.as_ptr())
        }
    }
    #[inline(always)]
    fn add(self, sums: S::V, a: [S::V; 2], b: [S::V; 2]) -> S::V {
        self.0.fma(a[0], b[0], self.0.fma(a[1], b[1], sums))
    }
    #[inline(always)]
    fn ones(self) -> [S::V; 2] {
        [self.0.splat(1.0); 2]
    }
    #[inline(always)]
    fn enter<K: PairKernel>(self, kernel: K) {
        self.0.enter(Entered(kernel));
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::{Lanes, PairKernel, Pairs};
    use crate::kernels::simd::{Avx512, Simd};

    /// Proof that the processor has AVX-512 F, BW, VL, DQ and BF16. Rounded rows are kept in bfloat16.
    #[derive(Clone, Copy)]
    struct Avx512Bf16(Avx512);

    /// # Safety
    /// The processor has the instructions.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    #[inline(never)]
    pub(super) unsafe fn run<K: PairKernel>(kernel: K) {
        // SAFETY: the caller's promise.
        kernel.run(Avx512Bf16(unsafe { Avx512::assume() }));
    }

    impl Pairs for Avx512Bf16 {
        type Simd = Avx512;
        type P = __m512i;
        const TILE_ROWS: usize = Avx512::TILE_ROWS;
        const ROUNDED: usize = 2;

        #[inline(always)]
        fn simd(self) -> Avx512 {
            self.0
        }
        #[inline(always)]
        unsafe fn load(self, p: *const u8) -> __m512i {
            // SAFETY: the caller's promise.
            unsafe { _mm512_loadu_si512(p.cast()) }
        }
        #[inline(always)]
        unsafe fn load_half(self, p: *const u8, second: bool) -> __m512i {
            let mask: u32 = if second { 0xffff_0000 } else { 0xffff };
            // SAFETY: the caller's promise.
            unsafe { _mm512_and_si512(self.load(p), _mm512_set1_epi32(mask.cast_signed())) }
        }
        #[inline(always)]
        unsafe fn broadcast(self, row: *const u8, k: usize) -> __m512i {
            // SAFETY: the caller's promise.
            unsafe { _mm512_set1_epi32(row.cast::<i32>().add(k).read_unaligned()) }
        }
        #[inline(always)]
        unsafe fn round(self, row: *mut u8, x: [Lanes<Self>; 2]) -> __m512i {
            // SAFETY: the token; the caller's promise.
            unsafe {
                let halves = _mm512_cvtne2ps_pbh(self.0.unwrap(x[1]), self.0.unwrap(x[0]));
                let halves = std::mem::transmute::<__m512bh, __m512i>(halves);
                _mm512_storeu_si512(row.cast(), halves);
                halves
            }
        }
        #[inline(always)]
        fn add(self, sums: Lanes<Self>, a: __m512i, b: __m512i) -> Lanes<Self> {
            // SAFETY: the token; any bits are bfloat16 values.
            unsafe {
                let (a, b) = (std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(b));
                self.0.wrap(_mm512_dpbf16_ps(self.0.unwrap(sums), a, b))
            }
        }
        #[inline(always)]
        fn ones(self) -> __m512i {
            // SAFETY: the token.
            unsafe { _mm512_set1_epi32(0x3f80_3f80) }
        }
        #[inline(always)]
        fn enter<K: PairKernel>(self, kernel: K) {
            // SAFETY: the token.
            unsafe { run(kernel) };
        }
    }
}
