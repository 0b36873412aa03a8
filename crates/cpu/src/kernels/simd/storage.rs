//! How floats lie in memory, as types: a kernel that reads several dtypes is generic over [`Storage`].

use super::{LANES, Simd};
use crate::kernels::math::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// A float type in memory; no alignment is needed.
pub trait Storage: Copy + Send + Sync + 'static {
    /// Bytes of a value.
    const BYTES: usize;
    /// Sixteen values at `p`.
    ///
    /// # Safety
    /// `p` is valid for 16 reads.
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V;
    /// Rounds to nearest even and writes sixteen values at `p`.
    ///
    /// # Safety
    /// `p` is valid for 16 writes.
    unsafe fn store<S: Simd>(s: S, p: *mut u8, x: S::V);
    /// One value at `p`.
    ///
    /// # Safety
    /// `p` is valid for a read.
    unsafe fn load_one(p: *const u8) -> f32;
    /// Rounds and writes one value at `p`.
    ///
    /// # Safety
    /// `p` is valid for a write.
    unsafe fn store_one(p: *mut u8, x: f32);

    /// `n` values at `p`, at most 16, zero in the other lanes.
    ///
    /// # Safety
    /// `p` is valid for `n` reads.
    #[inline(always)]
    unsafe fn load_up_to<S: Simd>(s: S, p: *const u8, n: usize) -> S::V {
        if n >= LANES {
            // SAFETY: sixteen values.
            return unsafe { Self::load(s, p) };
        }
        let mut lanes = [0.0; LANES];
        for (i, lane) in lanes.iter_mut().enumerate().take(n) {
            // SAFETY: i < n.
            *lane = unsafe { Self::load_one(p.add(i * Self::BYTES)) };
        }
        s.of(lanes)
    }
    /// Writes the first `n` lanes, at most 16, at `p`.
    ///
    /// # Safety
    /// `p` is valid for `n` writes.
    #[inline(always)]
    unsafe fn store_up_to<S: Simd>(s: S, p: *mut u8, n: usize, x: S::V) {
        if n >= LANES {
            // SAFETY: sixteen values.
            return unsafe { Self::store(s, p, x) };
        }
        for (i, lane) in s.to_array(x).into_iter().enumerate().take(n) {
            // SAFETY: i < n.
            unsafe { Self::store_one(p.add(i * Self::BYTES), lane) };
        }
    }
}

/// IEEE single precision.
#[derive(Debug, Clone, Copy)]
pub struct F32;
/// IEEE half precision.
#[derive(Debug, Clone, Copy)]
pub struct F16;
/// bfloat16.
#[derive(Debug, Clone, Copy)]
pub struct Bf16;

impl Storage for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut u8, x: S::V) {
        // SAFETY: the caller's promise.
        unsafe { s.store(p.cast(), x) };
    }
    #[inline(always)]
    unsafe fn load_one(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<f32>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_one(p: *mut u8, x: f32) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<f32>().write_unaligned(x) };
    }
}

impl Storage for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_f16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut u8, x: S::V) {
        // SAFETY: the caller's promise.
        unsafe { s.store_f16(p.cast(), x) };
    }
    #[inline(always)]
    unsafe fn load_one(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        f16_to_f32(unsafe { p.cast::<u16>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store_one(p: *mut u8, x: f32) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<u16>().write_unaligned(f32_to_f16(x)) };
    }
}

impl Storage for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_bf16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut u8, x: S::V) {
        // SAFETY: the caller's promise.
        unsafe { s.store_bf16(p.cast(), x) };
    }
    #[inline(always)]
    unsafe fn load_one(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        bf16_to_f32(unsafe { p.cast::<u16>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store_one(p: *mut u8, x: f32) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<u16>().write_unaligned(f32_to_bf16(x)) };
    }
}

/// Evaluates `$body` with `$T` naming the [`Storage`] of a dtype, or `$other` for a dtype that has none.
macro_rules! with_storage {
    ($dtype:expr, $T:ident => $body:expr, $other:expr) => {
        match $dtype {
            qwen_formats::DType::F32 => {
                type $T = $crate::kernels::simd::storage::F32;
                $body
            }
            qwen_formats::DType::F16 => {
                type $T = $crate::kernels::simd::storage::F16;
                $body
            }
            qwen_formats::DType::BF16 => {
                type $T = $crate::kernels::simd::storage::Bf16;
                $body
            }
            _ => $other,
        }
    };
}
pub(crate) use with_storage;
