//! Lanes in an array: portable, and the definition of what the vector types compute.

use super::{HALVES, Kernel, LANES, Simd};
use crate::kernels::math::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// Needs nothing.
#[derive(Debug, Clone, Copy)]
pub struct Scalar;

type V = [f32; LANES];

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(never)]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Scalar)
}

impl Simd for Scalar {
    type V = V;
    const TILE_ROWS: usize = 1;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }
    #[inline(always)]
    fn of(self, x: [f32; LANES]) -> V {
        x
    }
    #[inline(always)]
    fn to_array(self, x: V) -> [f32; LANES] {
        x
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: 16 readable values by the caller's promise.
        unsafe { p.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: V) {
        // SAFETY: 16 writable values by the caller's promise.
        unsafe { p.cast::<V>().write_unaligned(x) };
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        // SAFETY: 16 readable values by the caller's promise.
        unsafe { p.cast::<[u16; LANES]>().read_unaligned() }.map(f16_to_f32)
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: V) {
        // SAFETY: 16 writable values by the caller's promise.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(x.map(f32_to_f16)) };
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        // SAFETY: 16 readable values by the caller's promise.
        unsafe { p.cast::<[u16; LANES]>().read_unaligned() }.map(bf16_to_f32)
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u16) -> [V; 2] {
        // SAFETY: 32 readable values by the caller's promise.
        let pairs = unsafe { p.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        [pairs.map(|pair| bf16_to_f32(pair[0])), pairs.map(|pair| bf16_to_f32(pair[1]))]
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, x: V) {
        // SAFETY: 16 writable values by the caller's promise.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(x.map(f32_to_bf16)) };
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn scale_by_power(self, x: V, n: V) -> V {
        zip(x, n, |x, n| {
            // In two steps, neither of which leaves the normal range before the last rounding.
            let n = n as i32;
            let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
            x * power(n >> 1) * power(n - (n >> 1))
        })
    }
    #[inline(always)]
    fn reduce_add(self, x: V) -> f32 {
        let eight: [f32; 8] = std::array::from_fn(|i| x[i] + x[i + 8]);
        let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }
    #[inline(always)]
    fn reduce_max(self, x: V) -> f32 {
        let max = |a: f32, b: f32| if a > b { a } else { b };
        let eight: [f32; 8] = std::array::from_fn(|i| max(x[i], x[i + 8]));
        let four: [f32; 4] = std::array::from_fn(|i| max(eight[i], eight[i + 4]));
        max(max(four[0], four[2]), max(four[1], four[3]))
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        run(kernel)
    }
    #[inline(always)]
    fn transpose(self, rows: [V; LANES]) -> [V; LANES] {
        std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]))
    }
    #[inline(always)]
    unsafe fn turn_halves(self, rows: *const *const u8, offset: usize, turned: *mut u16, stride: usize) {
        for i in 0..LANES {
            for d in 0..HALVES {
                // SAFETY: the caller's promise.
                unsafe {
                    let x = (*rows.add(i)).add(offset + d * 2).cast::<u16>().read_unaligned();
                    turned.add(d * stride + i).write_unaligned(x);
                }
            }
        }
    }
}
